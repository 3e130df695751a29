"""Frequencies, table factor and softmax scale of a draft with latent attention equal those of the target's own modules, type by type."""

from __future__ import annotations

import pytest
import torch

from specforge.errors import ConfigError
from specforge.modeling.draft.deepseek_mla import DeepseekMlaDraft
from specforge.modeling.rope import inverse_frequencies, rotate_adjacent_pairs, yarn_softmax_factor
from specforge.modeling.target_facts import TargetFacts

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 2e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 3e4, "factor": 2.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn of DeepSeek-V2": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64,
                            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn of unequal scales": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64,
                               "mscale": 1.0, "mscale_all_dim": 0.5},
}  # fmt: skip
NULLS = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
     "rms_norm_eps", "max_position_embeddings", "rope")
) | {"num_layers": 1, "init_from": "random"}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_latent_attention_has_the_targets_frequencies_and_softmax_scale(kind) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    config = DeepseekV3Config(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                              q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, vocab_size=100,
                              max_position_embeddings=256, rope_parameters=dict(ROPES[kind]))  # fmt: skip
    theirs = DeepseekV3RotaryEmbedding(config)
    draft = DeepseekMlaDraft(**DeepseekMlaDraft.fill_from_target(NULLS, TargetFacts.from_config(config.to_dict())))
    ours = draft.rotary()
    torch.testing.assert_close(ours._frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.factor == pytest.approx(theirs.attention_scaling)
    assert draft.attention(128, 64, 0).facts.scale == pytest.approx(DeepseekV3Attention(config, 0).scaling)


def test_the_base_reaches_every_kind_of_scaling() -> None:
    """The bug that others had: scaled types computed with base 10000 whatever the target says."""
    for kind, rope in ROPES.items():
        assert not torch.allclose(inverse_frequencies(rope, 16, 256)[0], inverse_frequencies({**rope, "rope_theta": 777.0}, 16, 256)[0]), (
            kind
        )


def test_adjacent_pairs_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert rotate_adjacent_pairs(x, (torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]))).tolist() == [[-2.0, 1.0, 3.0, 4.0]]


def test_softmax_factor_is_one_without_yarn_or_without_its_share() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0}
    assert yarn_softmax_factor(yarn) == yarn_softmax_factor({**yarn, "mscale_all_dim": 0}) == 1.0
    assert yarn_softmax_factor({**yarn, "mscale_all_dim": 1.0, "factor": 0.5}) == 1.0
    assert yarn_softmax_factor({**yarn, "mscale_all_dim": 1.0, "rope_type": "linear"}) == 1.0
    assert yarn_softmax_factor({**yarn, "mscale_all_dim": 1.0}) == pytest.approx((0.1 * 3.688879454 + 1) ** 2)


def test_a_missing_base_is_refused() -> None:
    with pytest.raises(ConfigError, match="lacks rope_theta"):
        inverse_frequencies({"rope_type": "yarn", "factor": 4.0}, 16, 256)
