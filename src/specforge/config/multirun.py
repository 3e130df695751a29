"""What Hydra makes of a ``-m`` line before any point exists: which sweeper, its parameters, and the values that are not swept.

Our own expansion (:mod:`specforge.config.points`) takes the place of Hydra's basic sweeper. Any other sweeper plug-in runs as Hydra runs it,
only that the points which it proposes are started by us: Hydra's launchers never see them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specforge.config import schema
from specforge.config.compose import VERSION_BASE, command_line, explain, flatten, to_plain, unknown_key_message
from specforge.config.from_run import split_flags
from specforge.config.locate import config_dir
from specforge.errors import ConfigError, MissingExtraError

BASIC = "basic"
# Sweepers that are plug-ins in a package of their own, with the extra that installs them.
_EXTRAS = {"optuna": ("hydra-optuna-sweeper", "optuna")}
# Optuna's plug-in minimises, and gives up at the first failure, unless it is told otherwise.
_GOAL = {"optuna": ("hydra.sweeper.direction=maximize", "hydra.sweeper.max_failure_rate=1.0")}
Launch = Callable[[list[list[str]]], Sequence[float | None]]


@dataclass(frozen=True)
class Multirun:
    """``overrides`` are those of the points, ``hydra.sweeper.params`` before the command line; ``batch`` is how many points at a time."""

    sweeper: str
    overrides: list[str]
    batch: int | None
    config: dict[str, Any]  # composed without the swept values; empty when that failed
    choices: dict[str, str | None]
    searched: list[str]  # keys whose values the sweeper chooses; empty for the basic sweeper, which chooses none


def read_multirun(command: str, arguments: Sequence[str]) -> Multirun:
    """Compose what all points share; ``arguments`` are flags and overrides without ``-m``.

    A mistake in a value that is no business of Hydra's is left for the check of the points, which sees all of them at once.

    Raises:
        ConfigError: ``hydra/launcher`` was named, or a parameter of the sweeper does not exist.
        MissingExtraError: the sweeper is a plug-in that is not installed.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    flags, overrides = split_flags(arguments)
    arguments = [*flags, *overrides]  # Hydra takes flags between overrides for mistakes
    words = [a.lstrip("+") for a in arguments]
    if any(word.startswith(("hydra/launcher=", "hydra.launcher.")) for word in words):
        raise ConfigError(
            "hydra/launcher: points are started by launcher=, not by a launcher of Hydra. Use launcher=local or launcher=slurm."
        )
    try:
        master = _compose_master(command, arguments)
    except (HydraException, OmegaConfBaseException, ValueError, AttributeError, AssertionError) as error:
        if any(word.startswith(("hydra.", "hydra/")) for word in words):
            _explain_sweeper(command, arguments, words, error)
        return Multirun(BASIC, _task_words(arguments), None, {}, {}, [])
    hydra = master.hydra
    name = str(hydra.runtime.choices.get("hydra/sweeper") or BASIC)
    params = [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]
    choices = {str(k): v for k, v in hydra.runtime.choices.items() if k in schema.GROUPS}
    task = [*params, *hydra.overrides.task]
    searched = [] if name == BASIC else _searched(task)
    return Multirun(name, task, hydra.sweeper.get("max_batch_size"), _task_values(master), choices, searched)


def propose(command: str, arguments: Sequence[str], sweeper: str, folder: Path, launch: Launch) -> None:
    """Let the sweeper that the line names propose points until it has enough; ``launch`` runs some and gives their values.

    A value is to be maximised; ``None`` is a point that failed. ``folder`` is where the sweeper writes its own results. Whatever ``launch``
    raises ends the sweep.

    Raises:
        ConfigError: the sweeper refuses its parameters or the search space.
    """
    from hydra.core.utils import JobReturn, JobStatus
    from hydra.errors import HydraException
    from hydra.plugins.launcher import Launcher
    from omegaconf.errors import OmegaConfBaseException

    class Points(Launcher):
        """Hands a batch of override lists over and returns what came of them."""

        def setup(self, **_: Any) -> None:
            return None

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            with _hydra_set_aside():  # the points are composed by Hydra too, which knows only one composition at a time
                values = launch([list(line) for line in job_overrides])
            # A value that is no number is a failed trial to the plug-ins; a stored exception would be printed by Hydra each time it is asked for.
            return [
                JobReturn(overrides=line, status=JobStatus.COMPLETED, _return_value=value)
                for line, value in zip(job_overrides, values, strict=True)
            ]

    flags, overrides = split_flags(arguments)
    line = [*flags, *_GOAL.get(sweeper, ()), *_last_of_each(overrides), f"hydra.sweep.dir='{folder}'"]
    with _quiet(sweeper):
        try:
            _hydra_multirun(command, line, "instantiate_launcher", lambda **_: Points())
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(f"hydra/sweeper={sweeper}: {str(explain(error)).strip()}") from error


