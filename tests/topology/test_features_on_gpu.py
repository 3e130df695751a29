"""The same features and batches on a CUDA device: batched capture, copies ahead, generation."""

from __future__ import annotations

import pytest
import torch

from specforge.distributed.groups import FakeGroup
from specforge.inference.target_engine.hf import HFTargetEngine
from specforge.runtime.data_plane.batch_plan import BatchPlan
from specforge.runtime.data_plane.feature_loader import FeatureLoader
from specforge.runtime.data_plane.local import LocalFeatureStore
from specforge.topology.colocated import ColocatedTopology

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def engine_on(device, tiny_folder, identity):
    return HFTargetEngine(
        dtype="float32",
        batch_tokens=None,
        attn_implementation=None,
        target_folder=tiny_folder,
        device=device,
        identity=identity,
        trust_remote_code=False,
    )


@pytest.mark.parametrize(("placement", "prefetch"), [("as_captured", 2), ("host", 2), ("host", 0)])
def test_batches_on_the_device_equal_those_of_the_cpu(make_dataset, capture, identity, engine, tiny_folder, placement, prefetch):
    dataset = make_dataset(20)
    results = {}
    for device, made in (("cpu", engine), ("cuda", engine_on("cuda", tiny_folder, identity))):
        store = LocalFeatureStore(max_bytes="1GiB", checksums=False, placement=placement)
        source = ColocatedTopology(lookahead_tokens=None).open(
            identity=identity,
            hidden_size=32,
            dataset=dataset,
            capture=capture,
            store=store,
            engine_factory=lambda made=made: made,
            device=torch.device(device),
            group=FakeGroup(),
        )
        loader = FeatureLoader(
            dataset,
            source,
            store,
            BatchPlan(20, 1, 6, micro_batches=2),
            0,
            packing=True,
            max_row_tokens=64,
            prefetch_steps=prefetch,
            device=device,
            pin=True,
            total_steps=8,
        )
        results[device] = list(loader)
        loader.close()
    for (_, cpu), (_, gpu) in zip(results["cpu"], results["cuda"], strict=True):
        for a, b in zip(cpu, gpu, strict=True):
            assert a.sample_ids == b.sample_ids
            for name, tensor in a.tensors.items():
                assert b.tensors[name].device.type == "cuda"
                if name != "target_argmax":
                    torch.testing.assert_close(b.tensors[name].cpu(), tensor, rtol=1e-3, atol=1e-3)


def test_batched_generation_equals_one_at_a_time(make_dataset, tiny_folder, identity):
    engine = engine_on("cuda", tiny_folder, identity)
    prompts = [task.input_ids for task in make_dataset(12).tasks]
    options = {"max_new_tokens": 16, "temperature": 0.0, "top_p": 1.0, "seed": 0, "stop_token_ids": [5, 9]}
    assert engine.generate(prompts, **options) == [engine.generate([p], **options)[0] for p in prompts]
