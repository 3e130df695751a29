"""Domino against a slow reference: shifted labels, a GRU on the true tokens, λ, and the candidate pool of serving."""

from __future__ import annotations

import math

import pytest
import torch
from block_toy import CONTEXT, MASKS, assert_same_gradients, make_block_draft, make_block_strategy, slow_anchors, slow_block, slow_reach

from specforge.runtime.contracts import StepContext
from specforge.training.strategies.domino import corrected_logits


def slow_gru(draft, state, x):
    """One step of a GRU without biases, as the formula says (gates in the order reset, update, candidate)."""
    r_x, z_x, n_x = (draft.prefix_gru.weight_ih_l0 @ x).chunk(3)
    r_h, z_h, n_h = (draft.prefix_gru.weight_hh_l0 @ state).chunk(3)
    update = torch.sigmoid(z_x + z_h)
    return (1 - update) * torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h) + update * state


def slow_loss(strategy, draft, batch, head, share):
    loss, weight_sum = torch.zeros(()), 0.0
    for document, a in slow_anchors(batch):
        states = slow_block(draft, document, a, strategy.block_size)
        state = torch.zeros(strategy.gru_hidden_size)
        for k in range(min(strategy.block_size - 1, slow_reach(document, a))):  # slot bs−1 is never served
            state = slow_gru(draft, state, draft.embedding[document["input_ids"][a + k]])
            base = head.weight @ states[k]
            hidden = draft.embed_proj[0].weight @ torch.cat((states[k], state))
            final = base if k == 0 else base + draft.embed_proj[2].weight @ (hidden * torch.sigmoid(hidden))
            weight, label = math.exp(-k / strategy.loss_decay_gamma), document["input_ids"][a + 1 + k]
            nll = [torch.nn.functional.cross_entropy(logits, label) for logits in (final, base)]
            loss, weight_sum = loss + weight * ((1 - share) * nll[0] + share * nll[1]), weight_sum + weight
    return loss, weight_sum


@pytest.mark.parametrize("step, share", [(3, 0.4), (9, 0.0)])
def test_loss_and_gradients_equal_the_slow_reference(make_batch, tiny_head, step, share):
    strategy = make_block_strategy("domino")
    batch = make_batch(MASKS, width=20)
    fast, slow = (make_block_draft(strategy, 2) for _ in range(2))
    out = strategy.forward_loss(fast, batch, tiny_head, StepContext(step, 10, 0, 0))
    loss, weight_sum = slow_loss(strategy, slow, batch, tiny_head, share)
    assert torch.allclose(out.loss_sum, loss, rtol=1e-5)
    assert out.weight_sum.item() == pytest.approx(weight_sum)
    assert out.metrics["per_position_accuracy"][1].tolist() == [14, 10, 6]
    out.loss_sum.backward(), loss.backward()
    assert_same_gradients(fast, slow)  # also: no gradient is zero at λ < 1


def test_the_base_share_falls_linearly_over_the_first_half():
    strategy = make_block_strategy("domino")
    shares = [strategy.base_share(StepContext(step, 8, 0, 0)) for step in range(8)]
    assert shares == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0]
    assert make_block_strategy("domino", base_loss_fraction=0.0).base_share(CONTEXT) == 0.0


def test_at_the_first_step_only_the_backbone_learns(make_batch, tiny_head):
    strategy = make_block_strategy("domino")
    draft = make_block_draft(strategy)
    strategy.forward_loss(draft, make_batch(MASKS, width=20), tiny_head, StepContext(0, 10, 0, 0)).loss_sum.backward()
    head = {n for n, p in draft.named_parameters() if p.grad.abs().sum() == 0}
    assert head == {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}


def test_the_candidate_pool_is_shared_by_the_corrected_slots_of_a_block():
    torch.manual_seed(0)
    base, latent, projection = torch.randn(3, 4, 11), torch.randn(3, 4, 2), torch.randn(11, 2) * 5
    logits = corrected_logits(base, latent, projection, 3)
    everything = corrected_logits(base, latent, projection, 0)
    assert torch.equal(logits[:, 0], base[:, 0]) and torch.equal(everything[:, 0], base[:, 0])
    for block in range(3):
        best = sorted(range(11), key=lambda v: -max(float(base[block, k, v]) for k in (1, 2, 3)))[:3]
        for k in (1, 2, 3):
            allowed = {v for v in range(11) if logits[block, k, v] > float("-inf")}
            assert allowed == set(best)
            assert torch.allclose(logits[block, k, list(allowed)], everything[block, k, list(allowed)])
