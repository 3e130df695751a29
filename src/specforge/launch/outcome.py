"""How a run folder stands, read from its files alone: finished, at work, stopped with a checkpoint, or never begun.

``_SUCCESS`` is written by rank 0 when the command did all that its configuration asks for, and removed when the run is continued. So
it says the same under every launcher, and after any crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from pathlib import Path
from typing import Any, Literal

from specforge.config.freeze import write_atomic

SUCCESS = "_SUCCESS"
State = Literal["done", "running", "stopped", "new"]


def mark_success(run_dir: Path, **facts: Any) -> None:
    """Say that the run did everything it was configured to do; ``facts`` are kept in the marker for people."""
    write_atomic(run_dir / SUCCESS, json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts}) + "\n")


def clear_success(run_dir: Path) -> None:
    """The run goes on: what it had finished is not the end any more."""
    (run_dir / SUCCESS).unlink(missing_ok=True)


def succeeded(run_dir: Path) -> bool:
    """Whether the run in this folder is finished."""
    return (run_dir / SUCCESS).is_file()


def in_use(run_dir: Path) -> bool:
    """Whether a process of this machine, or of another that shares its locks, holds the run folder."""
    path = run_dir / ".lock"
    if not path.exists():
        return False
    with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def state(run_dir: Path) -> State:
    """``stopped`` is a run that began and neither finished nor is at work: start it again in its folder and it goes on."""
    if succeeded(run_dir):
        return "done"
    if in_use(run_dir):
        return "running"
    return "stopped" if (run_dir / "metrics.jsonl").exists() or (run_dir / "checkpoints").is_dir() else "new"
