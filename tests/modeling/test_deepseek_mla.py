"""The ``deepseek_mla`` architecture against transformers' own DeepSeek-V3 attention, and the check values of Kimi K2."""

from __future__ import annotations

import pytest
import torch

from specforge.modeling.draft.deepseek_mla import DeepseekMlaDraft
from specforge.modeling.rope import rotate_adjacent_pairs, rotate_half_pairs, yarn_softmax_factor
from specforge.modeling.target_facts import TargetFacts, resolve_rope
from specforge.ops.attention import flex_attention, plain_attention, unroll_attention, unroll_attention_reference

YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
SIZES = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20,
         "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
         "rope": YARN, "init_from": "random"}  # fmt: skip
KIMI = {"model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "vocab_size": 163840, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0,
                         "mscale": 1.0, "mscale_all_dim": 1.0}}  # fmt: skip
NULLS = dict.fromkeys(SIZES) | {"num_layers": 1, "init_from": "random"}


def make(**changes) -> DeepseekMlaDraft:
    return DeepseekMlaDraft(**{**SIZES, **changes})


@pytest.mark.parametrize("q_rank", [24, 0])
@pytest.mark.parametrize("rope", [YARN, {"rope_type": "default", "rope_theta": 1e4}], ids=lambda r: r["rope_type"])
def test_attention_equals_that_of_transformers(q_rank, rope) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    torch.manual_seed(0)
    draft = make(q_lora_rank=q_rank, rope=rope)
    ours = draft.attention(32, 32, 0)
    config = DeepseekV3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=q_rank or None, kv_lora_rank=20,
                              qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, max_position_embeddings=256, rms_norm_eps=1e-6,
                              rope_parameters=dict(rope), attn_implementation="eager")  # fmt: skip
    theirs = DeepseekV3Attention(config, 0)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.load_state_dict(ours.state_dict())
    x, positions = torch.randn(1, 9, 32), torch.arange(40, 49)[None]
    table = draft.rotary()(positions, torch.float32)
    keys, values = ours.keys_values(x, table)
    assert keys.shape == (1, 9, 4, 20) and values.shape == (1, 9, 4, 10)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    o, _ = plain_attention(ours.queries(x, table), keys, values, visible[None], ours.facts.scale)
    mask = torch.where(visible, 0.0, float("-inf"))[None, None]
    expected = theirs(x, DeepseekV3RotaryEmbedding(config)(x, positions), mask)[0]
    torch.testing.assert_close(ours.output(o), expected, rtol=1e-5, atol=1e-5)


def test_turning_adjacent_pairs_gives_the_scores_of_turning_permuted_halves() -> None:
    torch.manual_seed(1)
    q, k = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    rope = make().rotary()(torch.arange(6), torch.float32)
    permuted = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    adjacent = torch.einsum("thd,shd->hts", rotate_adjacent_pairs(q, rope), rotate_adjacent_pairs(k, rope))
    halves = torch.einsum("thd,shd->hts", rotate_half_pairs(q[..., permuted], rope), rotate_half_pairs(k[..., permuted], rope))
    torch.testing.assert_close(adjacent, halves)
    wrong = torch.einsum("thd,shd->hts", rotate_half_pairs(q, rope), rotate_half_pairs(k, rope))
    assert not torch.allclose(adjacent, wrong, atol=1e-2), "pairs that were not permuted are another rotation"


def test_only_the_rope_slice_turns_and_all_heads_share_its_key() -> None:
    torch.manual_seed(2)
    draft = make()
    attention, x = draft.attention(64, 32, 0), torch.randn(3, 64)
    here, there = (draft.rotary()(torch.arange(3) + shift, torch.float32) for shift in (0, 5))
    for make_part in (attention.queries, lambda *a: attention.keys_values(*a)[0]):
        a, b = make_part(x, here), make_part(x, there)
        assert a[..., :12].equal(b[..., :12]) and not torch.allclose(a[..., 12:], b[..., 12:])
    keys, values = attention.keys_values(x, here)
    assert keys[:, :1, 12:].expand(-1, 4, -1).equal(keys[..., 12:])
    assert values.equal(attention.keys_values(x, there)[1])


