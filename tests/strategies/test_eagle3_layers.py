"""The unroll of any architecture and depth equals an autoregressive rollout that recomputes everything from its inputs, without a cache."""

from __future__ import annotations

import pytest
import torch

from specforge.evaluation.draft_tree import TreeShape
from specforge.modeling.draft.deepseek_mla import DeepseekMlaDraft
from specforge.modeling.draft.llama import LlamaDraft
from specforge.modeling.draft.qwen3 import Qwen3Draft
from specforge.modeling.wiring.eagle3 import Eagle3Draft
from specforge.ops.attention import flex_attention, plain_attention
from specforge.runtime.contracts import StepContext
from specforge.training.strategies.eagle3_rows import align

# Two-turn documents, packed; a reply of one token; an unsupervised document.
MASKS = [[[0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]], [[0, 0, 1, 0, 1, 1, 1], [0, 0, 0]]]
CONTEXT = StepContext(step=0, total_steps=10, epoch=0, seed=0)
COMMON = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
          "rope": {"rope_type": "default", "rope_theta": 10000.0}, "init_from": "random"}  # fmt: skip
GROUPED = {**COMMON, "num_kv_heads": 2, "head_dim": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0}
LATENT = {**COMMON, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 6, "rope": YARN}
FULL, SLIDING = "full_attention", "sliding_attention"
DRAFTS = {
    "llama 2": LlamaDraft(num_layers=2, **GROUPED),
    "llama 3": LlamaDraft(num_layers=3, **GROUPED),
    "qwen3 1": Qwen3Draft(num_layers=1, layer_types=None, sliding_window=None, **GROUPED),
    "qwen3 sliding 1": Qwen3Draft(num_layers=1, layer_types=[SLIDING], sliding_window=2, **GROUPED),
    "qwen3 sliding 3": Qwen3Draft(num_layers=3, layer_types=[SLIDING, FULL, SLIDING], sliding_window=3, **GROUPED),
    "mla 1": DeepseekMlaDraft(num_layers=1, **LATENT),
    "mla 2, direct queries": DeepseekMlaDraft(num_layers=2, **{**LATENT, "q_lora_rank": 0}),
}
every_draft = pytest.mark.parametrize("name", DRAFTS)


def build(name, flags, seed=0) -> Eagle3Draft:
    torch.manual_seed(seed)
    draft = Eagle3Draft(DRAFTS[name], target_hidden_size=16, num_aux=3, embedding=torch.randn(40, 16), d2t=torch.zeros(40, dtype=torch.int64),
                        t2d=torch.ones(40, dtype=torch.bool), flags=flags)  # fmt: skip
    for parameter in draft.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return draft


def run_stack(draft, embedded, g):
    """A whole sequence through all layers, causally: embedded and g [T, H] at positions 0 … T − 1 -> the last layer's output [T, H].

    Residuals and norms are written out as SGLang's class computes them: only the first layer sees the embedding.
    """
    positions = torch.arange(embedded.shape[0])
    rope = draft.rotary(positions, torch.float32)
    distance = positions[:, None] - positions[None]
    residual = g
    for i in range(len(draft.stack)):
        layer = draft.get_submodule("midlayer" if i == 0 else f"layers.{i}")
        x = layer.hidden_norm(residual)
        if i == 0:
            x = torch.cat((layer.input_layernorm(embedded), x), -1)
        attention = layer.self_attn
        q, (k, v) = attention.queries(x, rope), attention.keys_values(x, rope)
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(groups, 1)) * attention.facts.scale
        seen = (distance >= 0) & (distance < (attention.facts.window or 999))
        o = torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.repeat_interleave(groups, 1))
        residual = residual + attention.output(o)
        residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
    return residual


def rollout(draft, tok, aux, i, num_steps):
    """Normed states [L, H] of row i: the context rows, then one own row a step that reads its last state."""
    embedded, g = draft.embed(tok[1 : i + 2]), draft.fuse(aux[: i + 1])
    normed: list[torch.Tensor] = []
    state = g[:0]
    for k in range(num_steps):
        if k > 0:
            embedded, g = torch.cat((embedded, draft.embed(tok[i + 1 + k])[None])), torch.cat((g, state))
        h = run_stack(draft, embedded, g)[-1:]
        normed.append(draft.norm(h))
        state = normed[-1] if draft.flags.norm_output else h
    return torch.cat(normed)


