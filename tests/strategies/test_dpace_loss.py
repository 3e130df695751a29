"""D-PACE's three weightings against loops, and its loss as DFlash's rows under them."""

from __future__ import annotations

import pytest
import torch
from block_toy import CONTEXT, MASKS, assert_same_gradients, make_block_draft, make_block_strategy, slow_anchors, slow_block, slow_reach

from specforge.training.strategies.dpace import dpace_weights

WEIGHTINGS = ("full", "cumulative", "continuation")


def slow_weights(probabilities, weighting, alpha):
    """Weights of the valid slots of one block, from their label probabilities (arXiv 2605.18810)."""
    prefixes, product = [], 1.0
    for p in probabilities:
        product *= (1 - alpha) * p + alpha
        prefixes.append(product)
    suffixes = [sum(prefixes[k:]) for k in range(len(prefixes))]
    return {"cumulative": prefixes, "full": suffixes, "continuation": [s / p for s, p in zip(suffixes, prefixes, strict=True)]}[weighting]


def slow_loss(strategy, draft, batch, head):
    loss, blocks = torch.zeros(()), 0
    for document, a in slow_anchors(batch):
        states = slow_block(draft, document, a, strategy.block_size)
        losses = []
        for k in range(1, min(strategy.block_size - 1, slow_reach(document, a)) + 1):
            losses.append(torch.nn.functional.cross_entropy(head.weight @ states[k], document["input_ids"][a + k]))
        weights = slow_weights([float((-nll.detach()).exp()) for nll in losses], strategy.weighting, strategy.alpha)
        loss, blocks = loss + sum(w * nll for w, nll in zip(weights, losses, strict=True)), blocks + 1
    return loss, blocks


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_loss_and_gradients_equal_the_slow_reference(make_batch, tiny_head, weighting):
    strategy = make_block_strategy("dpace", weighting=weighting, alpha=0.3)
    batch = make_batch(MASKS, width=20)
    fast, slow = (make_block_draft(strategy, 2) for _ in range(2))
    out = strategy.forward_loss(fast, batch, tiny_head, CONTEXT)
    loss, blocks = slow_loss(strategy, slow, batch, tiny_head)
    assert torch.allclose(out.loss_sum, loss, rtol=1e-5)
    assert out.weight_sum.item() == blocks == 14  # the number of kept blocks: no weight that depends on the model
    out.loss_sum.backward(), loss.backward()
    assert_same_gradients(fast, slow)


def test_weights_by_hand():
    probability = torch.tensor([[0.5, 0.25, 0.9]], dtype=torch.float64)
    valid = torch.tensor([[True, True, False]])
    s = [0.75, 0.625]  # α = 0.5
    first, second = s[0], s[0] * s[1]
    wanted = {"cumulative": [first, second, 0], "full": [first + second, second, 0], "continuation": [(first + second) / first, 1.0, 0]}
    for weighting in WEIGHTINGS:
        assert dpace_weights(probability, valid, weighting, 0.5)[0].tolist() == pytest.approx(wanted[weighting])


def test_alpha_one_weighs_every_slot_alike_under_cumulative(make_batch, tiny_head):
    batch = make_batch(MASKS, width=20)
    dpace, dflash = make_block_strategy("dpace", weighting="cumulative", alpha=1.0), make_block_strategy("dflash", loss_decay_gamma=None)
    draft = make_block_draft(dflash)
    a, b = (s.forward_loss(draft, batch, tiny_head, CONTEXT) for s in (dpace, dflash))
    assert torch.allclose(a.loss_sum, b.loss_sum) and a.weight_sum != b.weight_sum
