"""EAGLE-3 against a slow reference that follows conventions §2–§4 index by index, one row and one autoregressive step at a time."""

from __future__ import annotations

import pytest
import torch

from specforge.modeling.rope import rotate_half_pairs
from specforge.runtime.contracts import StepContext

CONTEXT = StepContext(step=0, total_steps=10, epoch=0, seed=0)
# Two-turn documents, a reply that ends the document, a reply of one token, an unsupervised document.
MASKS = [[[0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]], [[0, 0, 1, 0, 1, 1, 1], [0, 0, 0]]]


def documents_of(batch):
    """(batch row, places) of every document."""
    ids = batch.tensors["document_ids"]
    for number in range(len(batch.sample_ids)):
        b, places = (ids == number).nonzero(as_tuple=True)
        yield int(b[0]), places.tolist()


def head_softmax(logits, ids):
    return torch.softmax(logits[ids], dim=-1)


def slow_loss(strategy, draft, batch, head):
    """Rows, weights, attention and loss by plain loops: every row keeps its own list of keys, as a serving engine would."""
    tensors, layer, attention = batch.tensors, draft.midlayer, draft.midlayer.self_attn
    kept = (draft.d2t + torch.arange(draft.d2t.numel())).tolist()
    loss, weight_sum = torch.zeros(()), 0
    correct, count = [0] * strategy.ttt_length, [0] * strategy.ttt_length
    for b, places in documents_of(batch):
        tok = [int(tensors["input_ids"][b, p]) for p in places]
        m = [int(tensors["loss_mask"][b, p]) for p in places]
        aux = [tensors["aux_hidden_states"][b, p] for p in places]
        teacher = [head.weight @ tensors["final_hidden_states"][b, p] for p in places]
        size = len(tok)
        for i in range(size):
            keys, values = [], []
            for j in range(min(i + 1, size - 1)):  # step-0 keys of positions ≤ i
                u, _ = layer.attention_input(draft.embed(torch.tensor(tok[j + 1])), draft.fuse(aux[j]))
                k, v = attention.keys_values(u, draft.rotary(torch.tensor(j), torch.float32))
                keys.append(k), values.append(v)
            state = None
            for step in range(strategy.ttt_length):
                needed = range(i + 1, i + 2 + step + 1)
                if needed[-1] >= size or not all(m[j] for j in needed):
                    break
                weight_sum += step == 0
                g = draft.fuse(aux[i]) if step == 0 else state
                u, residual = layer.attention_input(draft.embed(torch.tensor(tok[i + 1 + step])), g)
                rope = draft.rotary(torch.tensor(i + step), torch.float32)
                if step > 0:
                    k, v = attention.keys_values(u, rope)
                    keys.append(k), values.append(v)
                q = attention.queries(u, rope)
                group = q.shape[0] // keys[0].shape[0]
                scores = torch.stack([(q * k.repeat_interleave(group, 0)).sum(-1) for k in keys]) * attention.facts.scale
                probabilities = torch.softmax(scores, dim=0)
                o = sum(p.unsqueeze(-1) * v.repeat_interleave(group, 0) for p, v in zip(probabilities, values, strict=True))
                h = layer.finish(residual, o)
                state = draft.norm(h) if strategy.flags.norm_output else h
                log_q = torch.log_softmax(draft.lm_head(draft.norm(h)), dim=-1)
                label = int(teacher[i + 1 + step].argmax())
                count[step] += 1
                correct[step] += label == kept[int(log_q.argmax())]
                if label in kept:
                    loss = loss - strategy.step_decay**step * (head_softmax(teacher[i + 1 + step], kept) * log_q).sum()
    return loss, weight_sum, correct, count


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True, "norm_before_residual": True}])
@pytest.mark.parametrize("kept", [None, range(0, 40, 2)])
def test_loss_rows_and_gradients_equal_the_slow_reference(make_strategy, make_draft, make_batch, tiny_head, flags, kept):
    strategy = make_strategy(**flags)
    batch = make_batch(MASKS, width=20)
    fast_draft, slow_draft = make_draft(strategy, kept), make_draft(strategy, kept)
    out = strategy.forward_loss(fast_draft, batch, tiny_head, CONTEXT)
    loss, weight_sum, correct, count = slow_loss(strategy, slow_draft, batch, tiny_head)
    assert out.weight_sum.item() == weight_sum == 11
    assert torch.allclose(out.loss_sum, loss, rtol=1e-5)
    assert out.metrics["per_position_accuracy"][0].tolist() == correct
    assert out.metrics["per_position_accuracy"][1].tolist() == count == [11, 7, 3]
    out.loss_sum.backward(), loss.backward()
    for (name, fast), slow in zip(fast_draft.named_parameters(), slow_draft.parameters(), strict=True):
        assert fast.grad is not None and slow.grad is not None, name
        assert torch.allclose(fast.grad, slow.grad, atol=1e-4, rtol=1e-4), name
        assert fast.grad.abs().sum() > 0, name


def test_rotation_pairs_first_and_second_half():
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    cos, sin = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    assert rotate_half_pairs(x, (cos, sin)).tolist() == [[-3.0, 2.0, 1.0, 4.0]]