def expected_states(draft, batch, rows, num_steps):
    """(flat row, step) -> normed state, of every row and step that has weight."""
    documents, found = batch.tensors["document_ids"].flatten(), {}
    for r, flat in enumerate(rows.inputs.rows.flat.tolist()):
        places = (documents == documents[flat]).nonzero().squeeze(-1)
        tok = batch.tensors["input_ids"].flatten()[places]
        steps = int((rows.weights[:, r] > 0).sum())
        states = rollout(draft, tok, batch.tensors["aux_hidden_states"].flatten(0, 1)[places], flat - int(places[0]), steps)
        found |= {(r, k): states[k] for k in range(min(steps, num_steps))}
    return found


@every_draft
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("layout", ["by document", "packed", "flex"])
def test_the_unroll_equals_the_rollout(name, norm_output, layout, make_strategy, make_batch) -> None:
    strategy, batch = make_strategy(norm_output=norm_output), make_batch(MASKS, width=20)
    draft = build(name, strategy.flags)
    draft.attend = flex_attention if layout == "flex" else plain_attention
    rows = align(batch, 4, by_document=layout == "by document")
    with torch.no_grad():
        states = draft(rows.inputs, lambda k, normed, head: normed)
        expected = expected_states(draft, batch, rows, 4)
    assert len(expected) == int(rows.weights.sum()) == 21 + 1
    for (r, k), state in expected.items():
        torch.testing.assert_close(states[k][r], state, rtol=1e-4, atol=1e-5, msg=lambda m, r=r, k=k: f"row {r} step {k}: {m}")


@pytest.mark.parametrize("name", ["llama 3", "qwen3 sliding 3", "mla 1", "mla 2, direct queries"])
def test_gradients_equal_those_of_the_rollout(name, make_strategy, make_batch) -> None:
    strategy, batch = make_strategy(), make_batch(MASKS, width=20)
    draft, rows, gradients = build(name, strategy.flags), align(batch, 4, by_document=True), []
    direction = torch.randn(4, rows.inputs.rows.flat.numel(), 16)
    fast = torch.stack(draft(rows.inputs, lambda k, normed, head: normed))
    slow = sum((s * direction[k, r]).sum() for (r, k), s in expected_states(draft, batch, rows, 4).items())
    for value in ((fast * direction * (rows.weights > 0).unsqueeze(-1)).sum(), slow):
        draft.zero_grad()
        value.backward()
        gradients.append({n: p.grad.clone() for n, p in draft.named_parameters() if n != "lm_head.weight"})
    for n, gradient in gradients[0].items():
        assert gradient.any(), n
        torch.testing.assert_close(gradient, gradients[1][n], rtol=1e-3, atol=1e-4, msg=lambda m, n=n: f"{n}: {m}")


@every_draft
def test_drafting_with_a_cache_equals_the_rollout(name, make_strategy) -> None:
    """Committing in pieces, chains that are thrown away in between, and the tree's first branch: all say what the rollout says."""
    strategy = make_strategy()
    draft = build(name, strategy.flags)
    torch.manual_seed(4)
    aux, tok = torch.randn(9, 48), torch.randint(0, 40, (14,))
    proposer = strategy.proposer(draft)
    for start, end in ((0, 4), (4, 5), (5, 9)):
        proposer.observe(aux[start:end], tok[start + 1 : end + 1].tolist())
        drafted = proposer.propose(4, 0.0, None).tokens
        said = tok[: end + 1].tolist()
        with torch.no_grad():
            for _ in range(4):
                said.append(0)  # the token after the last state is not read
                normed = rollout(draft, torch.tensor(said), aux, end - 1, len(said) - end - 1)
                said[-1] = int(draft.logits(normed[-1]).argmax())
        assert drafted == said[end + 1 :]
        if draft.stack[0].self_attn.facts.window is None:
            assert proposer.propose_tree(TreeShape(4, 1, 4)).tokens == drafted


