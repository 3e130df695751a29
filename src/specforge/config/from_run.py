"""Composition for a command that works on an existing run: the run's frozen values, then this command line on top.

``run=outputs/...`` makes every node default to the frozen one. A group override (``evaluator=long``) composes that group alone; a value
override changes one key. The command's own keys (``checkpoint``, ``format``, ...) come from its primary config.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specforge.config import schema
from specforge.config.compose import Composed, compose, flatten, to_plain, unknown_key_message
from specforge.config.freeze import read_config
from specforge.errors import ConfigError

_BOOKKEEPING = ("format_version", "command", "choices")


def run_argument(arguments: Sequence[str]) -> str | None:
    """The value of the last ``run=`` on a command line; ``None`` if there is none or it is null."""
    values = [a.partition("=")[2] for a in arguments if a.startswith("run=")]
    value = values[-1].strip("'\"") if values else ""
    return value if value not in ("", "null") else None


def compose_from_run(command: str, arguments: Sequence[str], run: str) -> Composed:
    """The configuration of ``command`` on the run folder ``run``.

    Raises:
        ConfigError: not a run folder, or an override that does not fit; all of them at once.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    run_dir = Path(run).expanduser().absolute()
    frozen = read_config(run_dir)
    if frozen["command"] != "train":
        raise ConfigError(f"run: {run} — is a folder of the command {frozen['command']}. Give the folder of a training run.")
    flags, overrides = split_flags(arguments)
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        from specforge.config.compose import explain

        raise ConfigError(str(explain(error))) from error
    groups = [o.input_line for o in parsed if o.key_or_group in schema.GROUPS and o.input_line]
    if any(o.key_or_group == "experiment" for o in parsed):
        raise ConfigError(f"experiment: a run keeps its own; remove experiment=..., or start without run={run}.")
    fresh = compose(command, [*flags, *groups])
    assert fresh is not None
    config = _base(fresh, frozen, command)
    choices = {**frozen["choices"], **({} if command == "train" else {group: fresh.choices.get(group) for group in _OF_TRAINING})}
    for line in groups:
        group = line.partition("=")[0].lstrip("+")
        config[group], choices[group] = fresh.config[group], fresh.choices[group]
    values = [o for o in parsed if o.key_or_group not in schema.GROUPS]
    config = _apply(config, values)
    config["run"] = str(run_dir)
    return Composed(command, config, choices, overrides, fresh.sources)


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their values, and the overrides, each in order."""
    flags: list[str] = []
    overrides: list[str] = []
    takes_value = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--cfg", "-c", "--info", "-i", "--package", "-p")
    rest = iter(arguments)
    for argument in rest:
        if argument in takes_value:
            flags += [argument, *([value] if (value := next(rest, None)) is not None else [])]
        elif argument.startswith("-"):
            flags.append(argument)
        else:
            overrides.append(argument)
    return flags, overrides


def config_dirs(arguments: Sequence[str]) -> list[str]:
    """The folders given with ``--config-dir``, absolute."""
    return [str(Path(b).absolute()) for a, b in zip(arguments, arguments[1:], strict=False) if a in ("--config-dir", "-cd")]


# What only a continued training takes from its run: nobody expects `export` to wait in a queue because training did.
_OF_TRAINING = ("launcher",)


def _base(fresh: Composed, frozen: dict[str, Any], command: str) -> dict[str, Any]:
    """Frozen values under the keys that this command has; its own keys as composed."""
    root = schema.SCHEMAS[command].__dataclass_fields__
    own = [k for k in root if k not in schema.Root.__dataclass_fields__]
    left_out = own if command == "train" else [*own, *_OF_TRAINING]
    values = {k: v for k, v in frozen.items() if k not in _BOOKKEEPING and k in root and k not in left_out}
    return copy.deepcopy({**fresh.config, **values})


def _apply(config: dict[str, Any], overrides: Sequence[Any]) -> dict[str, Any]:
    problems: list[str] = []
    # Not OmegaConf.create(config) for all of it: a frozen string may hold '${' and must stay as it is.
    edited = copy.deepcopy(config)
    for override in overrides:
        key, parents = override.key_or_group, override.key_or_group.split(".")
        node: Any = edited
        for part in parents[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        exists = isinstance(node, dict) and parents[-1] in node
        if key.startswith("hydra."):
            continue
        new = isinstance(node, dict) and len(parents) > 1 and (override.is_add() or override.is_force_add())
        if not isinstance(node, dict) or not (exists or new):  # the root's keys are fixed, those of a component are checked later
            problems.append(unknown_key_message(key, list(flatten(config))))
        elif override.is_delete():
            del node[parents[-1]]
        else:
            node[parents[-1]] = _plain(override.value(), key)
    if problems:
        raise ConfigError(problems)
    return edited


def _plain(value: Any, key: str) -> Any:
    try:
        return to_plain(OmegaConf.create({"value": value}))["value"]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {value!r} — {str(error).splitlines()[0]}") from error
