"""TensorBoard event files in ``run_dir/tensorboard``: the same rows as ``metrics.jsonl``, as curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from specforge.errors import MissingExtraError
from specforge.tracking.base import Tracker
from specforge.tracking.jsonl import plain


class TensorBoardTracker(Tracker):
    """Writes scalars ``<kind>/<metric>``; a list becomes ``<kind>/<metric>/<index>``."""

    runtime_arguments: ClassVar[tuple[str, ...]] = ("run_dir",)

    def __init__(self, *, run_dir: Path, flush_seconds: Annotated[int, Field(ge=1)]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("tensorboard", "track", "tracker=tensorboard") from error
        self._writer_class = SummaryWriter
        self._folder = run_dir / "tensorboard"
        self._flush_seconds = flush_seconds
        self._writer: Any = None

    def begin(self, step: int, total_steps: int) -> None:
        # purge_step hides the events of steps that a resumed run makes again.
        self._writer = self._writer_class(str(self._folder), purge_step=step + 1 if step else None, flush_secs=self._flush_seconds)

    def log(self, step: int, metrics: Mapping[str, Any], kind: str) -> None:
        if self._writer is None:
            self.begin(0, 0)
        for name, value in flat_scalars(metrics):
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def flat_scalars(metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Every finite number of a row with its name; lists and mappings are spread out, text is left out."""
    found: list[tuple[str, float]] = []
    for name, value in metrics.items():
        value = plain(value)
        if isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, dict):
            found += [(f"{name}/{key}", number) for key, number in flat_scalars(value)]
        elif isinstance(value, int | float):
            found.append((name, float(value)))
    return found
