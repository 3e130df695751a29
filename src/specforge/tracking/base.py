"""Where numbers of a run go: one interface, a fan-out, and the choice of who writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Tracker(ABC):
    """Takes the rows of a run. Only rank 0 has real ones; nothing is opened before :meth:`begin`."""

    def begin(self, step: int, total_steps: int) -> None:
        """Called once, when it is known that ``step`` optimizer steps are done; rows past it are of a lost future and are dropped."""
        return None

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, Any], kind: str) -> None:
        """One row: ``step`` optimizer steps are done; ``kind`` is ``train`` or ``eval``; a value is a number or a list of numbers."""

    def message(self, text: str) -> None:
        """A line for the person who watches."""
        return None

    def flush(self) -> None:
        """Make everything logged so far survive a crash of the machine; called before each checkpoint."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release files and the terminal; idempotent."""


class NoTracker(Tracker):
    """Writes nothing: every rank but the first."""

    def log(self, step: int, metrics: Mapping[str, Any], kind: str) -> None:
        return None

    def close(self) -> None:
        return None


class Trackers(Tracker):
    """Hands everything to each of several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def begin(self, step: int, total_steps: int) -> None:
        for tracker in self.trackers:
            tracker.begin(step, total_steps)

    def log(self, step: int, metrics: Mapping[str, Any], kind: str) -> None:
        for tracker in self.trackers:
            tracker.log(step, metrics, kind)

    def message(self, text: str) -> None:
        for tracker in self.trackers:
            tracker.message(text)

    def flush(self) -> None:
        for tracker in self.trackers:
            tracker.flush()

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


def open_trackers(chosen: Tracker, run_dir: Path, rank: int) -> Tracker:
    """The tracker of this rank: on rank 0 ``metrics.jsonl`` and the console always, and the configured one; elsewhere nothing."""
    from specforge.tracking.console import ConsoleTracker
    from specforge.tracking.jsonl import JsonlTracker

    if rank != 0:
        return NoTracker()
    always: list[Tracker] = [JsonlTracker(run_dir=run_dir), ConsoleTracker()]
    return Trackers([*always, chosen] if not isinstance(chosen, JsonlTracker) else [chosen, always[1]])
