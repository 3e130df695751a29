"""Architecture ``llama``: RMSNorm, grouped-query attention with RoPE and a SwiGLU feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from specforge.modeling.draft.base import (
    AttentionFacts,
    DraftArchitecture,
    DraftAttention,
    RMSNorm,
    Rope,
    rope_problems,
    size_problems,
)
from specforge.modeling.rope import RotaryEmbedding, rotate_half_pairs
from specforge.modeling.target_facts import TargetFacts, rope_both_forms


class LlamaAttention(DraftAttention):
    """Grouped-query attention without biases (SGLang's EAGLE-3 loader has none)."""

    def __init__(self, input_width: int, hidden_width: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.facts = AttentionFacts(num_heads, num_kv_heads, head_dim, head_dim, head_dim**-0.5)
        self.q_proj = nn.Linear(input_width, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_width, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_width, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_width, bias=False)
        # Families that norm each head before rotation put their norms here.
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()

    def queries(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        return rotate_half_pairs(self.q_norm(self.q_proj(x).unflatten(-1, (self.facts.num_heads, -1))), rope)

    def keys_values(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        heads = (self.facts.num_kv_heads, -1)
        return rotate_half_pairs(self.k_norm(self.k_proj(x).unflatten(-1, heads)), rope), self.v_proj(x).unflatten(-1, heads)

    def output(self, o: torch.Tensor) -> torch.Tensor:
        return self.o_proj(o.flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDraft(DraftArchitecture):
    """The Llama family's layer. Dimensions left null in the YAML come from the target.

    Args:
        num_layers: decoder layers of the draft.
        hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: dimensions, null = the target's.
        rms_norm_eps: epsilon of every norm, null = the target's.
        max_position_embeddings: longest serving context, null = the target's; never smaller than it in an export.
        rope: RoPE parameters in the transformers v5 form, null = the target's.
        init_from: ``random``, ``target`` to start from the target's last layer, norm and head where shapes agree, or the folder of a
            published draft.
    """

    name = "llama"

    def __init__(
        self,
        *,
        num_layers: Annotated[int, Field(ge=1)],
        hidden_size: int | None,
        intermediate_size: int | None,
        num_heads: int | None,
        num_kv_heads: int | None,
        head_dim: int | None,
        rms_norm_eps: float | None,
        max_position_embeddings: int | None,
        rope: dict[str, Any] | None,
        init_from: str,
    ) -> None:
        dimensions = {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": rms_norm_eps,
            "max_position_embeddings": max_position_embeddings,
            "rope": rope,
        }
        unset = [k for k, v in dimensions.items() if v is None]
        if unset:
            raise ValueError(f"draft: {', '.join(unset)} still null; fill_from_target takes them from the target")
        self._config: dict[str, Any] = {"num_layers": num_layers, **dimensions, "init_from": init_from}
        self.num_layers, self.init_from = num_layers, init_from
        self.hidden_size, self.intermediate_size = int(hidden_size or 0), int(intermediate_size or 0)
        self.num_heads, self.num_kv_heads, self.head_dim = int(num_heads or 0), int(num_kv_heads or 0), int(head_dim or 0)
        self.rms_norm_eps, self.max_position_embeddings = float(rms_norm_eps or 0), int(max_position_embeddings or 0)
        self.rope = dict(rope or {})

    @classmethod
    def fill_from_target(cls, node: Mapping[str, Any], target: TargetFacts) -> dict[str, Any]:
        filled = dict(node)
        for key in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "rms_norm_eps", "max_position_embeddings", "rope"):
            if filled.get(key) is None:
                filled[key] = getattr(target, key)
        if filled.get("head_dim") is None:  # an own width with the target's head count needs its own head width
            own = filled["hidden_size"] != target.hidden_size or filled["num_heads"] != target.num_heads
            filled["head_dim"] = filled["hidden_size"] // filled["num_heads"] if own else target.head_dim
        return filled

    @classmethod
    def rules(cls, choices: Mapping[str, str], config: Mapping[str, Any]) -> list[str]:
        node = config["draft"]
        keys = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings")
        problems = size_problems(node, keys)
        if problems or any(node.get(key) is None for key in keys):  # the target is not on disk yet
            return problems
        if node["num_heads"] % node["num_kv_heads"]:
            problems.append(
                f"draft.num_heads: {node['num_heads']} — must be a multiple of draft.num_kv_heads={node['num_kv_heads']}, "
                "since each of those serves equally many heads. Change one of them."
            )
        return problems + rope_problems(node, "head_dim")

    def rotary(self) -> nn.Module:
        return RotaryEmbedding(self.rope, self.head_dim, self.max_position_embeddings)

    def norm(self, width: int) -> nn.Module:
        return RMSNorm(width, self.rms_norm_eps)

    def attention(self, input_width: int, hidden_width: int, layer_idx: int) -> DraftAttention:
        return LlamaAttention(input_width, hidden_width, self.num_heads, self.num_kv_heads, self.head_dim)

    def feed_forward(self, layer_idx: int) -> nn.Module:
        return SwiGLU(self.hidden_size, self.intermediate_size)

    def config_fields(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            **rope_both_forms(self.rope),
        }

    def layer_weight_names(self) -> dict[str, str]:
        names = [f"self_attn.{p}_proj.weight" for p in "qkvo"] + [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
        return {n: n for n in names}

    def plain_config(self) -> dict[str, Any]:
        return dict(self._config)

    def warm_start_names(self) -> dict[str, str]:
        if self.init_from != "target":
            return {}
        # The recurrent state takes the place of the residual stream, so hidden_norm starts as the target's input norm.
        norms = {"hidden_norm.weight": "input_layernorm.weight", "post_attention_layernorm.weight": "post_attention_layernorm.weight"}
        return {**self.layer_weight_names(), **norms}
