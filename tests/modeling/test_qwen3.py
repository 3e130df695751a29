"""The ``qwen3`` architecture computes what transformers' own Qwen3 attention computes on the same weights."""

from __future__ import annotations

import pytest
import torch

from specforge.modeling.draft.qwen3 import Qwen3Draft
from specforge.ops.attention import plain_attention

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
         "max_position_embeddings": 64, "rope": {"rope_type": "default", "rope_theta": 10000.0}, "init_from": "random"}  # fmt: skip


def make(**changes) -> Qwen3Draft:
    return Qwen3Draft(**{**SIZES, "num_layers": 2, "layer_types": None, "sliding_window": None, **changes})


@pytest.mark.parametrize("window", [None, 3])
def test_attention_equals_that_of_transformers(window) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

    torch.manual_seed(0)
    types = ["full_attention", "sliding_attention"] if window else None
    draft = make(layer_types=types, sliding_window=window)
    ours = draft.attention(32, 32, 1)
    config = Qwen3Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
                         num_hidden_layers=2, max_position_embeddings=64, attention_bias=False,
                         rope_parameters=SIZES["rope"], attn_implementation="eager")  # fmt: skip
    theirs = Qwen3Attention(config, 1)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.load_state_dict(ours.state_dict())
    x, positions = torch.randn(1, 9, 32), torch.arange(9)[None]
    distance = positions[0][:, None] - positions[0][None]
    visible = (distance >= 0) & (distance < (ours.facts.window or 99))
    assert ours.facts.window == window
    rope = draft.rotary()(positions, torch.float32)
    o, _ = plain_attention(ours.queries(x, rope), *ours.keys_values(x, rope), visible[None], ours.facts.scale)
    mask = torch.where(visible, 0.0, float("-inf"))[None, None]
    expected = theirs(x, Qwen3RotaryEmbedding(config)(x, positions), mask)[0]
    torch.testing.assert_close(ours.output(o), expected, rtol=1e-5, atol=1e-6)


def test_norms_are_exported_and_sliding_layers_are_stated() -> None:
    draft = make(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    assert draft.layer_weight_names()["self_attn.q_norm.weight"] == "self_attn.q_norm.weight"
    fields = draft.config_fields()
    assert (fields["model_type"], fields["sliding_window"], fields["layer_types"][0]) == ("qwen3", 8, "sliding_attention")
    assert [draft.attention(32, 32, i).facts.window for i in (0, 1)] == [8, None]
    assert "sliding_window" not in make().config_fields()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 4}, "1 entries for draft.num_layers=2"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "draft.sliding_window: null"),
        ({"sliding_window": 4}, "no layer of draft.layer_types is sliding_attention"),
    ],
)
def test_layer_types_and_window_must_agree(changes, message) -> None:
    node = {**SIZES, "num_layers": 2, "layer_types": None, "sliding_window": None, **changes}
    assert any(message in problem for problem in Qwen3Draft.rules({}, {"draft": node}))
