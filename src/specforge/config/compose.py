"""Composition by Hydra in this process: command line in, one plain resolved configuration with the choices made out.

Hydra's own ``hydra.main`` does the parsing, so every flag of it (--cfg, --info, --help, --config-dir, -sc) works; but it runs no
job: it hands the composed configuration over and everything after that (checks, run folder, start) is ours. Its errors become
:class:`ConfigError` with its list of options kept and a "did you mean" added.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specforge.config import schema
from specforge.config.locate import config_dir
from specforge.errors import ConfigError

VERSION_BASE = "1.3"


@dataclass
class Composed:
    """A configuration before checks: ``config`` is plain and resolved; a missing value is the string ``???``."""

    command: str  # name of the primary config
    config: dict[str, Any]
    choices: dict[str, str | None]
    overrides: list[str]
    sources: list[str] = field(default_factory=list)


def compose(command: str, arguments: Sequence[str]) -> Composed | None:
    """Compose the primary config ``command`` with a Hydra command line (flags and overrides).

    Returns ``None`` when a flag made Hydra print something (--cfg, --help, --info, completion) in place of composing.

    Raises:
        ConfigError: Hydra or OmegaConf refuses the command line or a YAML file; all unknown keys and options are named at once.
    """
    schema.register()
    arguments = [a for a in arguments if a != "experiment=null"]  # none is the default, but Hydra takes no null for a group
    empty = [key for key, _, value in (a.partition("=") for a in arguments) if value == "null" and key in schema.GROUPS]
    if empty:
        raise ConfigError([f"{key}: null — every run needs one. Choose {key}=<option>; specforge --help lists them." for key in empty])
    refused: list[tuple[str, str]] = []  # kind and name of what was taken off the line, to find the next mistake as well
    remaining, problems = list(arguments), list[str]()
    composed: Composed | None = None
    while True:
        try:
            composed = _run_hydra(command, remaining)
            break
        except _Refused as error:
            kept = [a for a in _without_printing_flags(remaining) if a.lstrip("+~").split("=")[0] != error.key]
            if error.kind == "other" or len(kept) == len(_without_printing_flags(remaining)):
                problems.append(str(error))
                break
            refused.append((error.kind, error.key if error.kind == "key" else str(error)))
            remaining = kept
    problems += _unknown_sizes(remaining)
    known = list(flatten(composed.config)) if composed else []
    problems = [unknown_key_message(what, known) if kind == "key" else what for kind, what in refused] + problems
    if problems:
        raise ConfigError(problems)
    return composed


def _unknown_sizes(arguments: Sequence[str]) -> list[str]:
    """Hydra passes over a sizes= that names no file, because the group is optional; a typo in it must not go unseen."""
    options = _sizes()
    chosen = [a.partition("=")[2] for a in arguments if a.startswith("sizes=")]
    return [f"sizes={name}: no such option. Available options: {', '.join(options)}." for name in chosen if name not in options]


def _sizes() -> list[str]:
    from specforge.config.help import group_options

    return group_options().get("sizes", [])


def _run_hydra(command: str, arguments: Sequence[str]) -> Composed | None:
    from hydra import main as hydra_main
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    found: list[tuple[DictConfig, DictConfig]] = []
    try:
        with command_line(arguments):
            hydra_main(version_base=VERSION_BASE, config_path=str(config_dir()), config_name=command)(
                lambda cfg: found.append((cfg, HydraConfig.get()))  # type: ignore[arg-type]
            )()
    except yaml.MarkedYAMLError as error:
        raise _Refused("other", "", _bad_syntax(error)) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise explain(error) from error
    if not found:
        return None
    cfg, hydra = found[0]
    made = {str(k): v for k, v in hydra.runtime.choices.items() if not str(k).startswith("hydra/")}
    if made.get("sizes") not in _sizes():
        made.pop("sizes", None)  # named by the choices, but there is no such file: nothing was chosen
    choices = {k: made[k] for k in (*schema.GROUPS, *made) if k in made}
    sources = [s.path for s in hydra.runtime.config_sources if s.provider not in ("hydra", "schema")]
    return Composed(command, to_plain(cfg), choices, list(hydra.overrides.task), sources)


def _without_printing_flags(arguments: Sequence[str]) -> list[str]:
    """The line without --cfg, --info and the like, so that looking for further mistakes prints nothing."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("--cfg", "-c", "--info", "-i", "--package", "-p"):
            skip = True
        elif argument not in ("--resolve", "--help", "-h"):
            kept.append(argument)
    return kept


def compose_overrides(command: str, overrides: Sequence[str], extra_dirs: Sequence[str] = ()) -> Composed:
    """Compose from plain overrides, without any flag but ``--config-dir``; for diff, sweeps, runs made from a run, and tests."""
    flags = [argument for directory in extra_dirs for argument in ("--config-dir", directory)]
    composed = compose(command, [*flags, *overrides])
    assert composed is not None
    return composed


def to_plain(cfg: DictConfig) -> dict[str, Any]:
    """Resolved plain containers; missing values stay ``???`` so that ``config.check`` can report all of them together."""
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'configuration'}: cannot be resolved: {_first_line(error)}") from error
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items()}


