"""``run_dir/metrics.jsonl``: one JSON object a line, always written, each step once, also after a crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar

from specforge.tracking.base import Tracker

FILE_NAME = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Appends ``{"step", "kind", …metrics}``; every line reaches the operating system at once, so a killed process loses none.

    Values that are NaN or infinite become null, since JSON has no word for them.
    """

    runtime_arguments: ClassVar[tuple[str, ...]] = ("run_dir",)

    def __init__(self, *, run_dir: Path) -> None:
        self.path = run_dir / FILE_NAME
        self._stream: IO[str] | None = None

    def begin(self, step: int, total_steps: int) -> None:
        truncate_after(self.path, step)

    def log(self, step: int, metrics: Mapping[str, Any], kind: str) -> None:
        if self._stream is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self.path.open("a", encoding="utf-8")
        row = {"step": step, "kind": kind, **{name: plain(value) for name, value in metrics.items()}}
        self._stream.write(json.dumps(row, allow_nan=False) + "\n")
        self._stream.flush()

    def flush(self) -> None:
        if self._stream is not None:
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def plain(value: Any) -> Any:
    """A JSON value: numbers of any library become Python's, lists and mappings are followed, NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors and numpy scalars
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file; a last line that a crash cut short is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def truncate_after(path: Path, step: int) -> None:
    """Drop the rows past ``step``: the resumed run makes them again. Atomic; nothing happens when there is nothing to drop."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    text = "".join(json.dumps(row) + "\n" for row in kept)
    if text == path.read_text(encoding="utf-8"):
        return
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
