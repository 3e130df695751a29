"""DSpark against a slow reference: three Markov heads, the confidence head and the three terms of the loss."""

from __future__ import annotations

import math

import pytest
import torch
from block_toy import CONTEXT, MASKS, assert_same_gradients, make_block_draft, make_block_strategy, slow_anchors, slow_block, slow_reach

from specforge.modeling.target import TargetHead


def slow_latent(markov, kind, previous, hidden, state):
    if kind == "vanilla":
        return previous, state
    if kind == "gated":
        return torch.sigmoid(markov.gate_proj.weight @ torch.cat((hidden, previous)) + markov.gate_proj.bias) * previous, state
    gate, candidate, output = (markov.joint_proj.weight @ torch.cat((state, previous, hidden)) + markov.joint_proj.bias).chunk(3)
    gate = torch.sigmoid(gate)
    return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


def slow_loss(strategy, draft, batch, head, kind):
    markov, loss, weight_sum = draft.markov_head, torch.zeros(()), 0.0
    for document, a in slow_anchors(batch):
        states = slow_block(draft, document, a, strategy.block_size)
        state = torch.zeros(strategy.markov_rank)
        for k in range(min(strategy.block_size, slow_reach(document, a))):
            previous = markov.markov_w1.weight[document["input_ids"][a + k]]
            latent, state = slow_latent(markov, kind, previous, states[k], state)
            logits = head.weight @ states[k] + markov.markov_w2.weight @ latent
            q, p = torch.softmax(logits, -1), torch.softmax(head.logits(document["final_hidden_states"][a + k]), -1)
            distance = (q - p).abs().sum()
            term = strategy.ce_weight * torch.nn.functional.cross_entropy(logits, document["input_ids"][a + 1 + k])
            term = term + strategy.l1_weight * distance
            if draft.confidence_head is not None:
                features = torch.cat((states[k], previous)) if strategy.confidence_head_with_markov else states[k]
                logit = (draft.confidence_head.proj.weight @ features + draft.confidence_head.proj.bias)[0]
                chance = (1 - 0.5 * distance).detach()
                bce = -chance * torch.nn.functional.logsigmoid(logit) - (1 - chance) * torch.nn.functional.logsigmoid(-logit)
                term = term + strategy.confidence_weight * bce
            weight = math.exp(-k / strategy.loss_decay_gamma)
            loss, weight_sum = loss + weight * term, weight_sum + weight
    return loss, weight_sum


@pytest.mark.parametrize(
    "kind, confidence",
    [("vanilla", {}), ("gated", {"confidence_head_with_markov": False}), ("rnn", {}), ("vanilla", {"confidence_head": False})],
)
def test_loss_and_gradients_equal_the_slow_reference(make_batch, tiny_head, kind, confidence):
    strategy = make_block_strategy("dspark", markov_head_type=kind, ce_weight=0.3, confidence_weight=0.5, **confidence)
    batch = make_batch(MASKS, width=20)
    # The teacher has the target's scale and soft-cap; draft states meet the bare head, as in SGLang.
    head = TargetHead(tiny_head.weight, scale=0.5, soft_cap=3.0)
    fast, slow = (make_block_draft(strategy, 2) for _ in range(2))
    out = strategy.forward_loss(fast, batch, head, CONTEXT)
    loss, weight_sum = slow_loss(strategy, slow, batch, head, kind)
    assert torch.allclose(out.loss_sum, loss, rtol=1e-5)
    assert out.weight_sum.item() == pytest.approx(weight_sum)
    assert out.metrics["per_position_accuracy"][1].tolist() == [14, 10, 6, 3]  # slot 0 is trained and every slot served
    out.loss_sum.backward(), loss.backward()
    assert_same_gradients(fast, slow)


def test_the_confidence_head_has_no_say_in_its_own_label(make_batch, tiny_head):
    """The label is detached: with only the confidence term, neither the Markov output nor its table of biases moves."""
    strategy = make_block_strategy("dspark", ce_weight=0.0, l1_weight=0.0, confidence_head_with_markov=False)
    draft = make_block_draft(strategy)
    strategy.forward_loss(draft, make_batch(MASKS, width=20), tiny_head, CONTEXT).loss_sum.backward()
    assert draft.markov_head.markov_w2.weight.grad.abs().sum() == 0 and draft.markov_head.markov_w1.weight.grad.abs().sum() == 0
    assert draft.confidence_head.proj.weight.grad.abs().sum() > 0


def test_the_acceptance_rate_is_one_minus_the_total_variation(make_batch, tiny_head):
    """A draft whose logits are the target's own accepts everything: states equal to the final hidden states, no Markov bias."""
    strategy, batch = make_block_strategy("dspark", block_size=1, confidence_head=False), make_batch(MASKS, width=20)
    draft = make_block_draft(strategy)
    torch.nn.init.zeros_(draft.markov_head.markov_w2.weight)
    anchors = [i for i, _ in enumerate(slow_anchors(batch))]
    from specforge.training.strategies.block_rows import align_blocks, drawn_anchors

    rows = align_blocks(batch, drawn_anchors(batch, None, 0, 0), 1, 1)
    states = batch.tensors["final_hidden_states"].flatten(0, 1)[rows.before]
    out = strategy.loss(draft, states, rows, batch, tiny_head, CONTEXT)
    rate, count = out.metrics["acceptance_rate"]
    assert count.item() == len(anchors) and rate.item() == pytest.approx(len(anchors), rel=1e-5)
