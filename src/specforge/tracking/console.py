"""What a person sees: a progress bar with rates and the numbers that matter on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specforge.tracking.base import Tracker
from specforge.tracking.jsonl import plain

TRAIN_COLUMNS = (
    ("loss", "loss", ".4f"),
    ("simulated_acc_len", "acc_len", ".3f"),
    ("lr", "lr", ".2e"),
    ("steps_per_second", "steps/s", ".2f"),
    ("tokens_per_second", "tokens/s", ",.0f"),
)
EVAL_COLUMNS = (
    ("walk_accept_length", "walk_accept_length", ".3f"),
    ("simulated_acc_len", "simulated_acc_len", ".3f"),
    ("accept_length", "accept_length", ".3f"),
    ("per_position_accuracy", "per_position_accuracy", ".3f"),
)


class ConsoleTracker(Tracker):
    """Shows rows and messages; away from a terminal at most one train line each ``seconds_between_lines`` seconds."""

    def __init__(self, console: Console | None = None, seconds_between_lines: float = 10.0) -> None:
        self.console = console or Console(stderr=True)
        self.seconds_between_lines = seconds_between_lines
        self.total_steps = 0
        self._progress: Progress | None = None
        self._last_line = -math.inf
        self._task: Any = None
        self._begun: tuple[int, float] = (0, time.monotonic())

    def begin(self, step: int, total_steps: int) -> None:
        self.total_steps = total_steps
        self._begun = (step, time.monotonic())
        if not self.console.is_terminal:
            return
        columns = (
            TextColumn("train"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[row]}"),
        )
        self._progress = Progress(*columns, console=self.console)
        self._task = self._progress.add_task("train", total=total_steps, completed=step, row="")
        self._progress.start()

    def log(self, step: int, metrics: Mapping[str, Any], kind: str) -> None:
        text = describe(metrics, TRAIN_COLUMNS if kind == "train" else EVAL_COLUMNS)
        if kind != "train":
            self.message(f"step {step}: {kind}: {text}")
        elif self._progress is not None:
            self._progress.update(self._task, completed=step, row=text)
        elif time.monotonic() - self._last_line >= self.seconds_between_lines or step >= self.total_steps:
            self._last_line = time.monotonic()
            self.message(f"step {step}/{self.total_steps}  {text}  remaining {self._remaining(step)}")

    def _remaining(self, step: int) -> str:
        first, since = self._begun
        if step <= first:
            return "?"
        seconds = (self.total_steps - step) * (time.monotonic() - since) / (step - first)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

    def message(self, text: str) -> None:
        # Through the progress bar's console, which moves the bar down instead of tearing it. No markup: paths hold brackets.
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def describe(metrics: Mapping[str, Any], columns: tuple[tuple[str, str, str], ...]) -> str:
    """``label value`` for each column that the row has."""
    parts = []
    for name, label, style in columns:
        value = plain(metrics.get(name))
        if isinstance(value, list):
            parts.append(f"{label} [{', '.join('-' if v is None else format(v, style) for v in value)}]")
        elif value is not None:
            parts.append(f"{label} {format(value, style)}")
    return "  ".join(parts)
