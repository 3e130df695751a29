"""LocalFeatureStore: cap, pins, views. BatchPlan and collate: pure functions with the documented layout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from specforge.errors import ConfigError, FeatureError
from specforge.runtime.contracts import CaptureSpec, PromptTask
from specforge.runtime.control_plane.noop import NoOpControlPlane
from specforge.runtime.data_plane.batch_plan import BatchPlan, permutation
from specforge.runtime.data_plane.collate import FeatureLayout, collate
from specforge.runtime.data_plane.feature_store import StoreFullError
from specforge.runtime.data_plane.local import LocalFeatureStore, parse_bytes

SPEC = CaptureSpec((1, 2), final_hidden=True, target_argmax=False, dtype="float32")


def features(length, value=0.0):
    ids = torch.arange(length)
    return {
        "input_ids": ids,
        "loss_mask": ids > 1,
        "aux_hidden_states": torch.full((length, 8), float(value)),
        "final_hidden_states": torch.full((length, 4), float(value)),
    }


def store_of(max_bytes, checksums=False):
    return LocalFeatureStore(max_bytes=max_bytes, checksums=checksums, placement="as_captured")


PINNED = [0, 2, 1, 5, 4, 3, 6, 7]
ONE = 10 * (8 + 1 + 32 + 16)


def test_eviction_is_least_recently_used_and_never_takes_a_pinned_sample(identity):
    store = store_of(3 * ONE)
    refs = [store.put(f"s{i}", features(10, i), identity, SPEC) for i in range(3)]
    with pytest.raises(StoreFullError, match="max_bytes"):
        store.put("s3", features(10), identity, SPEC)
    store.release(refs[0])
    store.release(refs[1])
    store.get(refs[0])
    store.put("s3", features(10), identity, SPEC)
    assert [store.contains(f"s{i}") for i in range(4)] == [True, False, True, True]
    assert store.bytes_used == 3 * ONE and store.evictions == 1
    with pytest.raises(FeatureError, match="s1.*not in the local store"):
        store.get(refs[1])
    assert not store.pin(refs[1]) and store.pin(refs[0])
    with pytest.raises(StoreFullError):
        store.put("s4", features(10), identity, SPEC)


def test_views_are_handed_out_and_a_change_in_place_is_found_with_checksums(identity):
    tensors = features(6, 1.0)
    store = store_of("1MiB", checksums=True)
    ref = store.put("a", tensors, identity, SPEC)
    assert store.get(ref)["aux_hidden_states"].data_ptr() == tensors["aux_hidden_states"].data_ptr()
    tensors["aux_hidden_states"][2, 3] = 5.0
    with pytest.raises(FeatureError, match="aux_hidden_states has checksum"):
        store.get(ref)


def test_shape_dtype_and_missing_features_are_refused(identity):
    store = store_of("1MiB")
    bad = features(5)
    del bad["final_hidden_states"]
    with pytest.raises(FeatureError, match="asks for"):
        store.put("a", bad, identity, SPEC)
    with pytest.raises(FeatureError, match="4 rows, but input_ids has 5"):
        store.put("a", {**features(5), "loss_mask": torch.ones(4, dtype=torch.bool)}, identity, SPEC)
    ref = store.put("a", features(5), identity, SPEC)
    lying = dataclasses.replace(ref, specs=tuple(dataclasses.replace(s, shape=(9, *s.shape[1:])) for s in ref.specs))
    with pytest.raises(FeatureError, match="expected"):
        store.get(lying)


@pytest.mark.parametrize(("text", "value"), [("8GiB", 8 << 30), ("500MB", 500_000_000), (17, 17), ("1.5 KiB", 1536)])
def test_sizes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["eight", "8XB", 0, "-1", ""])
def test_bad_sizes(text):
    with pytest.raises(ConfigError, match="feature_store.max_bytes"):
        parse_bytes(text)


def test_plan_sees_every_sample_once_an_epoch_and_cuts_do_not_change_the_global_batch():
    plan = BatchPlan(23, 7, 5)
    assert plan.steps_per_epoch == 5
    for epoch in range(3):
        steps = range(epoch * 5, epoch * 5 + 5)
        seen = [i for step in steps for i in plan.global_batch(step)]
        assert sorted(seen) == list(range(23)) and all(plan.epoch(step) == epoch for step in steps)
    assert plan.global_batch(0) != plan.global_batch(5)
    for world_size, micro in ((1, 1), (2, 2), (3, 1), (4, 3)):
        cut = BatchPlan(23, 7, 5, world_size, micro)
        for step in (4, 0, 11):
            parts = [cut.rank_batches(step, rank) for rank in range(world_size)]
            assert all(len(p) == micro for p in parts)
            assert [i for p in parts for m in p for i in m] == plan.global_batch(step)
    assert BatchPlan(4, 0, 2, shuffle=False).global_batch(1) == [2, 3]


def test_order_is_a_fixed_function_of_seed_and_epoch():
    # Values are pinned: a checkpoint's data position means nothing if another release orders the data otherwise.
    assert permutation(8, 0, 0).tolist() == PINNED
    assert permutation(8, 0, 1).tolist() != PINNED and permutation(8, 1, 0).tolist() != PINNED
    assert np.array_equal(permutation(1000, 3, 2), permutation(1000, 3, 2))


def test_collate_numbers_documents_through_the_batch_and_restarts_positions():
    samples = [(name, {**features(n, v), "target_argmax": torch.arange(n)}) for name, n, v in (("a", 3, 1.0), ("b", 2, 2.0), ("c", 4, 3.0))]
    layout = FeatureLayout.of(dataclasses.replace(SPEC, target_argmax=True), 4)
    batch = collate(samples, [[0, 1], [2]], layout, epoch=3)
    assert batch.sample_ids == ("a", "b", "c") and batch.epoch == 3
    assert batch.tensors["document_ids"].tolist() == [[0, 0, 0, 1, 1], [2, 2, 2, 2, -1]]
    assert batch.tensors["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch.tensors["loss_mask"].tolist() == [[False, False, True, False, False], [False, False, True, True, False]]
    assert batch.tensors["target_argmax"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, -1]]
    assert batch.tensors["aux_hidden_states"][:, :, 0].tolist() == [[1, 1, 1, 2, 2], [3, 3, 3, 3, 0]]
    empty = collate([], [], layout, 0)
    assert {n: (t.dtype, t.shape[2:]) for n, t in empty.tensors.items()} == {n: (t.dtype, t.shape[2:]) for n, t in batch.tensors.items()}


def test_control_plane_refuses_tensors_at_each_entry(identity):
    plane = NoOpControlPlane()
    bad = PromptTask("a", (torch.ones(1),), (1,))
    for call in (
        lambda: plane.register([bad]),
        lambda: plane.publish([torch.ones(1)]),
        lambda: plane.acknowledge([torch.ones(1)], 0),
        lambda: plane.acknowledge(["a"], torch.tensor(1)),
        lambda: plane.fail("a", torch.ones(1)),
    ):
        with pytest.raises(TypeError, match="metadata only"):
            call()
