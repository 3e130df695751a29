"""The GPU path of P-EAGLE (flex attention over packed rows) against the CPU path, over several shapes in one process."""

from __future__ import annotations

import pytest
import torch

from specforge.modeling.draft.llama import LlamaDraft
from specforge.modeling.wiring.peagle import PEagleDraft
from specforge.runtime.contracts import StepContext
from specforge.training.strategies.peagle import PEagle

SHAPES = [
    ([[[0, 0] + [1] * 30, [0] + [1] * 12], [[0] * 5 + [1] * 9 + [0] * 4 + [1] * 20]], 60),
    ([[[0] + [1] * 200]], 201),
    ([[[0, 1, 1, 1]], [[0, 0, 1, 1, 1, 1]], [[0] * 8]], 8),
    ([[[0, 0, 0]]], 3),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_loss_and_gradients_of_all_depths_equal_those_of_the_cpu(make_batch, tiny_head, tiny_architecture, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    architecture = LlamaDraft(**{**tiny_architecture.plain_config(), "num_layers": 2, "head_dim": 16})  # what flex attention begins with
    flags = {"fc_norm": True, "norm_before_fc": False, "norm_before_residual": False}
    strategy = PEagle(
        num_depths=4,
        down_sample_ratio=0.7,
        down_sample_ratio_min=0.2,
        mask_token_id=39,
        draft_vocab_size=None,
        aux_hidden_state_layer_ids=[1, 2, 4],
        **flags,
    )
    context = StepContext(step=0, total_steps=10, epoch=0, seed=0)

    def make():
        torch.manual_seed(0)
        maps = {"d2t": torch.arange(20), "t2d": torch.arange(40) % 2 == 0}
        return PEagleDraft(
            architecture, target_hidden_size=16, num_aux=3, mask_token_id=39, embedding=torch.randn(40, 16), flags=strategy.flags, **maps
        )

    cuda, tolerance = torch.device("cuda"), 2e-3 if dtype is torch.float32 else 0.05
    for masks, width in SHAPES:
        batch = make_batch(masks, width)
        reference, draft = make(), make().to(cuda, dtype)
        slow = strategy.forward_loss(reference, batch, tiny_head, context)
        fast = strategy.forward_loss(draft, batch.to(cuda), tiny_head.to(cuda), context)
        tiny_head.cpu()
        assert fast.weight_sum.item() == slow.weight_sum.item()
        assert torch.allclose(fast.loss_sum.cpu().float(), slow.loss_sum, rtol=tolerance, atol=1e-4)
        (fast.loss_sum / fast.weight_sum.clamp(min=1)).backward()
        (slow.loss_sum / slow.weight_sum.clamp(min=1)).backward()
        for (name, a), b in zip(draft.named_parameters(), reference.parameters(), strict=True):
            scale = b.grad.abs().max().item() + 1e-6
            assert (a.grad.cpu().float() - b.grad).abs().max().item() <= tolerance * scale * 2, (name, width)
