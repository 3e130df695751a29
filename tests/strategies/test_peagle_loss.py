"""P-EAGLE against a slow reference that follows conventions §2–§3 index by index, and the properties of its depth sampling."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from specforge.modeling.draft.llama import LlamaDraft
from specforge.modeling.wiring.peagle import PEagleDraft
from specforge.ops.attention import flex_attention, plain_attention, unroll_attention_reference
from specforge.ops.chain_attention import AnchorMask, join, own_chain_attention
from specforge.runtime.contracts import StepContext
from specforge.runtime.data_plane.collate import FeatureLayout, collate
from specforge.training.strategies.peagle import PEagle
from specforge.training.strategies.peagle_rows import align, legal_rows, sampled_rows

CONTEXT = StepContext(step=0, total_steps=10, epoch=0, seed=0)
# Two-turn documents, a reply that ends the document, a reply of one token, an unsupervised document.
MASKS = [[[0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]], [[0, 0, 1, 0, 1, 1, 1], [0, 0, 0]]]
MASK = 39


def strategy(**changes):
    arguments = {
        "num_depths": 3,
        "down_sample_ratio": 1.0,
        "down_sample_ratio_min": 0.2,
        "mask_token_id": MASK,
        "draft_vocab_size": None,
        "aux_hidden_state_layer_ids": [1, 2, 4],
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
    }
    return PEagle(**{**arguments, **changes})


def draft_for(chosen, architecture, kept=None, num_layers=2, seed=0):
    torch.manual_seed(seed)
    ids = torch.arange(40) if kept is None else torch.tensor(sorted(kept))
    t2d = torch.zeros(40, dtype=torch.bool)
    t2d[ids] = True
    draft = PEagleDraft(
        LlamaDraft(**{**architecture.plain_config(), "num_layers": num_layers}),
        target_hidden_size=16,
        num_aux=3,
        mask_token_id=MASK,
        embedding=torch.randn(40, 16),
        d2t=ids - torch.arange(len(ids)),
        t2d=t2d,
        flags=chosen.flags,
    )
    for parameter in draft.parameters():  # norms away from one, so that a missing norm shows
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    torch.nn.init.normal_(draft.mask_hidden)
    return draft


def documents_of(batch):
    ids = batch.tensors["document_ids"]
    for number in range(len(batch.sample_ids)):
        b, places = (ids == number).nonzero(as_tuple=True)
        yield (int(b[0]) if len(b) else 0), places.tolist()


def weight_of(m, a, d):
    """∏ m[j], j = a+1 … a+2+d, inside the document."""
    needed = range(a + 1, a + 3 + d)
    return needed[-1] < len(m) and all(m[j] for j in needed)


def forward_document(draft, rows, tok, aux):
    """States of rows (a, d) of one document, layer by layer, every visible key picked by the rule of the paper."""
    states, inputs = {}, {}
    first = draft.layers[0]
    for a, d in rows:
        embedded = draft.embed(torch.tensor(tok[a + 1] if d == 0 else MASK))
        g = draft.fuse(aux[a] if d == 0 else draft.mask_hidden[0, 0])
        inputs[a, d], states[a, d] = first.attention_input(embedded, g)
    for i, layer in enumerate(draft.layers):
        if i:
            inputs = {row: layer.input_layernorm(x) for row, x in states.items()}
        attention = layer.self_attn
        keys = {row: attention.keys_values(u, draft.rotary(torch.tensor(sum(row)), torch.float32)) for row, u in inputs.items()}
        fresh = {}
        for a, d in rows:
            seen = [(x, e) for x, e in rows if (e == 0 and x <= a) or (x == a and e <= d)]
            q = attention.queries(inputs[a, d], draft.rotary(torch.tensor(a + d), torch.float32))
            group = q.shape[0] // keys[a, d][0].shape[0]
            scores = torch.stack([(q * keys[row][0].repeat_interleave(group, 0)).sum(-1) for row in seen]) * attention.facts.scale
            weights = torch.softmax(scores, dim=0)
            o = sum(w.unsqueeze(-1) * keys[row][1].repeat_interleave(group, 0) for w, row in zip(weights, seen, strict=True))
            fresh[a, d] = layer.finish(states[a, d], o)
        states = fresh
    return {row: draft.norm(x) for row, x in states.items()}


def slow_loss(chosen, draft, batch, head, kept_rows):
    """Loss, weight_sum and counts by plain loops over the rows (document, a, d) of ``kept_rows``."""
    tensors = batch.tensors
    kept = (draft.d2t + torch.arange(draft.d2t.numel())).tolist()
    loss = torch.zeros(())
    correct, count = [0] * chosen.num_depths, [0] * chosen.num_depths
    for number, (b, places) in enumerate(documents_of(batch)):
        tok = [int(tensors["input_ids"][b, p]) for p in places]
        aux = [tensors["aux_hidden_states"][b, p] for p in places]
        teacher = [head.weight @ tensors["final_hidden_states"][b, p] for p in places]
        deeper = [(a, d) for n, a, d in sorted(kept_rows) if n == number and d > 0]
        normed = forward_document(draft, [(a, 0) for a in range(len(tok) - 1)] + deeper, tok, aux)
        for n, a, d in sorted(kept_rows):
            if n != number:
                continue
            log_q = torch.log_softmax(draft.lm_head(normed[a, d]), dim=-1)
            label = int(teacher[a + 1 + d].argmax())
            count[d] += 1
            correct[d] += label == kept[int(log_q.argmax())]
            if label in kept:
                loss = loss - (torch.softmax(teacher[a + 1 + d][kept], dim=-1) * log_q).sum()
    return loss, correct, count


def legal_by_hand(batch, num_depths):
    rows = set()
    for number, (b, places) in enumerate(documents_of(batch)):
        m = [int(batch.tensors["loss_mask"][b, p]) for p in places]
        rows |= {(number, a, d) for a in range(len(m)) for d in range(num_depths) if weight_of(m, a, d)}
    return rows


def as_triples(kept, batch):
    documents, positions = batch.tensors["document_ids"], batch.tensors["position_ids"]
    return {(int(documents[b, s]), int(positions[b, s]), int(d)) for d, b, s in kept.nonzero().tolist()}


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}, {"norm_before_fc": True, "norm_before_residual": True}])
@pytest.mark.parametrize(("kept", "ratio", "num_layers"), [(None, 1.0, 1), (range(0, 40, 2), 0.6, 2), (None, 0.6, 3)])
def test_loss_rows_and_gradients_equal_the_slow_reference(tiny_architecture, make_batch, tiny_head, flags, kept, ratio, num_layers):
    chosen = strategy(**flags, down_sample_ratio=ratio)
    batch = make_batch(MASKS, width=20)
    rows = as_triples(sampled_rows(legal_rows(batch, 3), batch, ratio, 0.2, seed=0, epoch=0), batch)
    assert (rows == legal_by_hand(batch, 3)) == (ratio == 1.0)
    fast_draft, slow_draft = (draft_for(chosen, tiny_architecture, kept, num_layers) for _ in range(2))
    out = chosen.forward_loss(fast_draft, batch, tiny_head, CONTEXT)
    loss, correct, count = slow_loss(chosen, slow_draft, batch, tiny_head, rows)
    assert out.weight_sum.item() == len(rows) and (ratio < 1.0 or count == [11, 7, 3])
    assert torch.allclose(out.loss_sum, loss, rtol=1e-5)
    assert out.metrics["per_position_accuracy"][0].tolist() == correct
    assert out.metrics["per_position_accuracy"][1].tolist() == count
    out.loss_sum.backward(), loss.backward()
    for (name, fast), slow in zip(fast_draft.named_parameters(), slow_draft.parameters(), strict=True):
        assert fast.grad is not None and slow.grad is not None, name
        assert torch.allclose(fast.grad, slow.grad, atol=1e-4, rtol=1e-4), name
        assert fast.grad.abs().sum() > 0, name


def test_sampled_depths_are_nested_and_as_many_as_the_ratio_says(make_batch):
    batch = make_batch([[[0] + [1] * 40, [0] * 5 + [1] * 20 + [0] * 3 + [1] * 9], [[0, 1, 1, 1]]], width=80)
    legal = legal_rows(batch, 8)
    kept = sampled_rows(legal, batch, 0.7, 0.3, seed=3, epoch=1)
    assert kept[0].equal(legal[0])
    of_document = [batch.tensors["document_ids"] == n for n in range(3)]
    for d in range(1, 8):
        assert not (kept[d] & ~(kept[d - 1] & legal[d])).any()
        for here in of_document:
            available = int((kept[d - 1] & legal[d] & here).sum())
            wanted = math.ceil(int((legal[d] & here).sum()) * max(0.7**d, 0.3) - 1e-9)
            assert int((kept[d] & here).sum()) == min(wanted, available)
    assert as_triples(sampled_rows(legal, batch, 1.0, 0.2, 3, 1), batch) == legal_by_hand(batch, 8)


def test_the_draw_depends_on_seed_epoch_and_sample_alone(make_batch):
    masks = [[0] + [1] * 30, [0, 0] + [1] * 25, [0] * 4 + [1] * 28]
    packed = make_batch([[masks[0], masks[1], masks[2]]], width=100)
    others = make_batch([[masks[2]], [masks[0]]], width=40)
    others = replace(others, sample_ids=("2", "0"))

    def rows(batch, seed=0, epoch=0):
        found = as_triples(sampled_rows(legal_rows(batch, 6), batch, 0.6, 0.2, seed, epoch), batch)
        return {sample: {(a, d) for n, a, d in found if n == i} for i, sample in enumerate(batch.sample_ids)}

    first = rows(packed)
    assert {s: first[s] for s in ("2", "0")} == rows(others) and first == rows(packed)
    for changed in (rows(packed, seed=1), rows(packed, epoch=1)):
        assert all(changed[s] != first[s] for s in first)
    same_mask = make_batch([[masks[0], masks[0]]], width=80)
    drawn = rows(same_mask)
    assert drawn["0"] != drawn["1"]
    # Over many epochs no place is left out: every legal row of depth 1 is drawn about as often as another.
    counts = torch.zeros(31)
    for epoch in range(200):
        for a, d in rows(make_batch([[masks[0]]], width=31), epoch=epoch)["0"]:
            counts[a] += d == 1
    assert counts[:28].min() > 80 and counts[:28].max() < 160  # 17 of 28 rows a draw: 121 expected, standard deviation 7


def test_a_future_feature_changes_no_earlier_prediction(tiny_architecture, make_batch):
    batch = make_batch([[[0, 1, 1, 1, 1, 1, 1, 1]]], width=8)
    draft = draft_for(strategy(), tiny_architecture)

    def predictions(**changed):
        tensors = {**batch.tensors, **changed}
        rows = align(type(batch)(tensors, batch.sample_ids), legal_rows(batch, 3), by_document=True)
        return draft(rows.inputs, lambda normed, _: draft.logits(normed)), rows

    before, rows = predictions()
    aux, ids = batch.tensors["aux_hidden_states"].clone(), batch.tensors["input_ids"].clone()
    aux[0, 4] += 1.0
    after, _ = predictions(aux_hidden_states=aux)
    moved = (before - after).abs().amax(-1) > 1e-6
    assert moved.tolist() == [a >= 4 for a in rows.anchors.tolist()] and moved.any()
    ids[0, 4] = (ids[0, 4] + 1) % 40  # read by row 3 at depth 0, and by no deeper row of an earlier anchor
    after, _ = predictions(input_ids=ids)
    moved = (before - after).abs().amax(-1) > 1e-6
    assert moved.tolist() == [a >= 3 for a in rows.anchors.tolist()]


@pytest.mark.parametrize("masks", [[[[0, 0, 0]]], [[]]])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_batch_without_supervised_rows_runs_and_gives_zero(tiny_architecture, make_batch, tiny_head, masks, num_layers):
    draft = draft_for(strategy(), tiny_architecture, num_layers=num_layers)
    out = strategy().forward_loss(draft, make_batch(masks, width=3), tiny_head, CONTEXT)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0 and out.weight_sum.item() == 0
    assert out.metrics["per_position_accuracy"][1].tolist() == [0, 0, 0]
    wrong = [n for n, p in draft.named_parameters() if p.grad is None or not (p.grad == 0).all()]
    assert not wrong


def test_one_depth_is_the_first_step_of_eagle3(tiny_architecture, make_draft, make_strategy, make_batch, tiny_head):
    """With one layer and D = 1 both strategies compute the same thing, so the same weights give the same loss."""
    eagle3, batch = make_strategy(ttt_length=1, fc_norm=True), make_batch(MASKS, width=20)
    chosen = strategy(num_depths=1, fc_norm=True)
    theirs, ours = make_draft(eagle3, range(0, 40, 3)), draft_for(chosen, tiny_architecture, range(0, 40, 3), num_layers=1)
    weights = {name.replace("midlayer.", "layers.0."): t for name, t in theirs.state_dict().items()}
    ours.load_state_dict({**weights, "mask_hidden": ours.mask_hidden})
    ours.embedding = theirs.embedding
    a, b = (s.forward_loss(d, batch, tiny_head, CONTEXT) for s, d in ((eagle3, theirs), (chosen, ours)))
    assert torch.allclose(a.loss_sum, b.loss_sum, rtol=1e-6) and a.weight_sum == b.weight_sum
    assert a.metrics["per_position_accuracy"][0].equal(b.metrics["per_position_accuracy"][0])


@pytest.mark.filterwarnings("ignore:.*flex_attention")
@pytest.mark.parametrize("window", [None, 3, 1])
def test_all_attention_layouts_give_the_same_states(tiny_architecture, make_batch, window):
    """One document a padded row, documents packed behind a mask, and the mask as flex attention takes it; also with a sliding window."""
    batch = make_batch(MASKS, width=20)
    draft = draft_for(strategy(), tiny_architecture).requires_grad_(False)  # flex attention has no gradient on a CPU
    for layer in draft.layers:
        layer.self_attn.facts = replace(layer.self_attn.facts, window=window)
    kept = sampled_rows(legal_rows(batch, 3), batch, 0.7, 0.2, 0, 0)
    a, b = (draft(align(batch, kept, by_document=flag).inputs, lambda normed, _: normed) for flag in (True, False))
    draft.attend = flex_attention
    c = draft(align(batch, kept).inputs, lambda normed, _: normed)
    assert torch.allclose(a, b, atol=1e-6) and torch.allclose(a, c, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3, 2])
def test_the_two_parts_of_attention_join_to_one_softmax(window):
    """6 context keys, a chain of 4 depths at anchor 4; GQA with value width unlike key width."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 4, 6), torch.randn(1, 6, 2, 6), torch.randn(1, 6, 2, 5)
    own_k, own_v = torch.randn(1, 4, 2, 6), torch.randn(1, 4, 2, 5)
    depth = torch.arange(1, 5).unsqueeze(0)
    mask = AnchorMask(torch.zeros(1, 4), torch.full((1, 4), 4), depth, torch.zeros(1, 6), window)
    o, lse = plain_attention(q, k, v, mask.dense(), 0.4)
    joined = join(o, lse, mask.blind, *own_chain_attention(q, own_k, own_v, window, 0.4))
    for i in range(4):
        position = 4 + i + 1
        seen = torch.tensor([p <= 4 and (window is None or position - p < window) for p in range(6)])
        own = [j for j in range(i + 1) if window is None or i - j < window]
        expected = unroll_attention_reference(
            q[:, i : i + 1], k, v, seen.view(1, 1, 6), 0.4, [own_k[:, j : j + 1] for j in own], [own_v[:, j : j + 1] for j in own]
        )
        assert torch.allclose(joined[:, i], expected[:, 0], atol=1e-6)


