"""Resume = no resume: bit for bit, also mid-epoch, after kill -9, with bf16 masters and with generators that are drawn from."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
from toy_substrate import ListTracker, ToyModel, ToyStrategy, make_adamw, make_trainer, run_toy

from specforge.errors import CheckpointError
from specforge.tracking.jsonl import read_metrics
from specforge.training.checkpoint import complete_checkpoints, find_checkpoint
from specforge.training.resume import generator_states, generators_untouched, restore_generators

PROGRAM = Path(__file__).parent / "toy_substrate.py"


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class StopAfter(ToyStrategy):
    """Raises in the middle of a step, as a crash would."""

    def __init__(self, step: int) -> None:
        super().__init__(draw=True)
        self.last = step

    def forward_loss(self, model, batch, head, context):
        if context.step == self.last:
            raise KeyboardInterrupt
        return super().forward_loss(model, batch, head, context)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("crash", [3, 5, 6])
def test_a_crash_and_a_resume_change_no_bit(tmp_path, dtype, crash):
    trainer = make_trainer(param_dtype=dtype, micro_batches=2, log_every=3)
    whole, broken = ListTracker(), ListTracker()
    torch.manual_seed(11)
    _, expected = run_toy(tmp_path / "whole", trainer=trainer, strategy=ToyStrategy(draw=True), tracker=whole)
    torch.manual_seed(11)
    with pytest.raises(KeyboardInterrupt):
        run_toy(tmp_path / "broken", trainer=trainer, strategy=StopAfter(crash))
    torch.manual_seed(99)  # another process would have another state
    result, model = run_toy(tmp_path / "broken", trainer=trainer, strategy=ToyStrategy(draw=True), tracker=broken, model=ToyModel(seed=7))
    assert result.step == 8 and "resumed from" in broken.messages[0]
    assert equal(expected.state_dict(), model.state_dict())
    a, b = (find_checkpoint(tmp_path / name, "latest") for name in ("whole", "broken"))
    assert a.meta.weights_digest == b.meta.weights_digest and a.meta.metrics == b.meta.metrics
    first, second = a.training(), b.training()
    assert equal(first["backend"]["masters"], second["backend"]["masters"])
    moments = [t["backend"]["optimizer"]["state"] for t in (first, second)]
    assert all(equal(moments[0][i], moments[1][i]) for i in moments[0])
    assert torch.equal(first["generators"][0]["torch"], second["generators"][0]["torch"])
    # The window of a logged line is restored too: lines are those of the uninterrupted run.
    losses = [{step: row["loss"] for step, kind, row in t.rows if kind == "train"} for t in (whole, broken)]
    assert all(losses[0][step] == loss for step, loss in losses[1].items()) and losses[1]


def start(run_dir, *options):
    command = [sys.executable, str(PROGRAM), str(run_dir), "epochs=3", "draw=1", *options]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(run_dir, step, process):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        rows = list(read_metrics(run_dir / "metrics.jsonl"))
        if rows and rows[-1]["step"] >= step:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.005)
    raise AssertionError("the toy run did not get there in time")


def test_kill_9_in_the_middle_of_an_epoch_and_resume_is_bitwise_the_same_run(tmp_path):
    whole = start(tmp_path / "whole")
    killed = start(tmp_path / "killed", "delay=0.1")
    wait_for_step(tmp_path / "killed", 7, killed)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert whole.wait(60) == 0, whole.stdout.read()
    before = complete_checkpoints(tmp_path / "killed" / "checkpoints")[-1].meta.step
    assert 6 <= before < 12
    resumed = start(tmp_path / "killed")
    assert resumed.wait(60) == 0, resumed.stdout.read()
    a, b = (find_checkpoint(tmp_path / name, "latest") for name in ("whole", "killed"))
    assert a.meta.step == b.meta.step == 12
    assert (a.path / "model.safetensors").read_bytes() == (b.path / "model.safetensors").read_bytes()
    rows = {name: list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("whole", "killed")}
    for name in rows:
        assert [r["step"] for r in rows[name] if r["kind"] == "train"] == list(range(1, 13))
        assert [r["step"] for r in rows[name] if r["kind"] == "eval"] == [4, 8, 12]
    timed = {"seconds", "steps_per_second", "tokens_per_second"}
    plain = [[{k: v for k, v in row.items() if k not in timed} for row in rows[name]] for name in rows]
    assert plain[0] == plain[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_to_a_real_process_saves_and_says_where(tmp_path, number):
    process = start(tmp_path, "delay=0.1", "save_every=100")
    wait_for_step(tmp_path, 2, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    step = find_checkpoint(tmp_path, "latest").meta.step
    assert 2 <= step < 12 and f"step_{step:07d}" in output


def test_a_second_signal_ends_at_once(tmp_path):
    process = start(tmp_path, "delay=20")
    wait_for_first = time.monotonic() + 30
    # The loader sleeps 20 s before its first step; the handlers are there once the process ignores the first signal.
    while time.monotonic() < wait_for_first and process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        if caught & 1 << (signal.SIGUSR2 - 1):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == -signal.SIGTERM


def test_resume_policies(tmp_path):
    run_toy(tmp_path / "a", trainer=make_trainer(keep_checkpoints=None))
    finished, _ = run_toy(tmp_path / "a")
    assert finished.step == 8  # nothing is left to do
    longer, _ = run_toy(tmp_path / "a", trainer=make_trainer(epochs=3, keep_checkpoints=None))
    assert longer.step == 12
    with pytest.raises(CheckpointError, match="trainer.resume=never, but"):
        run_toy(tmp_path / "a", trainer=make_trainer(resume="never"))
    older = str(tmp_path / "a" / "checkpoints" / "step_0000004")
    with pytest.raises(CheckpointError, match="already goes to step 12"):
        run_toy(tmp_path / "a", trainer=make_trainer(resume=older))
    branched, _ = run_toy(tmp_path / "b", trainer=make_trainer(resume=older))
    assert branched.step == 8 and complete_checkpoints(tmp_path / "b" / "checkpoints")[0].meta.step >= 6
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        run_toy(tmp_path / "c", trainer=make_trainer(resume=str(tmp_path / "nowhere")))


def test_numbers_of_the_optimizer_come_from_the_configuration_on_resume(tmp_path):
    run_toy(tmp_path)
    tracker = ListTracker()
    run_toy(tmp_path, trainer=make_trainer(epochs=3), tracker=tracker, optimizer=make_adamw(lr=0.5))
    assert max(row["lr"] for _, kind, row in tracker.rows if kind == "train") > 0.1


def test_generators_round_trip_through_a_file(tmp_path):
    torch.save(generator_states(), tmp_path / "rng.pt")
    drawn = [random.random(), numpy.random.rand(), torch.rand(1).item()]
    restore_generators(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [random.random(), numpy.random.rand(), torch.rand(1).item()] == drawn
    restore_generators(torch.load(tmp_path / "rng.pt", weights_only=True))
    with generators_untouched():
        torch.rand(5), random.random(), numpy.random.rand()
    assert [random.random(), numpy.random.rand(), torch.rand(1).item()] == drawn
