"""Gates that every block strategy passes: cuts, packing, the future, empty batches, drawn anchors, composition."""

from __future__ import annotations

import pytest
import torch
from block_toy import CONTEXT, FACTS, MASKS, NAMES, documents_of, make_block_draft, make_block_strategy

from specforge.errors import ConfigError
from specforge.ops.attention import flex_attention, plain_attention
from specforge.runtime.contracts import StepContext, TrainBatch
from specforge.runtime.data_plane.collate import FeatureLayout, collate
from specforge.training.strategies.block import default_layer_ids
from specforge.training.strategies.block_rows import align_blocks, drawn_anchors, legal_anchors
from specforge.training.strategies.sampling import choose, random_words

every_strategy = pytest.mark.parametrize("name", NAMES)


@every_strategy
def test_four_cuts_of_one_global_batch_give_the_same_gradient(name, make_batch, tiny_head):
    """All samples packed in one row, one sample a row, two micro-batches, and four ranks, one without a sample; anchors are drawn."""
    strategy = make_block_strategy(name, num_anchors=2)
    masks = [[0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 1, 1, 1], [0, 0, 1]]
    source = make_batch([[m] for m in masks], width=9)
    names = ("input_ids", "loss_mask", "aux_hidden_states", "final_hidden_states")
    samples = [(f"s{i}", {n: source.tensors[n][i, : len(m)] for n in names}) for i, m in enumerate(masks)]
    shapes = {"input_ids": (), "loss_mask": (), "aux_hidden_states": (48,), "final_hidden_states": (16,)}
    layout = FeatureLayout(shapes, {n: source.tensors[n].dtype for n in names})

    def gradient(cut):
        draft, weight = make_block_draft(strategy, 2, sliding=True), 0.0
        for rows in cut:  # one forward and backward a micro-batch, as each rank does them
            chosen, numbered = [samples[i] for row in rows for i in row], []
            for row in rows:
                numbered.append([sum(map(len, numbered)) + i for i in range(len(row))])
            out = strategy.forward_loss(draft, collate(chosen, numbered, layout, 0), tiny_head, CONTEXT)
            out.loss_sum.backward()
            weight += out.weight_sum.item()
        return [p.grad / weight for p in draft.parameters()], weight

    cuts = [[[[0, 1, 2, 3]]], [[[0], [1], [2], [3]]], [[[2, 0]], [[1], [3]]], [[[1]], [[2]], [[3, 0]], []]]
    (first, weight), *others = (gradient(cut) for cut in cuts)
    assert weight > 0
    for other, other_weight in others:
        assert other_weight == pytest.approx(weight)
        assert all(torch.allclose(a, b, atol=1e-6, rtol=1e-4) for a, b in zip(first, other, strict=True))


@every_strategy
def test_packed_rows_give_the_loss_of_one_document_a_row(name, make_batch, tiny_head):
    strategy, packed = make_block_strategy(name), make_batch(MASKS, width=20)
    split = {n: [] for n in packed.tensors}
    for b, places in documents_of(packed):
        for n, tensor in packed.tensors.items():
            rows = tensor[b, places[0] : places[-1] + 1]
            pad = torch.full((12 - len(places), *rows.shape[1:]), -1 if n == "document_ids" else 0, dtype=rows.dtype)
            split[n].append(torch.cat((rows, pad)))
    unpacked = TrainBatch({n: torch.stack(t) for n, t in split.items()}, packed.sample_ids)
    draft = make_block_draft(strategy, 2, sliding=True)
    a, b = (strategy.forward_loss(draft, x, tiny_head, CONTEXT) for x in (packed, unpacked))
    assert torch.allclose(a.loss_sum, b.loss_sum, rtol=1e-5) and a.weight_sum == b.weight_sum
    assert a.metrics["per_position_accuracy"][0].equal(b.metrics["per_position_accuracy"][0])


