"""From a command line to a running command: compose, check, derive, rules, run folder, then hand over.

Everything up to the run folder leaves nothing behind, so that a mistake costs nothing; after it the command reads the frozen folder.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specforge.config import freeze
from specforge.config.build import build, component_class
from specforge.config.check import MISSING, check, check_node
from specforge.config.compose import compose
from specforge.config.derive import derive, run_name
from specforge.config.from_run import compose_from_run, run_argument, split_flags
from specforge.config.rules import enforce
from specforge.config.schema import GROUPS, SCHEMAS
from specforge.config.undo import undone_when_refused
from specforge.errors import ConfigError, SpecForgeError
from specforge.launch.outcome import mark_success

if TYPE_CHECKING:
    from specforge.modeling.target_facts import TargetFacts

# Commands that only print: no run folder.
EPHEMERAL = ("show_sample",)
# Groups whose files a command reads; the others read what a run or their own keys name.
_READ_BY = {
    "train": GROUPS,
    "plan": ("data", "draft"),  # features may still be to come
    "prepare": ("data",),
    "capture": ("data",),
    "show_sample": ("data",),
    "evaluate": ("data", "topology"),
}


class Interrupted(SpecForgeError):
    """Ctrl-C after the run folder was made; the message says what is kept."""

    exit_code = 130


@dataclass
class Ready:
    """A checked configuration. ``run_dir`` is set when the command works on an existing run."""

    command: str
    config: dict[str, Any]
    choices: dict[str, str | None]
    overrides: list[str]
    facts: TargetFacts | None
    run_dir: Path | None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def report(line: str) -> None:
    """One line about a step that takes time, on stderr so that piped output stays clean."""
    print(f"specforge: {line}", file=sys.stderr, flush=True)


def make_ready(command: str, arguments: Sequence[str], *, prepare: bool = True) -> Ready | None:
    """Compose and check; ``None`` when a flag such as --cfg printed something instead. Writes no run folder.

    Raises:
        SpecForgeError: whatever is wrong with the command line, the YAML files, the target or their combination.
    """
    run = run_argument(arguments) if "run" in SCHEMAS[command].__dataclass_fields__ else None
    flags, _ = split_flags(arguments)
    if run is None or any(f in ("--help", "-h", "--info", "-i", "--hydra-help", "-sc", "--shell-completion") for f in flags):
        composed = compose(command, arguments)
    elif "--cfg" in flags or "-c" in flags:
        _print_config(compose_from_run(command, [a for a in arguments if "=" in a], run).config)
        return None
    else:
        composed = compose_from_run(command, arguments, run)
    if composed is None:
        return None
    config = composed.config
    if config.get("cache_dir") in (None, MISSING):
        raise ConfigError("cache_dir: missing — set cache_dir=<folder> or the environment variable SPECFORGE_CACHE.")
    config["name"] = run_name(config, composed.choices)
    check(config)
    derived = derive(config, report, prepare=prepare)
    problems = check_node(derived.config["draft"], "draft", config.get("plugins") or ()) if derived.facts else []
    if problems:
        raise ConfigError(problems)
    if derived.facts is not None:  # else plan says that the target is still to come
        check_inputs(derived.config, command if prepare else "plan")
    warnings = enforce(derived.config, composed.choices, derived.facts, command)
    run_dir = Path(config["run"]) if run is not None else None
    return Ready(command, derived.config, composed.choices, composed.overrides, derived.facts, run_dir, warnings, derived.notes)


def check_inputs(config: dict[str, Any], command: str) -> None:
    """Files that the configuration names must be there before a run folder is made.

    A component that reads files offers ``check_paths()`` and a command with keys of its own ``check_inputs(config)``; both raise
    their own error.
    """
    if command == "export" and not config["run"]:
        raise ConfigError("run: missing — export writes the draft of a training run. Name it with run=outputs/<name>/<run>.")
    if command == "evaluate" and not (config["run"] or config["draft_folder"]):
        raise ConfigError("run: missing — name a run with run=outputs/<name>/<run>, or a published draft with draft_folder=<folder>.")
    if command not in ("train", "plan") and hasattr(module := command_module(command), "check_inputs"):
        module.check_inputs(config)
    plugins = config.get("plugins") or ()
    for group in _READ_BY.get(command, ()):
        node = config.get(group)
        if isinstance(node, dict) and "_target_" in node and hasattr(component_class(node, plugins), "check_paths"):
            component: Any = build(node, expects=object, plugins=plugins)
            component.check_paths()


def _print_config(config: dict[str, Any]) -> None:
    import yaml

    sys.stdout.write(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def freeze_ready(ready: Ready) -> tuple[Path, Path]:
    """Make or reuse the run folder and write the frozen files; returns the run folder and the configuration file to run."""
    config = ready.config
    if ready.run_dir is not None and ready.command != "train":
        # The run's own config.yaml stays what it was; this command's lies in its subfolder.
        folder = ready.run_dir / ready.command
        folder.mkdir(exist_ok=True)
        path = folder / f"config-{time.strftime('%Y%m%d-%H%M%S')}-{freeze.signature(config)[:8]}.yaml"
        frozen = {"format_version": freeze.FORMAT_VERSION, "command": ready.command, "choices": dict(ready.choices), **config}
        import yaml

        freeze.write_atomic(path, yaml.safe_dump(frozen, sort_keys=False, allow_unicode=True, width=140))
        return ready.run_dir, path
    run_dir = ready.run_dir or freeze.make_run_folder(config)
    if "run" in config and ready.command == "train":
        config = {**config, "run": None}  # a frozen run names no other run, also when it is continued
    freeze.freeze(run_dir, config, command=ready.command, choices=ready.choices, overrides=ready.overrides)
    if ready.command == "train":
        freeze.write_plan(run_dir, make_plan(config).to_json())
    return run_dir, run_dir / freeze.CONFIG_FILE


def execute(ready: Ready) -> int:
    """Freeze the run and run it in this process (or under the launcher); returns the exit code."""
    for warning in ready.warnings:
        report(f"warning: {warning}")
    if ready.command in EPHEMERAL:
        with tempfile.TemporaryDirectory(prefix="specforge-") as scratch:
            return command_module(ready.command).run(ready.config, Path(scratch))
    remote = launches_elsewhere(ready.config)
    with contextlib.ExitStack() as held, contextlib.ExitStack() as guard:
        continued = ready.run_dir is not None and ready.command == "train"
        if continued:  # before its files are written: another process may be at work in it, here or as a job
            from specforge.launch.slurm import require_free

            require_free(ready.run_dir)  # type: ignore[arg-type]
            guard.enter_context(freeze.lock(ready.run_dir))  # type: ignore[arg-type]
        undo = held.enter_context(undone_when_refused(ready.run_dir, report))
        undo.made = run_dir, path = freeze_ready(ready)
        report(f"run folder {shown(run_dir)}")
        if remote:
            guard.close()  # the job takes the lock, where it runs
        return run_frozen(path, run_dir, locked=continued)


def launches_elsewhere(config: dict[str, Any]) -> bool:
    """Whether the launcher starts runs on other machines."""
    return bool(getattr(component_class(config["launcher"], config.get("plugins") or ()), "remote", False))


def run_frozen(path: Path, run_dir: Path, *, locked: bool = False) -> int:
    """Run or submit what a frozen configuration file says, in ``run_dir``; ``locked`` when the caller holds the run folder's lock.

    Raises:
        Interrupted: Ctrl-C; the message says what is kept and how to go on.
    """
    config = freeze.read_config_file(path, run_dir)
    if launches_elsewhere(config):
        from specforge.launch.base import Task, open_launcher

        return open_launcher(config).start(Task(path, run_dir))
    return run_here(path, run_dir, locked=locked)


def run_here(path: Path, run_dir: Path, *, locked: bool = False) -> int:
    """As :func:`run_frozen`, on this machine whatever the launcher is: what a job does with its command."""
    config = freeze.read_config_file(path, run_dir)
    command = config["command"]
    try:
        if command != "train":
            if config["num_threads"] is not None:  # the worker does this for training
                import torch

                torch.set_num_threads(int(config["num_threads"]))
            code = int(command_module(command).run(config, run_dir))
            if code == 0 and path.parent == run_dir:  # training says so by itself, in every launcher
                mark_success(run_dir)
            return code
        with contextlib.nullcontext() if locked else freeze.lock(run_dir):
            return _train(config, run_dir)
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted. {kept(run_dir, command)}") from None


def _train(config: dict[str, Any], run_dir: Path) -> int:
    plan = make_plan(config)
    if num_processes(plan) > 1:
        from specforge.launch import local

        return local.start(plan, run_dir)
    from specforge.launch import worker

    return worker.run_role(run_dir)


def command_module(command: str) -> Any:
    """``specforge.commands.<command>``, which offers ``run(config, run_dir) -> int``."""
    return importlib.import_module(f"specforge.commands.{command}")


def make_plan(config: dict[str, Any]) -> Any:
    from specforge.launch import plan

    return plan.make_plan(config)


def num_processes(plan: Any) -> int:
    """How many processes a plan starts."""
    return len(plan.processes)


def kept(run_dir: Path, command: str) -> str:
    """What a stopped run leaves, and the command that goes on from there."""
    from specforge.training.checkpoint import complete_checkpoints

    folder = run_dir / "checkpoints"
    try:
        complete = complete_checkpoints(folder)
    except SpecForgeError:
        complete = []  # a damaged one is for the next start to name
    what = f"checkpoint {complete[-1].path.name}" if complete else "no checkpoint yet"
    if command == "train":
        return f"Kept: {shown(run_dir)} ({what}). Go on with: specforge run={shown(run_dir)}"
    return f"Kept: {shown(run_dir)}. Start the same command again; work that was finished is not repeated."


def shown(path: Path) -> str:
    """A path as short as it can be typed."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
