"""Trackers: durable lines, truncation on resume, TensorBoard events, the console on and off a terminal, who writes."""

from __future__ import annotations

import io
import json
import math
import sys

import pytest
import torch
from rich.console import Console

from specforge.errors import MissingExtraError
from specforge.tracking.base import NoTracker, Trackers, open_trackers
from specforge.tracking.console import ConsoleTracker
from specforge.tracking.jsonl import JsonlTracker, plain, read_metrics
from specforge.tracking.tensorboard import TensorBoardTracker, flat_scalars


def test_each_line_is_on_disk_at_once(tmp_path):
    tracker = JsonlTracker(run_dir=tmp_path)
    tracker.begin(0, 10)
    tracker.log(1, {"loss": 1.5, "per_position_accuracy": [0.5, float("nan")], "t": torch.tensor(2)}, "train")
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "kind": "train", "loss": 1.5, "per_position_accuracy": [0.5, null], "t": 2}\n'
    )
    tracker.flush()
    tracker.close()
    tracker.close()


def test_a_resume_drops_the_lost_future_and_a_cut_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "kind": k, "loss": s / 3} for s in range(1, 6) for k in ("train", "eval")]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 6, "ki')
    tracker = JsonlTracker(run_dir=tmp_path)
    tracker.begin(3, 10)
    assert list(read_metrics(path)) == [r for r in rows if r["step"] <= 3]
    tracker.log(4, {"loss": 9.0}, "train")
    tracker.close()
    assert [r["step"] for r in read_metrics(path)] == [1, 1, 2, 2, 3, 3, 4]
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert list(read_metrics(tmp_path / "none")) == []


def test_plain():
    assert plain({"a": (1, math.inf), "b": torch.tensor([1.0, 2.0]), 3: None, "c": True}) == {
        "a": [1, None],
        "b": [1.0, 2.0],
        "3": None,
        "c": True,
    }


def test_tensorboard_writes_scalars_and_hides_the_lost_future(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begin, steps in ((0, range(1, 5)), (2, range(3, 5))):
        tracker = TensorBoardTracker(run_dir=tmp_path, flush_seconds=1)
        tracker.begin(begin, 4)
        for step in steps:
            tracker.log(step, {"loss": step + begin, "acc": [0.5, 0.25], "note": "text", "bad": float("nan")}, "train")
        tracker.flush()
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["train/acc/0", "train/acc/1", "train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0)]


def test_a_missing_tensorboard_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"specforge\[track\]"):
        TensorBoardTracker(run_dir=tmp_path, flush_seconds=1)


def test_flat_scalars():
    assert flat_scalars({"a": 1, "b": [2, None], "c": {"d": 3.5}, "e": "x"}) == [("a", 1.0), ("b/0", 2.0), ("c/d", 3.5)]


ROW = {"loss": 1.25, "simulated_acc_len": 0.75, "lr": 1e-4, "steps_per_second": 2.0, "tokens_per_second": 12345.0}


def test_plain_lines_away_from_a_terminal():
    out = io.StringIO()
    tracker = ConsoleTracker(Console(file=out, width=60), seconds_between_lines=1000.0)
    tracker.begin(0, 3)
    for step in (1, 2, 3):
        tracker.log(step, ROW, "train")
    tracker.log(3, {"walk_accept_length": 1.5, "per_position_accuracy": [0.5, float("nan")]}, "eval")
    tracker.message("saved in [run]/x")
    tracker.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 4  # steps 1 and 3; step 2 came too soon after 1
    assert lines[0].startswith("step 1/3  loss 1.2500  acc_len 0.750  lr 1.00e-04  steps/s 2.00  tokens/s 12,345  remaining 0:00")
    assert lines[2] == "step 3: eval: walk_accept_length 1.500  per_position_accuracy [0.500, -]" and lines[3] == "saved in [run]/x"


def test_a_bar_on_a_terminal():
    out = io.StringIO()
    tracker = ConsoleTracker(Console(file=out, force_terminal=True, width=160))
    tracker.begin(5, 10)
    tracker.log(6, ROW, "train")
    tracker.message("hello")
    tracker.close()
    tracker.close()
    text = out.getvalue()
    assert "6/10" in text and "loss 1.2500" in text and "hello" in text


def test_only_rank_0_writes_and_each_row_once(tmp_path):
    assert isinstance(open_trackers(JsonlTracker(run_dir=tmp_path), tmp_path, rank=1), NoTracker)
    for chosen in (JsonlTracker(run_dir=tmp_path / "a"), TensorBoardTracker(run_dir=tmp_path / "a", flush_seconds=1)):
        tracker = open_trackers(chosen, tmp_path / "a", rank=0)
        assert isinstance(tracker, Trackers)
        tracker.begin(0, 2)
        tracker.log(1, ROW, "train")
        tracker.message("x")
        tracker.flush()
        tracker.close()
        assert len(list(read_metrics(tmp_path / "a" / "metrics.jsonl"))) == 1
        (tmp_path / "a" / "metrics.jsonl").unlink()
