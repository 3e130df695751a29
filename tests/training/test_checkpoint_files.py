"""Checkpoints on disk: layout, rotation, the best one, foreign and damaged ones, a full disk, a crash in the middle."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from toy_substrate import make_identity, make_trainer, run_toy

from specforge.errors import CheckpointError, RunError
from specforge.runtime.contracts import TargetIdentity
from specforge.training import checkpoint as module
from specforge.training.checkpoint import CheckpointManager, complete_checkpoints, find_checkpoint, open_checkpoint

STATE = {"w": torch.arange(6.0).view(2, 3), "t2d": torch.tensor([True, False])}
TRAINING = {"backend": {"masters": {}}, "note": [1, 2.5, None]}


def manager(tmp_path, keep=2, **identity):
    return CheckpointManager(tmp_path / "checkpoints", make_identity(**identity), keep)


def save(m, step, score=None, state=None):
    return m.save(step, 0, state or STATE, TRAINING, {} if score is None else {"walk_accept_length": score})


def names(m):
    return sorted(p.name for p in m.root.iterdir())


def test_layout_and_round_trip(tmp_path):
    m = manager(tmp_path)
    saved = save(m, 123, 1.5)
    assert saved.path.name == "step_0000123"
    assert sorted(p.name for p in saved.path.iterdir()) == ["_SUCCESS", "meta.json", "model.safetensors", "training.pt"]
    assert names(m) == ["best", "latest", "step_0000123"]
    assert (m.root / "latest").read_text() == (m.root / "best").read_text() == "step_0000123\n"
    read = open_checkpoint(saved.path)
    assert read.meta == saved.meta and read.meta.step == 123 and len(read.meta.weights_digest) == 32
    assert all(torch.equal(t, STATE[n]) for n, t in read.weights().items())
    assert read.training()["note"] == [1, 2.5, None]
    read.require(m.identity)
    assert "_target_" not in (saved.path / "meta.json").read_text()


def test_the_same_weights_have_the_same_digest(tmp_path):
    a, b = save(manager(tmp_path / "a"), 1), save(manager(tmp_path / "b"), 2)
    other = save(manager(tmp_path / "c"), 1, state={**STATE, "w": STATE["w"] + 1})
    assert a.meta.weights_digest == b.meta.weights_digest != other.meta.weights_digest


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    m = manager(tmp_path, keep=2)
    for step, score in enumerate([1.0, 3.0, 2.0, None, 2.5, 3.0], start=1):
        save(m, step, score)
    assert names(m) == ["best", "latest", "step_0000002", "step_0000005", "step_0000006"]
    assert (m.root / "best").read_text() == "step_0000002\n"  # the earlier one on a tie
    assert m.best().meta.step == 2 and m.latest().meta.step == 6
    assert find_checkpoint(tmp_path).meta.step == 2 and find_checkpoint(tmp_path, "latest").meta.step == 6
    assert find_checkpoint(tmp_path, "5").meta.step == 5
    with pytest.raises(CheckpointError, match=r"no checkpoint '4'.*best, latest, 2, 5, 6"):
        find_checkpoint(tmp_path, "4")
    everything = manager(tmp_path / "all", keep=None)
    for step in range(5):
        save(everything, step)
    assert len(complete_checkpoints(everything.root)) == 5 and everything.best() is None
    assert find_checkpoint(tmp_path / "all").meta.step == 4  # nothing evaluated: best means latest


def test_incomplete_ones_are_ignored_and_swept(tmp_path):
    m = manager(tmp_path)
    save(m, 1)
    save(m, 2)
    (m.root / "step_0000002" / "_SUCCESS").unlink()
    (m.root / ".tmp-step_0000003").mkdir()
    (m.root / "notes").mkdir()
    assert m.latest().meta.step == 1
    with pytest.raises(CheckpointError, match="incomplete"):
        open_checkpoint(m.root / "step_0000002")
    assert sorted(p.name for p in m.sweep()) == [".tmp-step_0000003", "step_0000002"]
    assert names(m) == ["latest", "notes", "step_0000001"]


@pytest.mark.parametrize("name, read", [("model.safetensors", "weights"), ("training.pt", "training")])
def test_a_truncated_or_changed_file_is_named(tmp_path, name, read):
    saved = save(manager(tmp_path), 1)
    path = saved.path / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with pytest.raises(CheckpointError, match=rf"{name} has {len(whole) - 7} bytes, {len(whole)} were written"):
        getattr(saved, read)()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        getattr(saved, read)()
    path.unlink()
    with pytest.raises(CheckpointError, match="truncated"):
        getattr(saved, read)()


def test_a_damaged_meta_and_an_unknown_version_are_refused(tmp_path):
    saved = save(manager(tmp_path), 1)
    path = saved.path / "meta.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "format_version": 99}))
    with pytest.raises(CheckpointError, match="format version 99, this SpecForge reads 1"):
        open_checkpoint(saved.path)
    path.write_text(json.dumps(data)[:50])
    with pytest.raises(CheckpointError, match="meta.json cannot be read"):
        open_checkpoint(saved.path)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "changed, expected",
    [
        ({"architecture": "mla"}, "architecture: toy in the checkpoint, mla in this run"),
        ({"strategy": "dflash"}, "strategy: toy in the checkpoint, dflash in this run"),
        ({"draft": {"hidden_size": 32}}, "draft.hidden_size: 16 in the checkpoint, 32 in this run"),
        ({"vocabulary_digest": "v1"}, "vocabulary_digest: v0 in the checkpoint, v1 in this run"),
        ({"target": TargetIdentity("other", None, "c1", "t0", "m0")}, "config_digest: c0 versus c1"),
    ],
)
def test_a_foreign_checkpoint_names_both_sides(tmp_path, changed, expected):
    saved = save(manager(tmp_path), 1)
    with pytest.raises(CheckpointError) as error:
        saved.require(make_identity(**changed))
    assert expected in str(error.value) and error.value.exit_code == 2
    saved.require(make_identity(strategy_config={"steps": 3}))  # numbers of the algorithm may change
    saved.require(replace(make_identity(), target=TargetIdentity("moved/elsewhere", None, "c0", "t0", "m0")))


def test_a_run_of_another_draft_refuses_to_resume(tmp_path):
    run_toy(tmp_path)
    with pytest.raises(CheckpointError, match="strategy: toy in the checkpoint, eagle3 in this run"):
        run_toy(tmp_path, identity=make_identity(strategy="eagle3"))
    with pytest.raises(CheckpointError, match="missing: weight; unknown: down.weight"):
        run_toy(tmp_path, model=torch.nn.Linear(3, 3), trainer=make_trainer(epochs=9))


@pytest.mark.parametrize("victim", ["save_file", "torch_save", "sync", "marker"])
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch, victim):
    m = manager(tmp_path)
    save(m, 1, 1.0)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = {"save_file": "save_file", "sync": "_sync", "marker": "write_atomic"}.get(victim)
    if target:
        monkeypatch.setattr(module, target, full)
    else:
        monkeypatch.setattr(module.torch, "save", full)
    with pytest.raises(RunError, match=r"the disk is full: the checkpoint of step 2.*previous checkpoint is intact: .*step_0000001"):
        save(m, 2, 2.0)
    monkeypatch.undo()
    assert not [n for n in names(m) if n.startswith(".tmp")]
    m.sweep()
    assert m.latest().meta.step == 1
    assert all(torch.equal(t, STATE[n]) for n, t in m.latest().weights().items())
    assert save(m, 2, 2.0).meta.step == 2


def test_a_real_write_error_inside_the_libraries_is_recognised(tmp_path):
    """The kernel refuses to write past a limit: safetensors and torch hide the errno, and the message still says what happened."""
    m = manager(tmp_path)
    save(m, 1)
    program = f"""
import resource, signal, sys, torch
sys.path.insert(0, {os.path.dirname(__file__)!r})
from toy_substrate import make_identity
from specforge.training.checkpoint import CheckpointManager
from specforge.errors import RunError
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
m = CheckpointManager(Path({str(m.root)!r}), make_identity(), 2)
big, small = torch.zeros(100_000), torch.zeros(3)
for weights, training in (({{"w": big}}, {{}}), ({{"w": small}}, {{"m": big}})):
    try:
        m.save(2, 0, weights, training, {{}})
    except RunError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 2 and all("the disk is full" in line and "step_0000001" in line for line in lines)
    assert names(m) == ["latest", "step_0000001"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 200_000 and signal.getsignal(signal.SIGXFSZ) is not None


def test_training_ends_with_a_clear_error_when_the_disk_is_full(tmp_path, monkeypatch):
    original = module.save_file

    def full_later(tensors, path):
        if "0000006" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(tensors, path)

    monkeypatch.setattr(module, "save_file", full_later)
    with pytest.raises(RunError, match="disk is full.*step_0000004"):
        run_toy(tmp_path)
    monkeypatch.undo()
    result, _ = run_toy(tmp_path)
    assert result.step == 8 and result.stopped_by == "finished"
