"""The GPU path of EAGLE-3 (flex attention over packed rows) against the CPU path, over several shapes in one process."""

from __future__ import annotations

import pytest
import torch

from specforge.runtime.contracts import StepContext

CONTEXT = StepContext(step=0, total_steps=10, epoch=0, seed=0)
SHAPES = [
    ([[[0, 0] + [1] * 30, [0] + [1] * 12], [[0] * 5 + [1] * 9 + [0] * 4 + [1] * 20]], 60),
    ([[[0] + [1] * 200]], 201),
    ([[[0, 1, 1, 1]], [[0, 0, 1, 1, 1, 1]], [[0] * 8]], 8),
    ([[[0, 0, 0]]], 3),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_loss_and_gradients_equal_those_of_the_cpu(make_strategy, make_draft, make_batch, tiny_head, tiny_architecture, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    tiny_architecture.head_dim = 16  # what flex attention begins with
    strategy = make_strategy(fc_norm=True)
    cuda = torch.device("cuda")
    tolerance = 2e-3 if dtype is torch.float32 else 0.05
    for masks, width in SHAPES:
        batch = make_batch(masks, width)
        reference, draft = make_draft(strategy, range(0, 40, 2)), make_draft(strategy, range(0, 40, 2)).to(cuda, dtype)
        slow = strategy.forward_loss(reference, batch, tiny_head, CONTEXT)
        fast = strategy.forward_loss(draft, batch.to(cuda), tiny_head.to(cuda), CONTEXT)
        tiny_head.cpu()
        assert fast.weight_sum.item() == slow.weight_sum.item()
        assert torch.allclose(fast.loss_sum.cpu().float(), slow.loss_sum, rtol=tolerance, atol=1e-4)
        (fast.loss_sum / fast.weight_sum.clamp(min=1)).backward()
        (slow.loss_sum / slow.weight_sum.clamp(min=1)).backward()
        for (name, a), b in zip(draft.named_parameters(), reference.parameters(), strict=True):
            scale = b.grad.abs().max().item() + 1e-6
            assert (a.grad.cpu().float() - b.grad).abs().max().item() <= tolerance * scale * 2, (name, width)
