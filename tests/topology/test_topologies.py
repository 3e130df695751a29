"""Colocated and offline give identical batches; each refuses what does not belong to the run; backpressure ends in no deadlock."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from specforge.commands.capture import capture_samples
from specforge.distributed.groups import FakeGroup
from specforge.errors import FeatureError, RunError
from specforge.runtime.contracts import CaptureSpec
from specforge.runtime.data_plane.batch_plan import BatchPlan
from specforge.runtime.data_plane.feature_loader import FeatureLoader
from specforge.runtime.data_plane.local import LocalFeatureStore
from specforge.topology.colocated import ColocatedTopology
from specforge.topology.offline import OfflineTopology


def local_store(max_bytes="1GiB"):
    return LocalFeatureStore(max_bytes=max_bytes, checksums=False, placement="as_captured")


def open_source(topology, dataset, capture, identity, engine, store, group=None):
    return topology.open(
        identity=identity,
        hidden_size=32,
        dataset=dataset,
        capture=capture,
        store=store,
        engine_factory=lambda: engine,
        device=torch.device("cpu"),
        group=group or FakeGroup(),
    )


def batches(source, dataset, *, rank=0, world_size=1, start=0, total_steps=9, prefetch=2, packing=True):
    plan = BatchPlan(len(dataset), 5, global_batch_size=4, world_size=world_size, micro_batches=2)
    loader = FeatureLoader(
        dataset,
        source,
        source.store,
        plan,
        rank,
        packing=packing,
        max_row_tokens=40,
        prefetch_steps=prefetch,
        device="cpu",
        pin=False,
        total_steps=total_steps,
    )
    loader.seek(start)
    result = list(loader)
    loader.close()
    return result


def assert_same(left, right):
    assert [step for step, _ in left] == [step for step, _ in right]
    for (_, a), (_, b) in zip(left, right, strict=True):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert x.sample_ids == y.sample_ids and x.epoch == y.epoch and x.tensors.keys() == y.tensors.keys()
            for name in x.tensors:
                assert x.tensors[name].dtype == y.tensors[name].dtype and x.tensors[name].equal(y.tensors[name])


@pytest.mark.parametrize("packing", [True, False])
def test_colocated_and_offline_batches_are_identical(tmp_path, make_dataset, capture, identity, engine, packing):
    dataset = make_dataset(10)
    capture_samples(engine, dataset.tasks, capture, tmp_path / "features")
    offline = open_source(
        OfflineTopology(features_dir=str(tmp_path / "features"), verify_checksums=True), dataset, capture, identity, None, None
    )
    expected = batches(offline, dataset, packing=packing)
    assert len(expected) == 9 and expected[-1][1][0].epoch == 2
    for lookahead, prefetch in ((0, 0), (None, 2), (200, 3)):
        store = local_store()
        colocated = open_source(ColocatedTopology(lookahead_tokens=lookahead), dataset, capture, identity, engine, store)
        assert_same(batches(colocated, dataset, prefetch=prefetch, packing=packing), expected)
        assert store.pinned_bytes == 0 and len(store._entries) == 10
    resumed = batches(offline, dataset, start=4, packing=packing)
    assert_same(resumed, expected[4:])


def test_ranks_share_a_step_without_overlap_and_an_empty_share_is_legal(make_dataset, capture, identity, engine):
    dataset = make_dataset(5)
    per_rank = []
    for rank in range(3):
        source = open_source(ColocatedTopology(lookahead_tokens=0), dataset, capture, identity, engine, local_store(), FakeGroup(rank, 3))
        per_rank.append(batches(source, dataset, rank=rank, world_size=3, total_steps=2))
    for step in range(2):
        ids = [i for rank in range(3) for batch in per_rank[rank][step][1] for i in batch.sample_ids]
        assert sorted(ids) == sorted(dataset.sample_id(i) for i in BatchPlan(5, 5, 4).global_batch(step))
    empty = [batch for rank in range(3) for _, step in per_rank[rank] for batch in step if not batch.sample_ids]
    assert empty and empty[0].tensors["aux_hidden_states"].shape == (1, 1, 64)
    assert empty[0].tensors["document_ids"].tolist() == [[-1]] and not empty[0].tensors["loss_mask"].any()


def test_colocated_captures_each_sample_once_while_the_store_holds_it(make_dataset, capture, identity, engine):
    dataset = make_dataset(8)
    seen = []
    original = engine.capture
    engine.capture = lambda tasks, spec: seen.extend(t.sample_id for t in tasks) or original(tasks, spec)
    source = open_source(ColocatedTopology(lookahead_tokens=100), dataset, capture, identity, engine, local_store())
    batches(source, dataset, total_steps=8)
    assert sorted(seen) == sorted(task.sample_id for task in dataset.tasks)


def test_a_small_store_evicts_recaptures_and_makes_producers_wait(make_dataset, capture, identity, engine):
    dataset = make_dataset(12)
    big = open_source(ColocatedTopology(lookahead_tokens=0), dataset, capture, identity, engine, local_store())
    expected = batches(big, dataset, total_steps=9)
    step_bytes = [sum(big.store.find(dataset.sample_id(i)).num_bytes for i in BatchPlan(12, 5, 4).global_batch(s)) for s in range(9)]
    store = local_store(int(max(step_bytes) * 1.3))
    small = open_source(ColocatedTopology(lookahead_tokens=300), dataset, capture, identity, engine, store)
    result = []
    thread = threading.Thread(target=lambda: result.extend(batches(small, dataset, total_steps=9, prefetch=3)), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert_same(result, expected)
    assert store.evictions > 0 and store.bytes_used <= store.max_bytes

    tiny = open_source(ColocatedTopology(lookahead_tokens=0), dataset, capture, identity, engine, local_store(max(step_bytes) // 2))
    with pytest.raises(RunError, match="max_bytes"):
        batches(tiny, dataset, total_steps=9)


def test_closing_while_the_producer_waits_for_room_does_not_hang(make_dataset, capture, identity, engine):
    dataset = make_dataset(12)
    source = open_source(ColocatedTopology(lookahead_tokens=0), dataset, capture, identity, engine, local_store(80_000))
    plan = BatchPlan(12, 5, 4)
    options = {"packing": True, "max_row_tokens": 64, "prefetch_steps": 3, "device": "cpu", "pin": False}
    loader = FeatureLoader(dataset, source, source.store, plan, 0, **options)
    next(iter(loader))
    thread = threading.Thread(target=loader.close, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive() and source.store.pinned_bytes == 0


def test_errors_of_the_engine_surface_in_the_consumer(make_dataset, capture, identity, engine):
    dataset = make_dataset(6)

    def broken(tasks, spec):
        raise RunError("the device is gone")

    engine.capture = broken
    source = open_source(ColocatedTopology(lookahead_tokens=0), dataset, capture, identity, engine, local_store())
    with pytest.raises(RunError, match="the device is gone"):
        batches(source, dataset)


def test_offline_refuses_foreign_missing_and_changed_samples(tmp_path, make_dataset, capture, identity, engine):
    dataset = make_dataset(6)
    capture_samples(engine, dataset.tasks, capture, tmp_path)
    topology = OfflineTopology(features_dir=str(tmp_path), verify_checksums=True)
    with pytest.raises(FeatureError, match="config_digest: config-b versus config-a"):
        open_source(topology, dataset, capture, dataclasses.replace(identity, config_digest="config-b"), None, None)
    with pytest.raises(FeatureError, match=r"aux_layer_ids: \(1, 2\) versus \(0, 3\)"):
        open_source(topology, dataset, CaptureSpec((1, 2), True, True, "float32"), identity, None, None)
    with pytest.raises(FeatureError, match="lacks 2 of 8 samples"):
        open_source(topology, make_dataset(8), capture, identity, None, None)
    source = open_source(topology, dataset, capture, identity, None, None)
    dataset.tasks[2] = dataclasses.replace(dataset[2], loss_mask=tuple(1 - m for m in dataset[2].loss_mask))
    with pytest.raises(FeatureError, match="another loss_mask"):
        source.take([dataset[2]])
    with pytest.raises(FeatureError, match="holds no header.json"):
        open_source(OfflineTopology(features_dir=str(tmp_path / "none"), verify_checksums=True), dataset, capture, identity, None, None)
