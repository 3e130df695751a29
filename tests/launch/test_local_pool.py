"""Runs side by side on this machine: who gets which GPUs or cores, how many at a time, and what a signal does."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from specforge.errors import ConfigError
from specforge.launch import local_pool
from specforge.launch.base import Stopped, Task
from specforge.launch.local_pool import Pool, Slot, slots

CHILD = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[2])
began = time.time()
print("child of", folder.name)
time.sleep(float((folder / "seconds").read_text()))
code = int((folder / "code").read_text())
names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
(folder / "out.json").write_text(json.dumps([began, time.time(), *(os.environ.get(name) for name in names)]))
sys.exit(code)
"""


@pytest.mark.parametrize(
    "parallel, processes, gpus, cores, environ, expected",
    [
        (None, None, 0, 8, {}, [{}]),
        (4, None, 0, 8, {}, [{"OMP_NUM_THREADS": "2"}] * 4),
        (4, None, 0, 2, {}, [{"OMP_NUM_THREADS": "1"}] * 4),
        (4, None, 0, 8, {"OMP_NUM_THREADS": "3"}, [{}] * 4),
        (None, None, 8, 8, {}, [{}]),  # one run takes all
        (None, 2, 8, 8, {}, [{"CUDA_VISIBLE_DEVICES": pair} for pair in ("0,1", "2,3", "4,5", "6,7")]),
        (2, None, 8, 8, {}, [{"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}]),
        (3, 1, 4, 8, {"CUDA_VISIBLE_DEVICES": "4,GPU-a,6,7"}, [{"CUDA_VISIBLE_DEVICES": name} for name in ("4", "GPU-a", "6")]),
        (None, 8, 8, 8, {}, [{}]),
    ],
)
def test_this_machine_in_equal_parts(parallel, processes, gpus, cores, environ, expected):
    assert [slot.env for slot in slots(parallel, processes, gpus, cores, environ)] == expected


@pytest.mark.parametrize(
    "parallel, processes, message", [(9, None, "parallel: 9 runs"), (3, 4, "3 runs side by side with 4 GPUs each need 12")]
)
def test_more_gpus_than_there_are(parallel, processes, message):
    with pytest.raises(ConfigError, match=message):
        slots(parallel, processes, 8, 8, {})


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    (tmp_path / "pool_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(local_pool, "CHILD", "pool_child")

    def make(*jobs: tuple[float, int]) -> list[Task]:
        made = []
        for number, (seconds, code) in enumerate(jobs):
            folder = tmp_path / f"run{number}"
            folder.mkdir()
            (folder / "seconds").write_text(str(seconds))
            (folder / "code").write_text(str(code))
            made.append(Task(folder / "config.yaml", folder, f"run{number}"))
        return made

    return make


def read(task: Task) -> list:
    import json

    return json.loads((task.run_dir / "out.json").read_text())


def test_two_at_a_time_and_a_failing_one_stops_nothing(tasks):
    events: list[tuple] = []
    given = tasks((0.6, 0), (0.3, 3), (0.3, 0), (0.3, 0))
    parts = [Slot({"CUDA_VISIBLE_DEVICES": "0"}), Slot({"CUDA_VISIBLE_DEVICES": "1"})]
    assert Pool(given, parts, lambda *event: events.append(event)).run() == [0, 3, 0, 0]
    assert [(e[0], e[1]) for e in events[:2]] == [(0, "running"), (1, "running")]
    assert {(index, state, code) for index, state, code, _ in events if code is not None} == {
        (0, "done", 0),
        (1, "failed", 3),
        (2, "done", 0),
        (3, "done", 0),
    }
    spans = [read(task) for task in given]
    moments = sorted([(began, 1) for began, *_ in spans] + [(ended, -1) for _, ended, *_ in spans])
    together, most = 0, 0
    for _, change in moments:
        together += change
        most = max(most, together)
    assert most == 2
    # Those that ran at one time had different devices.
    for a in spans:
        for b in spans:
            if a is not b and a[0] < b[1] and b[0] < a[1]:
                assert a[3] != b[3]
    assert "child of run2" in (given[2].run_dir / "logs" / "sweep.log").read_text()


def test_a_signal_ends_what_runs_and_begins_nothing(tasks):
    events: list[tuple] = []
    given = tasks((30, 0), (30, 0), (0, 0))
    pool = Pool(given, [Slot({}), Slot({})], lambda *event: events.append(event))
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    began = time.monotonic()
    timer.start()
    with pytest.raises(Stopped) as stopped:
        pool.run()
    assert stopped.value.signum == signal.SIGTERM and time.monotonic() - began < 15
    assert [(index, state) for index, state, *_ in events] == [(0, "running"), (1, "running"), (0, "interrupted"), (1, "interrupted")]
    assert not (given[2].run_dir / "out.json").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_sweep_in_parallel_on_the_cores(tiny_work, run_cli, tmp_path, monkeypatch):
    import specforge

    monkeypatch.setenv("PYTHONPATH", str(Path(specforge.__file__).resolve().parents[1]))
    outcome = run_cli("-m", *tiny_work.short, "optimizer.lr=1e-3,2e-3", "launcher.parallel=2", "trainer.max_steps=2", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    lines = [line for line in outcome.err.splitlines() if ": running" in line or ": done" in line]
    assert ["running" in line for line in lines] == [True, True, False, False], lines
    assert len(list(tmp_path.rglob("_SUCCESS"))) == 4  # two runs, two checkpoints
    assert all("step 2/2" in log.read_text() for log in tmp_path.rglob("sweep.log")) and len(list(tmp_path.rglob("sweep.log"))) == 2
