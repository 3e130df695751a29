"""The training substrate on real devices: bf16 with masters and the fused optimizer, resume, two NCCL ranks."""

from __future__ import annotations

import json

import pytest
import torch
import toy_substrate
from safetensors.torch import load_file
from toy_substrate import ListTracker, ToyModel, ToyStrategy, make_trainer, run_toy

from specforge.launch.local import start
from specforge.launch.plan import Plan, ProcessPlan, RolePlan
from specforge.training.checkpoint import find_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Crash(ToyStrategy):
    def forward_loss(self, model, batch, head, context):
        if context.step == 5:
            raise KeyboardInterrupt
        return super().forward_loss(model, batch, head, context)


def test_bf16_on_cuda_learns_and_resumes_bit_for_bit(tmp_path):
    cuda, trainer, tracker = torch.device("cuda", 0), make_trainer(epochs=6, micro_batches=2), ListTracker()
    torch.manual_seed(1)
    _, expected = run_toy(tmp_path / "whole", trainer=trainer, strategy=ToyStrategy(draw=True), tracker=tracker, device=cuda)
    assert expected.up.weight.dtype == torch.bfloat16
    losses = [row["loss"] for _, kind, row in tracker.rows if kind == "train"]
    assert losses[-1] < 0.8 * losses[0]
    torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt):
        run_toy(tmp_path / "broken", trainer=trainer, strategy=Crash(draw=True), device=cuda)
    torch.manual_seed(9)
    run_toy(tmp_path / "broken", trainer=trainer, strategy=ToyStrategy(draw=True), model=ToyModel(seed=3), device=cuda)
    a, b = (find_checkpoint(tmp_path / name, "latest") for name in ("whole", "broken"))
    assert a.meta.step == b.meta.step == 24 and a.meta.weights_digest == b.meta.weights_digest
    masters = [c.training()["backend"]["masters"] for c in (a, b)]
    assert masters[0] and all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_nccl_ranks_equal_one(tmp_path):
    for folder in ("1", "2"):
        (tmp_path / folder).mkdir()
    assert toy_substrate.main([str(tmp_path / "1"), "device=cuda", "dtype=float32"]) == 0
    command = ("python", toy_substrate.__file__, "{run_dir}", "device=cuda", "dtype=float32")
    ranks = tuple(ProcessPlan("trainer", r, 2, r, command, {"RANK": str(r), "WORLD_SIZE": "2", "LOCAL_RANK": str(r)}) for r in range(2))
    assert start(Plan("local", (RolePlan("trainer", 2, "cuda"),), ranks, {}, (), 5.0), tmp_path / "2") == 0
    a, b = (load_file(find_checkpoint(tmp_path / w, "latest").path / "model.safetensors") for w in ("1", "2"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-5)
    numel = sum(p.numel() for p in ToyModel().parameters())
    calls = json.loads((tmp_path / "2" / "calls_1.json").read_text())
    assert calls.count(numel) == 8 and len(calls) == 16
