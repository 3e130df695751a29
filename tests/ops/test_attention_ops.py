"""The unroll's attention against one written-out softmax, and the loss kernel against its plain form."""

from __future__ import annotations

import pytest
import torch

from specforge.ops.attention import CausalDocumentMask, flex_attention, plain_attention, unroll_attention, unroll_attention_reference
from specforge.ops.soft_cross_entropy import soft_cross_entropy, soft_cross_entropy_reference


def inputs(device="cpu", width=8, value_width=6):
    torch.manual_seed(0)
    document = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [2] * 12], device=device)
    place = torch.arange(12, device=device).expand(2, 12)
    rows = torch.tensor([[2, 3, 4, 7, 8, 0], [0, 5, 6, 9, 10, 11]], device=device)
    query_document = document.gather(1, rows)
    query_document[0, -1] = -1
    mask = CausalDocumentMask(query_document, place.gather(1, rows), document)
    q = torch.randn(2, 6, 4, width, device=device, requires_grad=True)
    keys = [torch.randn(2, n, 2, width, device=device, requires_grad=True) for n in (12, 6, 6)]
    values = [torch.randn(2, n, 2, value_width, device=device, requires_grad=True) for n in (12, 6, 6)]
    return mask, q, keys, values


def test_unroll_equals_one_softmax_over_all_visible_keys_with_gradients():
    mask, q, keys, values = inputs()
    fast = unroll_attention(q, keys[0], values[0], mask.dense(), 0.3, keys[1:], values[1:])
    slow = unroll_attention_reference(q, keys[0], values[0], mask.dense(), 0.3, keys[1:], values[1:])
    assert torch.allclose(fast, slow, atol=1e-6)
    weights = torch.randn_like(fast)
    a = torch.autograd.grad((fast * weights).sum(), [q, *keys, *values])
    b = torch.autograd.grad((slow * weights).sum(), [q, *keys, *values])
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_flex_equals_plain(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    mask, q, keys, _ = inputs(device, width=16)
    k = keys[0].detach()
    fast, fast_lse = flex_attention(q.detach(), k, k, mask.block_mask(), 0.3)
    slow, slow_lse = plain_attention(q.detach(), k, k, mask, 0.3)
    valid = mask.query_document >= 0
    tolerance = 1e-5 if device == "cpu" else 2e-3
    assert torch.allclose(fast[valid], slow[valid], atol=tolerance) and torch.allclose(fast_lse[valid], slow_lse[valid], atol=tolerance)


def test_soft_cross_entropy_equals_the_reference_over_tiles():
    torch.manual_seed(1)
    hidden, head = torch.randn(11, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    teacher, rows, weights = torch.randn(5, 9) * 3, torch.randint(0, 5, (11,)), torch.rand(11)
    weights[3] = 0
    fast, row_fast, best_fast = soft_cross_entropy(hidden, head, teacher, rows, weights, tile=4)
    slow, row_slow, best_slow = soft_cross_entropy_reference(hidden, head, teacher[rows], weights)
    assert torch.allclose(fast, slow) and torch.allclose(row_fast, row_slow, atol=1e-6) and best_fast.equal(best_slow)
    a, b = (torch.autograd.grad(2.5 * x, [hidden, head]) for x in (fast, slow))
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(a, b, strict=True))