@contextmanager
def command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Let ``hydra.main`` see ``arguments``, and raise its errors here rather than print them and leave."""
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    program = "specforge" if Path(argv[0]).name in ("__main__.py", "") or Path(argv[0]).suffix == ".py" else argv[0]
    sys.argv = [program, *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


class _Refused(Exception):
    """What Hydra refused: ``kind`` is key, option or other; ``key`` is the part of the command line before the equals sign."""

    def __init__(self, kind: str, key: str, message: str) -> None:
        self.kind, self.key = kind, key
        super().__init__(message)


def explain(error: BaseException) -> _Refused:
    """One message for an error of Hydra: what was wrong, what is allowed, how to fix it."""
    text = str(error).strip()
    cause = error.__cause__
    if unknown := re.search(r"Could not find '([^']+)'", text):
        return _Refused("option", unknown.group(1).rpartition("/")[0], _unknown_option(text, unknown.group(1)))
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return _Refused("key", unknown.group(1), text)
    if unknown := re.search(r"config group '([^']+)' does not exist", text):
        return _Refused("key", unknown.group(1), text)
    if type(error).__name__ == "OverrideParseException":
        reason = next((line for line in text.splitlines() if " at " in line or "error" in line.lower()), text.splitlines()[0])
        return _Refused(
            "other",
            "",
            f"{getattr(error, 'override', '')}: not a valid override ({reason.strip()}). Allowed is key=value; "
            "quote a value with spaces, commas, brackets or letters beyond a-z twice, for example 'name=\"a, b\"'.",
        )
    if in_file := re.match(r"In '([^']+)': \w+ raised while composing config:\n(.+)", text):
        return _Refused("other", "", _bad_yaml(*in_file.groups()))
    if twice := re.match(r"(?s)Could not append to config.*already at '([^']+)'", text):
        return _Refused("other", twice.group(1), f"+{twice.group(1)}: the key exists already. Write it without the plus sign.")
    if ambiguous := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        key, value = ambiguous.groups()
        return _Refused("other", key, f"{key}={value}: several values. Add -m to run once for each, or write a list as '{key}=[{value}]'.")
    if isinstance(cause, OmegaConfBaseException):
        return _Refused("other", "", _yaml_or_value(text, cause))
    return _Refused("other", "", text or type(error).__name__)


def _unknown_option(text: str, name: str) -> str:
    group, _, option = name.rpartition("/")
    options = re.findall(r"(?m)^\t(\S+)$", text.split("Config search path")[0])
    message = f"{group or 'config'}={option}: no such option."
    if options:
        message += did_you_mean(option, options, prefix=f"{group}=") + f" Available options in '{group}': {', '.join(options)}."
    return message + f" Add your own with --config-dir DIR and DIR/{name}.yaml."


def unknown_key_message(key: str, known: Sequence[str]) -> str:
    """The message for a key that does not exist; ``known`` are the existing leaf keys."""
    parent = key.rpartition(".")[0]
    inner = sorted({k.rpartition(".")[0] for k in known if "." in k} | {k.split(".")[0] for k in known})
    siblings = sorted(k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == parent)
    hint = did_you_mean(key, [*known, *inner])
    allowed = f" Keys of {parent}: {', '.join(siblings)}." if parent and siblings else ""
    return f"{key}: no such key.{hint}{allowed} specforge --cfg job prints every key."


def did_you_mean(word: str, known: Sequence[str], prefix: str = "") -> str:
    """`` Did you mean 'x'?`` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if not near:
        return ""

    def likeness(candidate: str) -> tuple[float, int]:  # of equally near words the one that begins alike
        return difflib.SequenceMatcher(None, candidate, word).ratio(), len(os.path.commonprefix([candidate, word]))

    return f" Did you mean '{prefix}{max(near, key=likeness)}'?"


def _yaml_or_value(text: str, cause: OmegaConfBaseException) -> str:
    """A root value of the wrong type, or another refusal of OmegaConf."""
    reason = _first_line(cause)
    place = text.splitlines()[0].rstrip(":") if text and text != "None" else (cause.full_key or "configuration")
    if edited := re.match(r"Error merging override ([^=]+)=(.*)", place):
        return f"{edited.group(1)}: '{edited.group(2)}': {reason}. specforge --cfg job prints the default."
    return f"{place}: {reason}."


def _bad_yaml(file: str, reason: str) -> str:
    """A typo or a wrong type at the root of a YAML file."""
    if unknown := re.match(r"Key '([^']+)' not in", reason):
        key = unknown.group(1)
        hint = did_you_mean(key, root_keys()) or f" Allowed: {', '.join(root_keys())}."
        return f"{file}.yaml: {key}: no such key at the root.{hint}"
    return f"{file}.yaml: {reason}."


def _bad_syntax(error: yaml.MarkedYAMLError) -> str:
    """A file that is no YAML: its place and what the parser stumbled over."""
    mark = error.problem_mark or error.context_mark
    place = f"{mark.name}, line {mark.line + 1}" if mark else "a YAML file"
    return f"{place}: is not valid YAML: {error.problem or error.context}. Correct that line."


def root_keys() -> list[str]:
    """Every key that some command has at its root."""
    names: dict[str, None] = {}
    for root in schema.SCHEMAS.values():
        names.update(dict.fromkeys(root.__dataclass_fields__))
    return list(names)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaf keys by dotted path; a list is a leaf, an empty dict too."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            leaves.update(flatten(value, f"{path}."))
        else:
            leaves[path] = value
    return leaves


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
