"""Block attention against one written-out softmax, and the tiled head losses against their plain forms, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from specforge.ops.attention import flex_attention, plain_attention
from specforge.ops.block_attention import BlockMask, block_attention
from specforge.ops.corrected_cross_entropy import domino_cross_entropy, dspark_cross_entropy
from specforge.ops.hard_cross_entropy import argmax_of_head, hard_cross_entropy

SIZE = 3


def block_inputs(window, device="cpu", width=8, value_width=6):
    """Two padded rows: documents 0 and 1 packed in the first, document 2 in the second; one anchor without context, one padding anchor."""
    torch.manual_seed(0)
    key_document = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 2, [2] * 11], device=device)
    key_position = torch.tensor([[*range(5), *range(4), 0, 0], [*range(11)]], device=device)
    query_document = torch.tensor([[0, 0, 1, 1], [2, 2, 2, -1]], device=device)
    anchor_position = torch.tensor([[0, 4, 2, 3], [1, 6, 10, 0]], device=device)
    mask = BlockMask(query_document, anchor_position, key_document, key_position, SIZE, window)
    shapes = [(2, 4 * SIZE, 4, width), (2, 11, 2, width), (2, 11, 2, value_width), (2, 4 * SIZE, 2, width), (2, 4 * SIZE, 2, value_width)]
    return mask, [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def reference(mask, q, context_keys, context_values, own_keys, own_values, scale):
    """One softmax a slot over the keys that conventions §2 lets it see, by position."""
    group, result = q.shape[2] // own_keys.shape[2], []
    for b in range(2):
        for anchor in range(4):
            for k in range(SIZE):
                row, a = anchor * SIZE + k, int(mask.anchor_position[b, anchor])
                keys, values = [], []
                for j in range(11):
                    same = mask.key_document[b, j] == mask.query_document[b, anchor] and mask.query_document[b, anchor] >= 0
                    near = mask.window is None or mask.key_position[b, j] >= a + k - (mask.window - 1)
                    if same and mask.key_position[b, j] < a and near:
                        keys.append(context_keys[b, j]), values.append(context_values[b, j])
                for other in range(SIZE):
                    if mask.window is None or 0 <= k - other < mask.window:
                        keys.append(own_keys[b, anchor * SIZE + other]), values.append(own_values[b, anchor * SIZE + other])
                keys, values = (torch.stack(x).repeat_interleave(group, 1) for x in (keys, values))
                share = torch.softmax((keys * q[b, row]).sum(-1) * scale, dim=0)
                result.append((share.unsqueeze(-1) * values).sum(0))
    return torch.stack(result).view(2, 4 * SIZE, q.shape[2], -1)


@pytest.mark.parametrize("window", [None, 4, 2, 1])
def test_block_attention_equals_one_softmax_over_what_positions_allow(window):
    mask, inputs = block_inputs(window)
    real = (mask.query_document >= 0).repeat_interleave(SIZE, 1)
    found = block_attention(*inputs, mask.prepare(plain_attention), 0.3)[real]
    expected = reference(mask, *inputs, 0.3)[real]
    assert torch.allclose(found, expected, atol=1e-6)
    weight = torch.randn_like(expected)
    gradients = [
        torch.autograd.grad((o * weight).sum(), inputs, retain_graph=True, allow_unused=True, materialize_grads=True)
        for o in (found, expected)
    ]
    assert all(torch.isfinite(a).all() and torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 4, 2])
def test_the_flex_mask_is_the_dense_mask(window):
    mask, inputs = block_inputs(window, width=16, value_width=16)
    inputs = [x.detach() for x in inputs]  # flex has no backward on a CPU
    dense, flex = mask.prepare(plain_attention), mask.prepare(flex_attention)
    assert torch.equal(dense.empty, flex.empty)
    results = [block_attention(*inputs, prepared, 0.3, attend) for prepared, attend in ((dense, plain_attention), (flex, flex_attention))]
    assert torch.allclose(*results, atol=1e-5)


def head_inputs(rows=37, width=6, vocabulary=29, rank=4):
    torch.manual_seed(1)
    hidden, latent = torch.randn(rows, width, requires_grad=True), torch.randn(rows, rank, requires_grad=True)
    head, projection = torch.randn(vocabulary, width), torch.randn(vocabulary, rank, requires_grad=True)
    labels, weights = torch.randint(0, vocabulary, (rows,)), torch.rand(rows)
    return hidden, head, latent, projection, labels, weights


def same_gradients(found, expected, inputs):
    a, b = (torch.autograd.grad(loss, inputs, retain_graph=True) for loss in (found, expected))
    return all(torch.allclose(x, y, atol=1e-5, rtol=1e-4) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("tile", [5, 1000])
def test_hard_cross_entropy_by_rows(tile):
    hidden, head, _, _, labels, weights = head_inputs()
    losses, predicted = hard_cross_entropy(hidden, head, labels, tile)
    expected = cross_entropy(hidden @ head.T, labels, reduction="none")
    assert torch.allclose(losses, expected, atol=1e-5) and torch.equal(predicted, (hidden @ head.T).argmax(-1))
    assert torch.equal(argmax_of_head(hidden, head, tile), predicted)
    # The weight may depend on the losses, as in D-PACE: it comes back through the row's gradient.
    assert same_gradients((losses * weights * losses.detach()).sum(), (expected * weights * expected.detach()).sum(), [hidden])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_domino_cross_entropy(share):
    hidden, head, latent, projection, labels, weights = head_inputs()
    corrected = torch.rand(37) < 0.7
    found, losses, predicted = domino_cross_entropy(hidden, head, latent, projection, corrected, labels, weights, share, tile=8)
    base = hidden @ head.T
    final = base + (latent @ projection.T) * corrected.unsqueeze(-1)
    rows = torch.stack([cross_entropy(x, labels, reduction="none") for x in (final, base)])
    expected = (weights * ((1 - share) * rows[0] + share * rows[1])).sum()
    assert torch.allclose(found, expected, rtol=1e-5) and torch.allclose(losses, rows, atol=1e-5)
    assert torch.equal(predicted, final.argmax(-1))
    assert same_gradients(found * 1.7, expected * 1.7, [hidden, latent, projection])


@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.0, 1.0), (0.1, 0.9)])
def test_dspark_cross_entropy(shares):
    hidden, head, latent, projection, labels, weights = head_inputs()
    teacher = torch.randn(37, 29) * 2
    found, losses, predicted = dspark_cross_entropy(
        hidden, head, latent, projection, lambda rows: teacher[rows], labels, weights, *shares, tile=8
    )
    logits = hidden @ head.T + latent @ projection.T
    distance = (torch.softmax(logits, -1) - torch.softmax(teacher, -1)).abs().sum(-1)
    rows = torch.stack((cross_entropy(logits, labels, reduction="none"), distance))
    expected = (weights * (shares[0] * rows[0] + shares[1] * rows[1])).sum()
    assert torch.allclose(found, expected, rtol=1e-5) and torch.allclose(losses, rows, atol=1e-5)
    assert torch.equal(predicted, logits.argmax(-1))
    assert same_gradients(found * 0.6, expected * 0.6, [hidden, latent, projection])


def test_no_rows_give_zero_and_zero_gradients():
    hidden, head, latent, projection, labels, weights = head_inputs(rows=0)
    losses = [
        hard_cross_entropy(hidden, head, labels)[0].sum(),
        domino_cross_entropy(hidden, head, latent, projection, labels.bool(), labels, weights, 0.5)[0],
        dspark_cross_entropy(hidden, head, latent, projection, lambda rows: None, labels, weights, 0.1, 0.9)[0],
    ]
    for loss in losses:
        assert loss.item() == 0
    sum(losses).backward()
    assert projection.grad.abs().sum() == 0 and hidden.grad.shape == (0, 6)
    assert argmax_of_head(hidden, head).shape == (0,)
