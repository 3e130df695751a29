"""Feature files: what is written is read back as mapped views, killed writers lose nothing complete, damage is refused by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from specforge.commands.capture import capture_samples
from specforge.errors import FeatureError, RunError
from specforge.runtime.data_plane import feature_files
from specforge.runtime.data_plane.feature_files import FeatureFileWriter
from specforge.runtime.data_plane.file_store import FeatureFileStore


def test_round_trip_over_several_shards_and_ranks_is_bit_for_bit(tmp_path, make_dataset, capture, identity, engine):
    dataset = make_dataset(9)
    captured = engine.capture(dataset.tasks, capture)
    for rank in range(2):
        with FeatureFileWriter(tmp_path, identity, capture, rank=rank, shard_bytes=10_000) as writer:
            for features in captured[rank::2]:
                writer.add(features)
    assert len(list(tmp_path.glob("shard-r0000-*.safetensors"))) > 1 and not list(tmp_path.glob(".partial*"))
    store = FeatureFileStore(tmp_path, identity, capture, checksums=True)
    assert len(store) == 9
    for features in captured:
        ref = store.find(features.sample_id)
        tensors = store.get(ref)
        assert ref.num_tokens == len(features.tensors["input_ids"]) and ref.num_bytes == features.num_bytes
        for name, tensor in features.tensors.items():
            assert tensors[name].equal(tensor) and tensors[name].dtype == tensor.dtype
    again = store.get(store.find(captured[0].sample_id))
    assert again["aux_hidden_states"].data_ptr() == store.get(store.find(captured[0].sample_id))["aux_hidden_states"].data_ptr()


def test_resume_skips_what_is_complete_and_removes_what_is_not(tmp_path, make_dataset, capture, identity, engine):
    dataset = make_dataset(8)
    assert capture_samples(engine, dataset.tasks[:5], capture, tmp_path) == 5
    (tmp_path / ".partial-r0000-dead").write_bytes(b"x" * 100)
    (tmp_path / "shard-r0000-000007.safetensors").write_bytes(b"half")
    assert capture_samples(engine, dataset.tasks, capture, tmp_path) == 3
    assert not (tmp_path / ".partial-r0000-dead").exists() and not (tmp_path / "shard-r0000-000007.safetensors").exists()
    assert len(FeatureFileStore(tmp_path, identity, capture, checksums=True)) == 8


_KILLED = """
import sys, time, torch
from pathlib import Path
from specforge.runtime.contracts import *
from specforge.runtime.data_plane.feature_files import FeatureFileWriter
spec = CaptureSpec((1,), False, False, "float32")
with FeatureFileWriter(Path(sys.argv[1]), TargetIdentity("t", None, "c", "k", "m"), spec, shard_bytes=4000) as writer:
    start = len(writer.finished)
    for n in range(start, 100000):
        ids = torch.arange(5) + n
        tensors = {"input_ids": ids, "loss_mask": ids > 2, "aux_hidden_states": torch.full((5, 8), float(n))}
        writer.add(CapturedFeatures(f"s{n}", tensors))
"""


def test_kill_9_leaves_only_complete_samples(tmp_path, identity):
    from specforge.runtime.contracts import CaptureSpec, TargetIdentity

    target, spec = TargetIdentity("t", None, "c", "k", "m"), CaptureSpec((1,), False, False, "float32")
    counts = []
    for _ in range(2):
        before = len(list(tmp_path.glob("*.jsonl")))
        process = subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(tmp_path)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        )
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.jsonl"))) < before + 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        store = FeatureFileStore(tmp_path, target, spec, checksums=True)
        counts.append(len(store))
        for n in range(len(store)):
            assert store.get(store.find(f"s{n}"))["aux_hidden_states"].eq(n).all()
    assert counts[1] > counts[0] > 0


def test_corrupt_truncated_and_unknown_files_are_refused_by_name(tmp_path, make_dataset, capture, identity, engine):
    dataset = make_dataset(4)
    capture_samples(engine, dataset.tasks, capture, tmp_path)
    shard = tmp_path / "shard-r0000-000000.safetensors"
    good = shard.read_bytes()
    where = good.find(engine.capture(dataset.tasks[1:2], capture)[0].tensors["aux_hidden_states"].numpy().tobytes()) + 40
    shard.write_bytes(good[:where] + bytes([good[where] ^ 1]) + good[where + 1 :])
    store = FeatureFileStore(tmp_path, identity, capture, checksums=True)
    store.get(store.find(dataset.sample_id(0)))
    with pytest.raises(FeatureError, match=rf"{dataset.sample_id(1)}.*shard-r0000-000000.*aux_hidden_states has checksum"):
        store.get(store.find(dataset.sample_id(1)))
    shard.write_bytes(good[:-100])
    with pytest.raises(FeatureError, match="shard-r0000-000000.safetensors is damaged or cut short"):
        reopened = FeatureFileStore(tmp_path, identity, capture, checksums=True)
        reopened.get(reopened.find(dataset.sample_id(0)))
    shard.unlink()
    with pytest.raises(FeatureError, match="shard-r0000-000000.safetensors is missing"):
        FeatureFileStore(tmp_path, identity, capture, checksums=True)
    header = json.loads((tmp_path / "header.json").read_text())
    (tmp_path / "header.json").write_text(json.dumps({**header, "format_version": 99}))
    with pytest.raises(FeatureError, match="version 99"):
        FeatureFileStore(tmp_path, identity, capture, checksums=True)
    with pytest.raises(FeatureError, match="version 99"):
        FeatureFileWriter(tmp_path, identity, capture)


def test_disk_full_says_what_is_kept_and_leaves_nothing_half_written(tmp_path, make_dataset, capture, identity, engine, monkeypatch):
    dataset = make_dataset(6)
    captured = engine.capture(dataset.tasks, capture)
    with FeatureFileWriter(tmp_path, identity, capture) as writer:
        for features in captured[:2]:
            writer.add(features)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(feature_files, "_sync", full)
    with pytest.raises(RunError, match="2 samples are complete and kept"), FeatureFileWriter(tmp_path, identity, capture) as writer:
        for features in captured[2:]:
            writer.add(features)
    assert not list(tmp_path.glob(".partial*")) and len(list(tmp_path.glob("*.safetensors"))) == 1
    monkeypatch.undo()
    assert capture_samples(engine, dataset.tasks, capture, tmp_path) == 4


def test_wrong_tensors_are_refused_before_they_are_written(tmp_path, make_dataset, capture, identity, engine):
    features = engine.capture(make_dataset(1).tasks, capture)[0]
    with FeatureFileWriter(tmp_path, identity, capture) as writer:
        features.tensors["aux_hidden_states"] = features.tensors["aux_hidden_states"].to(torch.bfloat16)
        with pytest.raises(FeatureError, match="dtype bfloat16, expected float32"):
            writer.add(features)