def test_four_cuts_of_one_global_batch_give_the_same_gradient(tiny_architecture, make_batch, tiny_head):
    """All samples packed in one row, one sample a row, two micro-batches, and two ranks of two micro-batches, one of them empty."""
    chosen = strategy(down_sample_ratio=0.5)
    source = make_batch([[m] for m in ([0] + [1] * 9, [0, 0] + [1] * 8, [0, 1, 1, 1, 0, 0, 1, 1, 1, 1], [0, 0, 1])], width=10)
    lengths = [10, 10, 10, 3]
    names = ("input_ids", "loss_mask", "aux_hidden_states", "final_hidden_states")
    samples = [(str(i), {n: source.tensors[n][i, :size] for n in names}) for i, size in enumerate(lengths)]
    layout = FeatureLayout(
        {"input_ids": (), "loss_mask": (), "aux_hidden_states": (48,), "final_hidden_states": (16,)},
        {n: source.tensors[n].dtype for n in names},
    )

    def gradient(cut):
        draft = draft_for(chosen, tiny_architecture, range(0, 40, 2))
        weight = 0.0
        for rows in cut:  # one forward and backward a micro-batch, as each rank does them
            picked = [samples[i] for row in rows for i in row]
            numbered, at = [], 0
            for row in rows:
                numbered.append(list(range(at, at + len(row))))
                at += len(row)
            out = chosen.forward_loss(draft, collate(picked, numbered, layout, 0), tiny_head, CONTEXT)
            out.loss_sum.backward()
            weight += out.weight_sum.item()
        return [p.grad / weight for p in draft.parameters()], weight

    cuts = [[[[0, 1, 2, 3]]], [[[0], [1], [2], [3]]], [[[2, 0]], [[1], [3]]], [[[1]], [[2]], [[3, 0]], []]]
    (first, weight), *others = (gradient(cut) for cut in cuts)
    assert 8 + 7 + 5 < weight < 8 + 7 + 5 + (7 + 6 + 3) + (6 + 5 + 1)
    for other, other_weight in others:
        assert other_weight == weight
        assert all(torch.allclose(a, b, atol=1e-6, rtol=1e-5) for a, b in zip(first, other, strict=True))


def test_evaluation_looks_at_every_depth_and_samples_nothing(tiny_architecture, make_batch, tiny_head):
    chosen, batch = strategy(down_sample_ratio=0.3), make_batch(MASKS, width=20)
    draft = draft_for(chosen, tiny_architecture)
    documents, places, correct, legal = chosen.prefix_correctness(draft, batch, tiny_head, 3)
    found = {(n, a, d) for n, a, row in zip(documents.tolist(), places.tolist(), legal.tolist(), strict=True) for d in range(3) if row[d]}
    assert found == legal_by_hand(batch, 3)
    rows = slow_loss(chosen, draft, batch, tiny_head, found)
    assert correct.sum(0).tolist() == rows[1] and legal.sum(0).tolist() == rows[2]