@every_draft
def test_a_future_feature_changes_no_earlier_prediction(name, make_strategy, make_batch) -> None:
    strategy, batch = make_strategy(), make_batch([[[0, 1, 1, 1, 1, 1, 1, 1]]], width=8)
    draft, changed = build(name, strategy.flags), {k: t.clone() for k, t in batch.tensors.items()}
    changed["aux_hidden_states"][0, 4] += 1.0

    def run(tensors):
        rows = align(type(batch)(tensors, batch.sample_ids), 3, by_document=True)
        return torch.stack(draft(rows.inputs, lambda k, normed, head: normed)), rows.inputs.rows.flat

    (before, flat), (after, _) = run(batch.tensors), run(changed)
    moved = (before - after).abs().amax(dim=(0, 2)) > 1e-6
    assert not moved[flat < 4].any() and moved[flat == 4].all()


def test_names_are_those_of_the_server(make_strategy) -> None:
    """The first layer is midlayer, as in published drafts; later ones have the loader's numbers and no input_layernorm."""
    names = build("llama 2", make_strategy().flags).state_dict().keys()
    layer = {f"self_attn.{p}_proj.weight" for p in "qkvo"} | {f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    layer |= {"hidden_norm.weight", "post_attention_layernorm.weight"}
    expected = {f"midlayer.{n}" for n in layer | {"input_layernorm.weight"}} | {f"layers.1.{n}" for n in layer}
    assert names == expected | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}


def test_warm_start_fills_every_layer(make_strategy) -> None:
    draft = build("llama 2", make_strategy().flags)
    weights = {"self_attn.q_proj.weight": torch.randn(64, 16), "hidden_norm.weight": torch.rand(16)}
    done = draft.warm_start(weights, torch.rand(16), torch.randn(40, 16))
    assert {"midlayer.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight", "layers.1.hidden_norm.weight", "fc.weight"} <= set(done)
    assert draft.layers["1"].self_attn.q_proj.weight.equal(weights["self_attn.q_proj.weight"])
    assert draft.midlayer.self_attn.q_proj.weight[:, 16:].equal(weights["self_attn.q_proj.weight"])
    assert not draft.midlayer.self_attn.q_proj.weight[:, :16].any()


@every_draft
def test_a_batch_without_supervised_rows_reaches_every_parameter_with_zero(name, make_strategy, make_batch, tiny_head) -> None:
    strategy = make_strategy()
    draft = build(name, strategy.flags)
    out = strategy.forward_loss(draft, make_batch([[[0, 0, 0]]], width=3), tiny_head, CONTEXT)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0 and not [n for n, p in draft.named_parameters() if p.grad is None or p.grad.any()]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama 3", "qwen3 sliding 1", "qwen3 sliding 3", "mla 1", "mla of DeepSeek's widths"])
def test_gpu_loss_and_gradients_equal_those_of_the_cpu(name, dtype, make_strategy, make_batch, tiny_head, monkeypatch) -> None:
    """Flex attention with windows, several layers, and keys wider than values."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    wide = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    own = wide if "widths" in name else {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    if name.startswith("mla"):
        monkeypatch.setitem(DRAFTS, name, DeepseekMlaDraft(num_layers=1, **{**LATENT, **own}))
    strategy, tolerance = make_strategy(ttt_length=4), 2e-3 if dtype is torch.float32 else 0.06
    for masks, width in (
        (MASKS, 20),
        ([[[0] + [1] * 200]], 201),
        ([[[0, 1, 1, 1]], [[0, 0, 1, 1, 1, 1]], [[0] * 8]], 8),
        ([[[0, 0, 0]]], 3),
    ):
        batch = make_batch(masks, width)
        slow, fast = build(name, strategy.flags), build(name, strategy.flags).to("cuda", dtype)
        expected = strategy.forward_loss(slow, batch, tiny_head, CONTEXT)
        found = strategy.forward_loss(fast, batch.to(torch.device("cuda")), type(tiny_head)(tiny_head.weight.to("cuda", dtype)), CONTEXT)
        assert found.weight_sum.item() == expected.weight_sum.item()
        assert found.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=tolerance, abs=1e-6)
        expected.loss_sum.backward(), found.loss_sum.backward()
        for (n, a), b in zip(slow.named_parameters(), fast.parameters(), strict=True):
            a, b = a.grad.flatten(), b.grad.cpu().float().flatten()
            if dtype is torch.float32:
                assert (a - b).abs().max() <= 6e-3 * a.abs().max().clamp(min=1e-6), n
            elif a.any():
                assert torch.cosine_similarity(a, b, dim=0) > 0.98, n