def test_packed_rows_give_the_loss_of_one_document_a_row(make_strategy, make_draft, make_batch, tiny_head):
    strategy = make_strategy()
    packed = make_batch(MASKS, width=20)
    split = {name: [] for name in packed.tensors}
    for b, places in documents_of(packed):
        for name, tensor in packed.tensors.items():
            rows = tensor[b, places[0] : places[-1] + 1]
            pad = torch.full((12 - len(places), *rows.shape[1:]), -1 if name == "document_ids" else 0, dtype=rows.dtype)
            split[name].append(torch.cat((rows, pad)))
    unpacked = type(packed)({n: torch.stack(t) for n, t in split.items()}, packed.sample_ids)
    draft = make_draft(strategy, range(0, 40, 3))
    a, b = (strategy.forward_loss(draft, x, tiny_head, CONTEXT) for x in (packed, unpacked))
    assert torch.allclose(a.loss_sum, b.loss_sum, rtol=1e-6) and a.weight_sum == b.weight_sum
    assert a.metrics["per_position_accuracy"][0].equal(b.metrics["per_position_accuracy"][0])


def test_a_future_feature_changes_no_earlier_prediction(make_strategy, make_draft, make_batch, tiny_head):
    strategy = make_strategy()
    batch = make_batch([[[0, 1, 1, 1, 1, 1, 1, 1]]], width=8)
    draft = make_draft(strategy)

    def predictions(tensors):
        seen = []
        from specforge.training.strategies.eagle3_rows import align

        rows = align(type(batch)(tensors, batch.sample_ids), 3)
        draft(rows.inputs, lambda k, normed, head: seen.append(draft.logits(normed)))
        return torch.stack(seen), rows.inputs.rows.flat

    before, flat = predictions(batch.tensors)
    changed = dict(batch.tensors)
    changed["aux_hidden_states"] = changed["aux_hidden_states"].clone()
    changed["aux_hidden_states"][0, 4] += 1.0
    after, _ = predictions(changed)
    moved = (before - after).abs().amax(dim=(0, 2)) > 1e-6
    assert moved.tolist() == [int(i) >= 4 for i in flat]


@pytest.mark.parametrize("masks", [[[[0, 0, 0]]], [[]]])
def test_a_batch_without_supervised_rows_runs_and_gives_zero(make_strategy, make_draft, make_batch, tiny_head, masks):
    strategy = make_strategy()
    draft = make_draft(strategy)
    out = strategy.forward_loss(draft, make_batch(masks, width=3), tiny_head, CONTEXT)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0 and out.weight_sum.item() == 0
    wrong = [n for n, p in draft.named_parameters() if p.grad is None or not (p.grad == 0).all()]
    assert not wrong


def test_engine_argmax_and_own_argmax_agree(make_strategy, make_draft, make_batch, tiny_head):
    strategy = make_strategy()
    draft = make_draft(strategy, range(0, 40, 2))
    batch = make_batch(MASKS, width=20)
    own = strategy.forward_loss(draft, batch, tiny_head, CONTEXT)
    batch.tensors["target_argmax"] = tiny_head.logits(batch.tensors["final_hidden_states"]).argmax(-1)
    given = strategy.forward_loss(draft, batch, tiny_head, CONTEXT)
    assert own.loss_sum == given.loss_sum
    assert own.metrics["per_position_accuracy"][0].equal(given.metrics["per_position_accuracy"][0])


def test_both_attention_layouts_give_the_same_unroll(make_strategy, make_draft, make_batch):
    """One document a padded row, and documents packed behind a mask."""
    from specforge.training.strategies.eagle3_rows import align

    strategy, batch = make_strategy(), make_batch(MASKS, width=20)
    draft = make_draft(strategy)
    by_document, packed = (draft(align(batch, 3, by_document=flag).inputs, lambda k, normed, head: normed) for flag in (True, False))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(by_document, packed, strict=True))


def test_four_cuts_of_one_global_batch_give_the_same_gradient(make_strategy, make_draft, make_batch, tiny_head):
    """All samples packed in one row, one sample a row, two micro-batches, and two ranks of two micro-batches, one of them empty."""
    from specforge.runtime.data_plane.collate import FeatureLayout, collate

    strategy = make_strategy(fc_norm=True)
    source = make_batch([[m] for m in ([0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 1, 1, 1], [0, 0, 1])], width=9)
    lengths = [5, 7, 9, 3]
    names = ("input_ids", "loss_mask", "aux_hidden_states", "final_hidden_states")
    samples = [(str(i), {n: source.tensors[n][i, :size] for n in names}) for i, size in enumerate(lengths)]
    layout = FeatureLayout(
        {"input_ids": (), "loss_mask": (), "aux_hidden_states": (48,), "final_hidden_states": (16,)},
        {n: source.tensors[n].dtype for n in names},
    )

    def gradient(cut):
        draft = make_draft(strategy, range(0, 40, 2))
        weight = 0.0
        for rows in cut:  # one forward and backward a micro-batch, as each rank does them
            chosen = [samples[i] for row in rows for i in row]
            numbered, at = [], 0
            for row in rows:
                numbered.append(list(range(at, at + len(row))))
                at += len(row)
            out = strategy.forward_loss(draft, collate(chosen, numbered, layout, 0), tiny_head, CONTEXT)
            out.loss_sum.backward()
            weight += out.weight_sum.item()
        return [p.grad / weight for p in draft.parameters()], weight

    cuts = [[[[0, 1, 2, 3]]], [[[0], [1], [2], [3]]], [[[2, 0]], [[1], [3]]], [[[1]], [[2]], [[3, 0]], []]]
    (first, weight), *others = (gradient(cut) for cut in cuts)
    assert weight == 3 + 4 + 4 + 0
    for other, other_weight in others:
        assert other_weight == weight
        assert all(torch.allclose(a, b, atol=1e-6, rtol=1e-5) for a, b in zip(first, other, strict=True))
