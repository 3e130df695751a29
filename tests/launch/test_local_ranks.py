"""Real ranks on this machine: two gloo processes equal one, a dying rank ends the others, signals reach all, no orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import toy_substrate
from safetensors.torch import load_file

from specforge.errors import ConfigError, RunError
from specforge.launch import roles, worker
from specforge.launch.local import free_port, new_attempt_folder, start, tail
from specforge.launch.plan import Plan, ProcessPlan, RolePlan

PROGRAM = Path(toy_substrate.__file__)


def toy_plan(processes, *options, grace=5.0, command=None):
    command = command or ("python", str(PROGRAM), "{run_dir}", *options)
    ranks = tuple(
        ProcessPlan("trainer", r, processes, r, command, {"RANK": str(r), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(r)})
        for r in range(processes)
    )
    return Plan("local", (RolePlan("trainer", processes, "cpu"),), ranks, {"OMP_NUM_THREADS": "1"}, (), grace)


def run_one(run_dir, *options):
    """The same program in this process, alone."""
    run_dir.mkdir(exist_ok=True)
    assert toy_substrate.main([str(run_dir), *options]) == 0


def final_weights(run_dir):
    name = (run_dir / "checkpoints" / "latest").read_text().strip()
    return load_file(run_dir / "checkpoints" / name / "model.safetensors")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ranks_of(run_dir):
    """Processes whose command line names the run folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(run_dir).encode() in line and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def test_two_gloo_ranks_equal_one_process_on_the_same_global_batch(tmp_path):
    run_one(tmp_path / "one")
    two = tmp_path / "two"
    two.mkdir()
    assert start(toy_plan(2, "micro=2"), two) == 0
    a, b = final_weights(tmp_path / "one"), final_weights(two)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6)
    numel = sum(p.numel() for p in toy_substrate.ToyModel().parameters())
    for rank in range(2):
        calls = json.loads((two / f"calls_{rank}.json").read_text())
        # Eight optimizer steps of two micro-batches: one gradient reduction each, and one of the sums.
        assert calls.count(numel) == 8 and len(calls) == 16
    one = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    both = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["kind"]) for r in one] == [(r["step"], r["kind"]) for r in both]
    for x, y in zip(one, both, strict=True):
        if x["kind"] == "train":
            assert x["weight_sum"] == y["weight_sum"] and x["loss"] == pytest.approx(y["loss"], rel=1e-5)
            assert x["per_position_accuracy"] == pytest.approx(y["per_position_accuracy"])
    assert "ended at step 8" in (two / "logs" / "latest" / "rank_1.log").read_text()
    assert (two / "logs" / "latest").resolve().name == "attempt_1"
    assert ranks_of(two) == []


def test_two_ranks_resume_what_one_process_began(tmp_path):
    run_one(tmp_path / "a", "epochs=1")
    assert start(toy_plan(2, "epochs=2"), tmp_path / "a") == 0
    run_one(tmp_path / "b", "epochs=1")
    run_one(tmp_path / "b", "epochs=2")
    a, b = final_weights(tmp_path / "a"), final_weights(tmp_path / "b")
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=1e-6) for name in a)


def test_a_dying_rank_ends_the_others_and_is_named(tmp_path):
    began = time.monotonic()
    with pytest.raises(RunError) as error:
        start(toy_plan(3, "die_rank=1", grace=1.0), tmp_path)
    text = str(error.value)
    assert "trainer rank 1 ended with exit code 7; the other 2 were ended" in text and "about to die" in text and "rank_1.log" in text
    assert time.monotonic() - began < 30
    assert ranks_of(tmp_path) == []


def test_the_users_kind_of_error_keeps_its_exit_code(tmp_path):
    for code in (2, 3):
        with pytest.raises(RunError) as error:
            start(toy_plan(2, "die_rank=0", f"die_code={code}", grace=0.2), tmp_path)
        assert error.value.exit_code == code
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["attempt_1", "attempt_2", "latest"]