def test_check_values_of_kimi_k2() -> None:
    """Values of the published configuration: m, scale, the ramp's borders, the table's multiplier and the number of parameters."""
    node = DeepseekMlaDraft.fill_from_target(NULLS, TargetFacts.from_config(KIMI))
    draft = DeepseekMlaDraft(**node)
    assert yarn_softmax_factor(draft.rope) ** 0.5 == pytest.approx(1.4158883, abs=1e-7)
    rotary = draft.rotary()
    plain = 50000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    share = (rotary._frequencies.double() / plain).tolist()
    assert share[:20] == pytest.approx([1.0] * 20, rel=1e-5) and share[20:] == pytest.approx([1 / 64] * 12, rel=1e-5)
    assert rotary.factor == 1.0
    with torch.device("meta"):
        layer = torch.nn.ModuleList([draft.attention(2 * 7168, 7168, 0), draft.feed_forward(0), *(draft.norm(7168) for _ in range(4)),
                                     torch.nn.Linear(3 * 7168, 7168, bias=False)])  # fmt: skip
    assert layer[0].facts.scale == pytest.approx(0.1446796, abs=1e-7)
    assert sum(p.numel() for p in layer.parameters()) / 1e9 == pytest.approx(0.667, abs=5e-4)
    fields = draft.config_fields()
    assert resolve_rope(fields) == resolve_rope(KIMI) and fields["rope_scaling"]["rope_theta"] == fields["rope_theta"] == 50000.0
    assert fields["num_hidden_layers"] == fields["first_k_dense_replace"] == 1 and fields["max_position_embeddings"] == 262144


def test_a_target_without_latent_attention_gets_derived_dimensions(tiny_target_facts) -> None:
    llama = TargetFacts.from_config({"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                                     "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "rope_theta": 1e5,
                                     "partial_rotary_factor": 0.5})  # fmt: skip
    node = DeepseekMlaDraft.fill_from_target(NULLS, llama)
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    assert [node[name] for name in names] == [576, 288, 64, 32, 64]
    assert node["rope"] == {"rope_type": "default", "rope_theta": 1e5}, "the whole slice turns, whatever the target turns"
    for given in (NULLS, {**NULLS, "num_heads": 2}, {**NULLS, "q_lora_rank": 0}):
        node = DeepseekMlaDraft.fill_from_target(given, tiny_target_facts)
        assert DeepseekMlaDraft.rules({}, {"draft": node}) == []
        attention = DeepseekMlaDraft(**node).attention(32, 16, 0)
        assert attention.output(torch.randn(2, attention.facts.num_heads, attention.facts.value_width)).shape == (2, 16)


def test_a_direct_target_gets_a_rank_since_servers_need_one() -> None:
    direct = {**KIMI, "q_lora_rank": None, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16}
    node = DeepseekMlaDraft.fill_from_target(NULLS, TargetFacts.from_config({"model_type": "wrapper", "text_config": direct}))
    assert (node["q_lora_rank"], node["kv_lora_rank"], node["v_head_dim"]) == (1536, 512, 128)


def test_bad_sizes_are_named() -> None:
    assert any("draft.kv_lora_rank: 0" in p for p in DeepseekMlaDraft.rules({}, {"draft": {**SIZES, "kv_lora_rank": 0}}))
    assert any(
        "draft.qk_rope_head_dim: 7 — must be even" in p for p in DeepseekMlaDraft.rules({}, {"draft": {**SIZES, "qk_rope_head_dim": 7}})
    )
    assert DeepseekMlaDraft.rules({}, {"draft": {**SIZES, "hidden_size": None}}) == []


def test_names_below_a_layer_are_those_of_the_attention() -> None:
    for rank in (24, 0):
        draft = make(q_lora_rank=rank)
        layer = torch.nn.ModuleDict({"self_attn": draft.attention(64, 32, 0), "mlp": draft.feed_forward(0)})
        assert layer.state_dict().keys() == draft.layer_weight_names().keys()


def test_operators_take_keys_and_values_of_different_widths() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 5, 4, 24), torch.randn(2, 7, 4, 24), torch.randn(2, 7, 4, 16)
    own_k, own_v = [torch.randn(2, 5, 4, 24)], [torch.randn(2, 5, 4, 16)]
    visible = (torch.arange(7) <= torch.arange(5).unsqueeze(-1) + 2).expand(2, -1, -1)
    slow = unroll_attention_reference(q, k, v, visible, 0.2, own_k, own_v)
    torch.testing.assert_close(unroll_attention(q, k, v, visible, 0.2, own_k, own_v), slow, rtol=1e-5, atol=1e-6)
    everything = unroll_attention_reference(q, k, v, torch.ones_like(visible), 0.2, own_k, own_v)
    flex = unroll_attention(q, k, v, None, 0.2, own_k, own_v, flex_attention)
    torch.testing.assert_close(flex, everything, rtol=1e-5, atol=1e-6)