def moved_slots(before, after, rows):
    """(position of the anchor, slot) of every slot whose values differ."""
    moved = (before - after).abs().amax(-1) > 1e-6
    return {(int(rows.inputs.anchor_positions[n]), k) for n, k in moved.nonzero().tolist()}


@every_strategy
@pytest.mark.parametrize("sliding", [False, True])
def test_a_future_feature_or_token_changes_no_earlier_prediction(name, sliding, make_batch):
    """Feature j reaches the anchors behind j alone (and under a window of 4 only the near ones); token j only what predicts past it."""
    strategy = make_block_strategy(name)
    batch = make_batch([[[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]], width=11)
    draft = make_block_draft(strategy, 2, sliding=sliding)

    def logits_inputs(tensors):
        changed = TrainBatch(tensors, batch.sample_ids)
        rows = align_blocks(changed, legal_anchors(changed).flatten().nonzero().squeeze(-1), 4, strategy.num_proposals)
        slots = strategy.slots(draft.hidden(rows.inputs))
        if name == "domino":
            slots = torch.cat((slots, draft.latent(slots, draft.prefix_states(rows.previous_tokens()))), -1)
        elif name == "dspark":
            slots = torch.cat((slots, draft.markov_head.latent(draft.markov_head.markov_w1(rows.previous_tokens()), slots)), -1)
        return slots, rows

    before, rows = logits_inputs(batch.tensors)
    feature = {**batch.tensors, "aux_hidden_states": batch.tensors["aux_hidden_states"].clone()}
    feature["aux_hidden_states"][0, 5] += 1.0
    moved = moved_slots(before, logits_inputs(feature)[0], rows)
    slots = range(strategy.num_proposals)
    assert moved == {(a, k) for a in range(6, 10) for k in slots}, "two layers: the first sees everything"
    token = {**batch.tensors, "input_ids": batch.tensors["input_ids"].clone()}
    token["input_ids"][0, 5] = (token["input_ids"][0, 5] + 1) % 39
    moved = moved_slots(before, logits_inputs(token)[0], rows)
    anchored = {(5, k) for k in slots}
    taught = {"dflash": set(), "dpace": set()}
    taught["domino"] = {(a, k) for a in range(2, 6) for k in slots if a + k >= 5}  # the GRU reads tok[a … a+k]
    taught["dspark"] = {(a, 5 - a) for a in range(2, 6)}  # a vanilla Markov head reads tok[a+k]
    assert moved == anchored | taught[name]


def test_a_sliding_layer_alone_sees_its_window(make_batch):
    strategy = make_block_strategy("dflash")
    batch = make_batch([[[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]], width=11)
    draft = make_block_draft(strategy, 2, sliding=True)
    draft.layers = draft.layers[1:]
    rows = align_blocks(batch, legal_anchors(batch).flatten().nonzero().squeeze(-1), 4, 3)
    before = draft.hidden(rows.inputs)
    batch.tensors["aux_hidden_states"][0, 5] += 1.0
    after = draft.hidden(align_blocks(batch, rows.anchors, 4, 3).inputs)
    # Slot k of anchor a sees context positions a+k−3 … a−1.
    assert moved_slots(before, after, rows) == {(6, 0), (6, 1), (6, 2), (7, 0), (7, 1), (8, 0)}


@every_strategy
@pytest.mark.parametrize("masks", [[[[0, 0, 0]]], [[]], [[[0, 1, 0]]]])
def test_a_batch_without_a_legal_anchor_runs_and_gives_zero(name, masks, make_batch, tiny_head):
    strategy = make_block_strategy(name)
    draft, batch = make_block_draft(strategy, 2), make_batch(masks, width=3)
    out = strategy.forward_loss(draft, batch, tiny_head, CONTEXT)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0 and out.weight_sum.item() == 0
    assert not [n for n, p in draft.named_parameters() if p.grad is None or not (p.grad == 0).all()]
    assert all(len(x) == 0 for x in strategy.prefix_correctness(draft, batch, tiny_head, 2))


@torch.no_grad()
def test_both_attention_layouts_and_operators_give_the_same_states(make_batch):
    """One document a padded row with a dense mask, and documents packed behind a block mask of flex attention."""
    strategy, batch = make_block_strategy("dflash"), make_batch(MASKS, width=20)
    draft = make_block_draft(strategy, 2, sliding=True, head_dim=16)
    anchors = drawn_anchors(batch, 3, 0, 0)
    states = []
    for attend, by_document in ((plain_attention, True), (plain_attention, False), (flex_attention, False)):
        draft.attend = attend
        states.append(draft.hidden(align_blocks(batch, anchors, 4, 3, by_document).inputs))
    assert all(torch.allclose(states[0], other, atol=1e-5) for other in states[1:])


def test_anchors_depend_on_seed_epoch_and_sample_alone(make_batch):
    batch = make_batch([[[0] + [1] * 12, [0] * 3 + [1] * 9], [[1] * 20]], width=25)
    legal = legal_anchors(batch).flatten()

    def of_documents(b, seed=0, epoch=0, wanted=4):
        flat = drawn_anchors(b, wanted, seed, epoch)
        assert legal[flat].all() and torch.equal(flat, flat.sort().values)
        documents, positions = b.tensors["document_ids"].flatten()[flat], b.tensors["position_ids"].flatten()[flat]
        return {b.sample_ids[d]: positions[documents == d].tolist() for d in documents.unique().tolist()}

    drawn = of_documents(batch)
    assert {k: len(v) for k, v in drawn.items()} == {"0": 4, "1": 4, "2": 4}
    alone = TrainBatch({n: t[1:] for n, t in batch.tensors.items()}, batch.sample_ids)
    alone.tensors["document_ids"] = torch.where(alone.tensors["document_ids"] == 2, 0, -1)
    legal = legal_anchors(alone).flatten()
    assert of_documents(TrainBatch(alone.tensors, ("2",))) == {"2": drawn["2"]}
    legal = legal_anchors(batch).flatten()
    assert of_documents(batch, epoch=1) != drawn and of_documents(batch, seed=1) != drawn and of_documents(batch) == drawn
    assert drawn_anchors(batch, None, 0, 0).tolist() == legal.nonzero().squeeze(-1).tolist()
    assert of_documents(batch, wanted=100)["2"] == list(range(19))


def test_draws_are_uniform_stable_and_named():
    assert choose(5, 9, 0, 0, "x", "anchors").tolist() == [0, 1, 2, 3, 4]
    counts = torch.zeros(10)
    for i in range(2000):
        counts[torch.from_numpy(choose(10, 3, 7, 0, f"s{i}", "anchors"))] += 1
    assert ((counts - 600) ** 2 / 600).sum() < 27.9  # 99.9 % point of chi-square with 9 degrees of freedom
    assert choose(10, 3, 7, 0, "s", "anchors").tolist() != choose(10, 3, 7, 0, "s", "depths").tolist()
    # The stream must stay what it is: checkpoints resume in the middle of an epoch, perhaps under a later numpy.
    assert [int(w) for w in random_words(2, 0, 0, "x", "anchors")] == [9822035860120360317, 13628960201354871030]


@every_strategy
def test_rules_name_both_overrides(name):
    strategy = make_block_strategy(name)
    config = {"evaluator": {"num_draft_tokens": strategy.num_proposals + 1}, "target": {}, "draft": {}}
    (problem,) = strategy.rules({}, config)
    assert f"evaluator.num_draft_tokens={strategy.num_proposals} " in problem and "strategy.block_size=5" in problem
    config["evaluator"]["num_draft_tokens"] -= 1
    assert strategy.rules({}, config) == []
    assert strategy.serving_arguments(3)["speculative_num_draft_tokens"] == 4


def test_default_layers_are_those_of_sglang():
    """Values of the published drafts and of SGLang's rule: one a draft layer from 1 to N − 3."""
    assert default_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_layer_ids(36, 1) == [18] and default_layer_ids(30, 2) == [1, 27]
    with pytest.raises(ConfigError, match="draft.num_layers"):
        default_layer_ids(6, 4)
    strategy = make_block_strategy("dflash", aux_hidden_state_layer_ids=None)
    assert strategy.aux_layer_ids(FACTS) == (3,)
    node = {"aux_hidden_state_layer_ids": None, "block_size": 4}
    assert type(strategy).fill_from_draft(node, FACTS, {"num_layers": 3}) == {"aux_hidden_state_layer_ids": [1, 2, 3], "block_size": 4}


@every_strategy
def test_capture_takes_the_final_states_only_where_they_teach(name):
    spec = make_block_strategy(name).capture_spec(FACTS, "bfloat16")
    assert spec.aux_layer_ids == (1, 2, 4) and spec.target_argmax and spec.final_hidden == (name == "dspark")


@every_strategy
def test_names_of_the_weights(name):
    draft = make_block_draft(make_block_strategy(name, **({"markov_head_type": "rnn"} if name == "dspark" else {})), 2)
    layer = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    layer += [f"self_attn.{p}_proj.weight" for p in "qkvo"] + [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    names = {"d2t", "t2d", "fc.weight", "hidden_norm.weight", "norm.weight"} | {f"layers.{i}.{n}" for i in range(2) for n in layer}
    if name == "domino":
        names |= {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}
    if name == "dspark":
        names |= {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "markov_head.joint_proj.weight"}
        names |= {"markov_head.joint_proj.bias", "confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert draft.state_dict().keys() == names


@pytest.mark.gpu
@every_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_loss_and_gradients_equal_those_of_the_cpu(name, dtype, make_batch, tiny_head):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    strategy, tolerance = make_block_strategy(name), 2e-3 if dtype is torch.float32 else 0.06
    shapes = [(MASKS, 20), ([[[0] + [1] * 200]], 201), ([[[0, 1, 1, 1]], [[0, 0, 1, 1, 1, 1]], [[0] * 8]], 8), ([[[0, 0, 0]]], 3)]
    for masks, width in shapes:
        batch = make_batch(masks, width)
        slow, fast = (make_block_draft(strategy, 2, sliding=True, head_dim=16) for _ in range(2))
        fast = fast.to("cuda", dtype)
        head = type(tiny_head)(tiny_head.weight.to("cuda", dtype))
        expected = strategy.forward_loss(slow, batch, tiny_head, CONTEXT)
        found = strategy.forward_loss(fast, batch.to(torch.device("cuda")), head, CONTEXT)
        assert found.weight_sum.item() == pytest.approx(expected.weight_sum.item())
        assert found.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=tolerance, abs=1e-6)
        expected.loss_sum.backward(), found.loss_sum.backward()
        for (n, a), b in zip(slow.named_parameters(), fast.parameters(), strict=True):
            a, b = a.grad.flatten(), b.grad.cpu().float().flatten()
            if dtype is torch.float32:
                assert ((a - b).abs().max() / a.abs().max().clamp(min=1e-6)) < 6e-3, n
            elif a.any():  # DSpark's L1 term turns on the sign of q − p, which rounding flips in a batch of few rows: compare directions
                assert torch.cosine_similarity(a, b, dim=0) > 0.9, n


@every_strategy
def test_twenty_steps_reach_every_parameter(name, make_batch, tiny_head):
    strategy, batch = make_block_strategy(name), make_batch(MASKS, width=20)
    draft = make_block_draft(strategy)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(20):
        out = strategy.forward_loss(draft, batch, tiny_head, StepContext(step, 20, 0, 0))
        optimizer.zero_grad()
        (out.loss_sum / out.weight_sum).backward()
        optimizer.step()
        losses.append(float(out.loss_sum.detach() / out.weight_sum))
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad.abs().sum() > 0 for p in draft.parameters())
