"""DFlash against a slow reference that follows conventions §2 and §3 index by index."""

from __future__ import annotations

import math

import pytest
import torch
from block_toy import CONTEXT, MASKS, assert_same_gradients, make_block_draft, make_block_strategy, slow_anchors, slow_block, slow_reach

from specforge.training.strategies.block_rows import align_blocks, legal_anchors, slot_weights


def slow_loss(strategy, draft, batch, head):
    loss, weight_sum, count = torch.zeros(()), 0.0, [0] * (strategy.block_size - 1)
    for document, a in slow_anchors(batch):
        states = slow_block(draft, document, a, strategy.block_size)
        for k in range(1, min(strategy.block_size - 1, slow_reach(document, a)) + 1):  # slot 0 is the anchor itself
            weight = 1.0 if strategy.loss_decay_gamma is None else math.exp(-(k - 1) / strategy.loss_decay_gamma)
            label = document["input_ids"][a + k]
            loss = loss + weight * torch.nn.functional.cross_entropy(head.weight @ states[k], label)
            weight_sum, count[k - 1] = weight_sum + weight, count[k - 1] + 1
    return loss, weight_sum, count


@pytest.mark.parametrize("layers, sliding", [(1, False), (2, False), (3, True)])
@pytest.mark.parametrize("gamma", [None, 3.0])
def test_loss_rows_and_gradients_equal_the_slow_reference(make_batch, tiny_head, layers, sliding, gamma):
    strategy = make_block_strategy("dflash", loss_decay_gamma=gamma)
    batch = make_batch(MASKS, width=20)
    fast, slow = (make_block_draft(strategy, layers, sliding=sliding) for _ in range(2))
    out = strategy.forward_loss(fast, batch, tiny_head, CONTEXT)
    loss, weight_sum, count = slow_loss(strategy, slow, batch, tiny_head)
    assert torch.allclose(out.loss_sum, loss, rtol=1e-5)
    assert out.weight_sum.item() == pytest.approx(weight_sum)
    assert out.metrics["per_position_accuracy"][1].tolist() == count == [14, 10, 6]
    out.loss_sum.backward(), loss.backward()
    assert_same_gradients(fast, slow)


def test_the_table_by_hand(make_batch):
    """Anchors, labels, weights and where the target's choice stands, of one two-turn document behind another in a row."""
    batch = make_batch([[[0, 1, 1], [0, 1, 1, 1, 0, 1, 1, 0]]], width=12)
    tokens = batch.tensors["input_ids"][0].tolist()
    anchors = legal_anchors(batch).flatten().nonzero().squeeze(-1)
    assert anchors.tolist() == [1, 4, 5, 8]
    rows = align_blocks(batch, anchors, block_size=4, num_labels=3)
    assert rows.inputs.anchor_positions.tolist() == [1, 1, 2, 5]
    assert rows.valid.long().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert [rows.labels[n, 0].item() for n in range(4)] == [tokens[a + 1] for a in (1, 4, 5, 8)]
    assert rows.labels[1, 1].item() == tokens[6]
    assert rows.before[:, 0].tolist() == [1, 4, 5, 8] and rows.before[1, 1].item() == 5
    half = math.exp(-0.5)
    assert slot_weights(rows.valid, 2.0).sum(0).tolist() == pytest.approx([4.0, half, 0.0])


def test_accuracy_compares_with_the_targets_choice_and_not_with_the_token(make_batch, tiny_head):
    strategy, batch = make_block_strategy("dflash"), make_batch(MASKS, width=20)
    draft = make_block_draft(strategy)
    seen = {}
    for documents, places, correct, legal in [strategy.prefix_correctness(draft, batch, tiny_head, 3)]:
        seen = {"documents": documents, "places": places, "correct": correct, "legal": legal}
    assert not (seen["correct"] & ~seen["legal"]).any() and seen["legal"].sum(0).tolist() == [14, 10, 6]
    anchors = legal_anchors(batch).flatten().nonzero().squeeze(-1)
    rows = align_blocks(batch, anchors, 4, 3, by_document=True)
    predicted = draft(rows.inputs, lambda hidden: strategy.predict(draft, strategy.slots(hidden), rows, tiny_head))
    choice = torch.full((2, 20), -1)
    choice.view(-1)[rows.before[rows.valid]] = 0
    for n, j in rows.valid.nonzero().tolist():  # the target agrees with the first anchor's predictions alone
        if n == 0:
            choice.view(-1)[rows.before[n, j]] = predicted[n, j]
    batch.tensors["target_argmax"] = choice
    _, _, correct, _ = strategy.prefix_correctness(draft, batch, tiny_head, 3)
    assert correct[0].tolist() == [True, True, True]
    metric, count = strategy.forward_loss(draft, batch, tiny_head, CONTEXT).metrics["per_position_accuracy"]
    assert metric.tolist() == correct.sum(0).tolist() and count.tolist() == [14, 10, 6]