def test_a_killed_rank_is_named_by_its_signal(tmp_path):
    script = "import os, sys, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(60)"
    with pytest.raises(RunError, match="trainer rank 1 was killed by SIGKILL"):
        start(toy_plan(2, grace=0.5, command=("python", "-c", script, "{run_dir}")), tmp_path)
    assert ranks_of(tmp_path) == []


def supervise(run_dir, *options):
    """The supervisor in a process of its own, as the command line would be."""
    code = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(PROGRAM.parent)!r}]\n"
        f"from pathlib import Path; from test_local_ranks import toy_plan; from specforge.launch.local import start\n"
        f"sys.exit(start(toy_plan(2, *{options!r}), Path({str(run_dir)!r})))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_rows(run_dir, count, process):
    deadline = time.monotonic() + 60
    path = run_dir / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_reaches_every_rank_which_save_and_leave(tmp_path):
    process = supervise(tmp_path, "delay=0.2", "epochs=20", "save_every=1000")
    wait_for_rows(tmp_path, 2, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "signal" in output and (tmp_path / "checkpoints" / "latest").exists()
    assert ranks_of(tmp_path) == []


def test_a_killed_supervisor_leaves_no_orphans(tmp_path):
    # The worker asks the kernel for a signal when its parent dies; the toy program does it the same way.
    script = "from specforge.launch.worker import end_with_parent; import time; end_with_parent(); print('up', flush=True); time.sleep(60)"
    code = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(PROGRAM.parent)!r}]\n"
        "from pathlib import Path; from test_local_ranks import toy_plan; from specforge.launch.local import start\n"
        f"start(toy_plan(2, command=('python', '-c', {script!r}, '{{run_dir}}')), Path({str(tmp_path)!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    logs = [tmp_path / "logs" / "attempt_1" / f"rank_{r}.log" for r in range(2)]
    deadline = time.monotonic() + 60
    while not all(log.exists() and "up" in log.read_text() for log in logs):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    ranks = [pid for pid in ranks_of(tmp_path) if pid != process.pid]
    assert len(ranks) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in ranks)


def test_one_process_runs_in_place_with_group_device_and_seed(tmp_path, monkeypatch):
    seen = {}

    def run_trainer(config, run_dir, group, device):
        seen.update(pid=os.getpid(), config=config, run_dir=run_dir, world=group.world_size, device=device.type, draw=torch.rand(1).item())
        return 5

    (tmp_path / "config.yaml").write_text(
        "format_version: 1\ndevice: cpu\nseed: 3\nnum_threads: null\nparallel: {timeout_minutes: 1.0}\nname: toy\n"
    )
    module = type(sys)("toy_role")
    module.run_trainer = run_trainer
    monkeypatch.setitem(sys.modules, "toy_role", module)
    monkeypatch.setattr(roles, "TRAINER_ROLE", roles.Role("trainer", "toy_role:run_trainer", leads=True))
    assert start(toy_plan(1), tmp_path) == 5
    assert seen["pid"] == os.getpid() and seen["world"] == 1 and seen["device"] == "cpu" and seen["config"]["name"] == "toy"
    torch.manual_seed(3)
    assert seen["draw"] == torch.rand(1).item()
    assert worker.main(["--run-dir", str(tmp_path)]) == 5
    assert worker.main(["--run-dir", str(tmp_path / "none")]) == 2
    with pytest.raises(ConfigError, match="--role: 'cook' is not known"):
        worker.run_role(tmp_path, "cook")


def test_small_parts(tmp_path):
    assert [new_attempt_folder(tmp_path).name for _ in range(3)] == ["attempt_1", "attempt_2", "attempt_3"]
    assert (tmp_path / "latest").resolve().name == "attempt_3"
    log = tmp_path / "x.log"
    log.write_text("a\rb\n" + "\n".join(str(i) for i in range(50)))
    assert tail(log, 2) == "  48\n  49" and tail(tmp_path / "none") == "  (no output)"
    assert 1024 <= free_port() < 65536 and threading.active_count() >= 1
