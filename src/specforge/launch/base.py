"""The contract of a launcher: frozen runs in, processes or jobs out. ``launcher=`` chooses one; nobody else starts a process of a run.

A launcher is built from ``conf/launcher/<name>.yaml``. It gets run folders whose configuration is frozen and checked, and never composes
anything itself, so that what changes in ``conf/`` later cannot reach a run that waits in a queue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

State = Literal["submitted", "running", "done", "failed", "interrupted"]
# (index of the task, what became of it, exit code once it ended, a word for the user such as the job id)
Changed = Callable[[int, State, int | None, str], None]


@dataclass(frozen=True)
class Task:
    """One frozen run (of any command): ``config_file`` is what ``launch.frontend.run_frozen`` reads, ``run_dir`` where it works.

    Training's ``config_file`` is ``run_dir/config.yaml``; another command on an existing run has its own file in a subfolder.
    """

    config_file: Path
    run_dir: Path
    label: str = ""


class Stopped(Exception):
    """Ctrl-C or SIGTERM came while tasks ran; they were told, and have ended. ``signum`` is the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


class Launcher(ABC):
    """Starts runs. ``remote`` says that they run on other machines than the one that asks, whose devices then say nothing."""

    remote: ClassVar[bool] = False

    @abstractmethod
    def submit_many(self, tasks: Sequence[Task], changed: Changed, folder: Path) -> list[int | None]:
        """Run the points of a sweep; returns one exit code a task, in order, or ``None`` for one that was submitted and not waited for.

        ``launcher=local`` runs them in processes of their own, ``launcher.parallel`` at a time, each with its share of the GPUs, and
        returns when all have ended. ``launcher=slurm`` submits **one job array** (with ``launcher.parallel`` as its limit) and returns
        at once, or with ``launcher.wait=true`` when all have ended; with ``launcher.dry_run=true`` it writes the plan of each and
        returns ``None`` for each. A task that fails stops no other.

        ``changed(index, state, exit_code, note)`` is called in the caller's thread when a task is ``submitted`` (note: its job id),
        begins (``running``) and ends (``done``, ``failed``, or ``interrupted`` when a signal ended it), so that a caller can keep its
        record up to date while others still run. A task that is never announced was not begun. ``folder`` is the sweep's own folder,
        for what belongs to all tasks together (the text of the array's script, its logs).

        Raises:
            Stopped: Ctrl-C or SIGTERM came; what ran was told and has ended (``changed`` was called for each), the rest not begun.
            RunError: nothing could be submitted at all, for example with SLURM's own message.
        """

    @abstractmethod
    def start(self, task: Task) -> int:
        """Run or submit one run in the foreground of the command line; returns the exit code (0 for a submitted job)."""


def open_launcher(config: dict[str, Any]) -> Launcher:
    """The launcher that a frozen configuration names."""
    from specforge.config.build import build

    return build(config["launcher"], expects=Launcher, plugins=config.get("plugins") or ())  # type: ignore[type-abstract]
