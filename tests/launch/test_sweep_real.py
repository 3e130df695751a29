"""A sweep of real trainings in real processes: interrupted, killed, repeated."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specforge.launch.outcome import succeeded
from specforge.launch.sweep_record import PointRecord, current_status, read_record

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def line(tiny_work) -> list[str]:
    """Two points of a few seconds each, saved often enough that an interruption is in between."""
    pace = ["trainer.epochs=120", "trainer.log_every=10", "trainer.eval_every=180", "trainer.save_every=60", "output_dir=swept"]
    return ["-m", *tiny_work.base, "trainer.global_batch_size=4", *pace, "seed=1,2"]


def points(folder: Path) -> list[PointRecord]:
    [path] = folder.glob("swept/sweeps/t/*/sweep.json")
    return list(read_record(path.parent).points.values())


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    rows = [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []
    return [row["step"] for row in rows if row["kind"] == "train"]


def begun(folder: Path, index: int) -> bool:
    if not list(folder.glob("swept/sweeps/t/*/sweep.json")):
        return False
    point = points(folder)[index]
    return point.folder is not None and len(steps(point.folder)) >= 3


def test_an_interrupted_sweep_goes_on_where_it_was(start_cli, tiny_work, line: list[str]) -> None:
    process = start_cli(*line, cwd=tiny_work.folder, wait=False)
    wait_for(lambda: begun(tiny_work.folder, 0))
    process.send_signal(signal.SIGINT)  # to the front end alone, as kill does it
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    first, second = points(tiny_work.folder)
    assert (first.status, second.status) == ("interrupted", "not started") and "interrupted" in out
    before = steps(first.folder)
    assert before and before[-1] < 360

    # The second start is killed outright: its child must not live on, and the third start finds out by itself how the points stand.
    process = start_cli(*line, cwd=tiny_work.folder, wait=False)
    wait_for(lambda: steps(first.folder)[-1] > before[-1])
    process.kill()
    process.communicate(timeout=60)
    assert points(tiny_work.folder)[0].status == "running"
    wait_for(lambda: current_status(points(tiny_work.folder)[0]) == "interrupted")

    done = start_cli(*line, cwd=tiny_work.folder)
    assert done.code == 0, done.out + done.err
    again = points(tiny_work.folder)
    assert [point.status for point in again] == ["done", "done"] and again[0].run_dir == first.run_dir
    assert "goes on in" in done.err and "resumed from" in done.err and all(succeeded(point.folder) for point in again)
    assert steps(first.folder) == sorted(set(steps(first.folder))) and steps(first.folder)[-1] == 360
    assert len(list((tiny_work.folder / "swept" / "t").iterdir())) == 2