def _compose_master(command: str, arguments: Sequence[str]) -> Any:
    seen: list[Any] = []

    class Looking:
        def sweep(self, arguments: list[str]) -> None:
            return None

    def look(*, config: Any, **_: Any) -> Looking:
        seen.append(config)
        return Looking()

    _hydra_multirun(command, arguments, "instantiate_sweeper", look)
    return seen[0]


def _task_values(master: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    try:
        return to_plain(OmegaConf.create({str(k): v for k, v in master.items() if k != "hydra"}))
    except ConfigError:
        return {}  # a value that only a point has is missing


def _explain_sweeper(command: str, arguments: Sequence[str], words: Sequence[str], error: Exception) -> None:
    """Raise what is wrong with the line's words for Hydra; returns when the mistake lies elsewhere."""
    named = next((word.partition("=")[2] for word in words if word.startswith("hydra/sweeper=")), BASIC)
    if isinstance(error, AttributeError | AssertionError):  # how OmegaConf answers when a null is given keys
        raise ConfigError("hydra.sweeper.params: can be given in a YAML file only (an experiment). On the command line write key=a,b.") from error
    refused = explain(error)
    if named in _EXTRAS and f"hydra/sweeper/{named}" in str(error):
        raise MissingExtraError(*_EXTRAS[named], f"hydra/sweeper={named}") from error
    if refused.key.startswith("hydra.sweeper."):
        kept = [a for a in arguments if not a.lstrip("+").startswith("hydra.sweeper.")]
        with contextlib.suppress(Exception):
            known = flatten({"hydra": {"sweeper": dict(_compose_master(command, kept).hydra.sweeper)}})
            raise_with = unknown_key_message(refused.key, list(known)).replace("specforge --cfg job", "specforge --cfg hydra")
            refused = type(refused)("key", refused.key, raise_with)
    if "hydra" in str(refused):
        raise ConfigError(str(refused)) from error


def _last_of_each(overrides: Sequence[str]) -> list[str]:
    """A key that is given twice has its last value; the plug-ins prefer a fixed one, wherever it stands."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    last = {(o.key_or_group, o.is_delete()): o.input_line or "" for o in parsed}
    return list(last.values())


def _searched(overrides: Sequence[str]) -> list[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return [o.key_or_group for o in OverridesParser.create().parse_overrides(list(overrides)) if o.is_sweep_override()]


def _task_words(arguments: Sequence[str]) -> list[str]:
    return [word for word in split_flags(arguments)[1] if not word.lstrip("+~").startswith(("hydra.", "hydra/"))]


def _hydra_multirun(command: str, arguments: Sequence[str], method: str, replacement: Callable[..., Any]) -> None:
    """Hydra's own multirun of a line with one of its plug-in factories replaced; it starts no job of its own."""
    from hydra import main as hydra_main

    schema.register()
    with command_line([*arguments, "--multirun"]), _replaced(method, replacement):
        hydra_main(version_base=VERSION_BASE, config_path=str(config_dir()), config_name=command)(lambda cfg: None)()


@contextlib.contextmanager
def _replaced(method: str, replacement: Callable[..., Any]) -> Iterator[None]:
    from hydra.core.plugins import Plugins

    plugins = Plugins.instance()
    setattr(plugins, method, replacement)  # on the instance: the class keeps its own
    try:
        yield
    finally:
        delattr(plugins, method)


@contextlib.contextmanager
def _hydra_set_aside() -> Iterator[None]:
    from hydra.core.global_hydra import GlobalHydra

    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


@contextlib.contextmanager
def _quiet(sweeper: str) -> Iterator[None]:
    """Our own lines say what a point came to; the plug-in's log would repeat it."""
    logger = logging.getLogger("hydra_plugins")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    if sweeper == "optuna":
        with contextlib.suppress(ImportError):
            import optuna

            optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
