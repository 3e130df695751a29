"""Architecture ``deepseek_mla``: multi-head latent attention of DeepSeek-V2/V3 and Kimi K2 (arXiv 2405.04434) with a dense SwiGLU.

Keys and values leave the attention expanded, so any strategy caches them like those of other architectures (conventions.md §4, §8).
"""

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
from specforge.modeling.draft.llama import SwiGLU
from specforge.modeling.rope import RotaryEmbedding, rotate_adjacent_pairs, yarn_softmax_factor
from specforge.modeling.target_facts import TargetFacts, language_config, rope_both_forms

# Dimensions that a target with latent attention states in its config.json under these very names.
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Ranks of DeepSeek-V2, V3 and Kimi K2: a draft for another kind of target never gets larger ones by itself.
_LARGEST_Q_RANK, _LARGEST_KV_RANK = 1536, 512


class LatentAttention(DraftAttention):
    """Queries and keys of a head are [nope ; rope]; only the rope slice turns, in adjacent pairs, and all heads share its key.

    ``q_lora_rank`` 0 makes queries by one direct projection.
    """

    def __init__(
        self,
        input_width: int,
        hidden_width: int,
        *,
        num_heads: int,
        q_lora_rank: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        eps: float,
        softmax_factor: float,
    ) -> None:
        super().__init__()
        key_width = qk_nope_head_dim + qk_rope_head_dim
        self.facts = AttentionFacts(num_heads, num_heads, key_width, v_head_dim, key_width**-0.5 * softmax_factor)
        self.key_split, self.value_split = [qk_nope_head_dim, qk_rope_head_dim], [qk_nope_head_dim, v_head_dim]
        self.latent_split = [kv_lora_rank, qk_rope_head_dim]
        self.q_lora_rank = q_lora_rank
        if q_lora_rank:
            self.q_a_proj = nn.Linear(input_width, q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(q_lora_rank, eps)
            self.q_b_proj = nn.Linear(q_lora_rank, num_heads * key_width, bias=False)
        else:
            self.q_proj = nn.Linear(input_width, num_heads * key_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_width, sum(self.latent_split), bias=False)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * sum(self.value_split), bias=False)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_width, bias=False)

    def queries(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.q_lora_rank else self.q_proj(x)
        nope, turned = q.unflatten(-1, (self.facts.num_heads, -1)).split(self.key_split, dim=-1)
        return torch.cat((nope, rotate_adjacent_pairs(turned, rope)), dim=-1)

    def keys_values(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        latent, shared = self.kv_a_proj_with_mqa(x).split(self.latent_split, dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.facts.num_heads, -1))
        nope, values = expanded.split(self.value_split, dim=-1)
        turned = rotate_adjacent_pairs(shared.unsqueeze(-2), rope)
        return torch.cat((nope, turned.expand(*nope.shape[:-1], -1)), dim=-1), values

    def output(self, o: torch.Tensor) -> torch.Tensor:
        return self.o_proj(o.flatten(-2))


class DeepseekMlaDraft(DraftArchitecture):
    """The DeepSeek family's layer with a dense feed-forward. Null dimensions come from the target, or are derived from its own.

    Args:
        num_layers: decoder layers of the draft; SGLang serves one.
        hidden_size, intermediate_size, num_heads: null = the target's.
        q_lora_rank: rank of the queries' projection; 0 = one direct projection, which SGLang does not serve.
        kv_lora_rank: width of the latent that keys and values are expanded from.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: widths of a head's parts: not turned, turned by RoPE, value.
        rms_norm_eps, max_position_embeddings, rope, init_from: as in ``llama``.
    """

    name = "deepseek_mla"

    def __init__(
        self,
        *,
        num_layers: Annotated[int, Field(ge=1)],
        hidden_size: int | None,
        intermediate_size: int | None,
        num_heads: int | None,
        q_lora_rank: Annotated[int, Field(ge=0)] | None,
        kv_lora_rank: int | None,
        qk_nope_head_dim: int | None,
        qk_rope_head_dim: int | None,
        v_head_dim: int | None,
        rms_norm_eps: float | None,
        max_position_embeddings: int | None,
        rope: dict[str, Any] | None,
        init_from: str,
    ) -> None:
        dimensions = {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_heads": num_heads,
            "q_lora_rank": q_lora_rank,
            "kv_lora_rank": kv_lora_rank,
            "qk_nope_head_dim": qk_nope_head_dim,
            "qk_rope_head_dim": qk_rope_head_dim,
            "v_head_dim": v_head_dim,
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
        self.rms_norm_eps, self.max_position_embeddings = float(rms_norm_eps or 0), int(max_position_embeddings or 0)
        self.rope = dict(rope or {})
        self._attention = {key: int(dimensions[key] or 0) for key in ("num_heads", *_LATENT)}  # type: ignore[arg-type]

    @classmethod
    def fill_from_target(cls, node: Mapping[str, Any], target: TargetFacts) -> dict[str, Any]:
        """A target with latent attention gives its own dimensions; for another one they follow from width and heads, see the YAML."""
        filled = dict(node)
        for key in ("hidden_size", "intermediate_size", "num_heads", "rms_norm_eps", "max_position_embeddings"):
            if filled.get(key) is None:
                filled[key] = getattr(target, key)
        stated = language_config(target.raw)
        latent = all(isinstance(stated.get(key), int) for key in _LATENT[1:])
        if filled.get("rope") is None:
            # The share of a head that a target turns says nothing about the rope slice here, all of which turns.
            filled["rope"] = {k: v for k, v in target.rope.items() if latent or k != "partial_rotary_factor"}
        derived = cls._derived(filled, target) if not latent else {**cls._derived(filled, target), **{k: stated[k] for k in _LATENT[1:]}}
        if latent and isinstance(stated.get("q_lora_rank"), int):
            derived["q_lora_rank"] = stated["q_lora_rank"]
        for key in _LATENT:
            if filled.get(key) is None:
                filled[key] = derived[key]
        return filled

    @staticmethod
    def _derived(filled: Mapping[str, Any], target: TargetFacts) -> dict[str, int]:
        width = filled["hidden_size"]
        head = target.head_dim if filled["num_heads"] == target.num_heads else max(width // filled["num_heads"], 2)
        return {
            "q_lora_rank": min(_LARGEST_Q_RANK, width),
            "kv_lora_rank": min(_LARGEST_KV_RANK, max(width // 2, 1)),
            "qk_nope_head_dim": head,
            "qk_rope_head_dim": max(head // 4 * 2, 2),  # half of a head, even
            "v_head_dim": head,
        }

    @classmethod
    def rules(cls, choices: Mapping[str, str], config: Mapping[str, Any]) -> list[str]:
        node = config["draft"]
        keys = ("hidden_size", "intermediate_size", "num_heads", *_LATENT[1:], "max_position_embeddings")
        problems = size_problems(node, keys)
        if problems or any(node.get(key) is None for key in keys):  # the target is not on disk yet
            return problems
        return rope_problems(node, "qk_rope_head_dim")

    def rotary(self) -> nn.Module:
        return RotaryEmbedding(self.rope, self._attention["qk_rope_head_dim"], self.max_position_embeddings)

    def norm(self, width: int) -> nn.Module:
        return RMSNorm(width, self.rms_norm_eps)

    def attention(self, input_width: int, hidden_width: int, layer_idx: int) -> DraftAttention:
        return LatentAttention(
            input_width, hidden_width, **self._attention, eps=self.rms_norm_eps, softmax_factor=yarn_softmax_factor(self.rope)
        )

    def feed_forward(self, layer_idx: int) -> nn.Module:
        return SwiGLU(self.hidden_size, self.intermediate_size)

    def config_fields(self) -> dict[str, Any]:
        rope = rope_both_forms(self.rope)
        if rope["rope_scaling"] is not None:  # vLLM's latent attention looks for theta in here
            rope["rope_scaling"] = {**rope["rope_scaling"], "rope_theta": rope["rope_theta"]}
        heads = self._attention["num_heads"]
        return {
            "model_type": "deepseek_v3",
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            **{key: self._attention[key] for key in _LATENT},
            "q_lora_rank": self._attention["q_lora_rank"] or None,
            "first_k_dense_replace": self.num_layers,  # no experts
            "rope_interleave": True,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": False,
            **rope,
        }

    def layer_weight_names(self) -> dict[str, str]:
        queries = ("q_a_proj", "q_a_layernorm", "q_b_proj") if self._attention["q_lora_rank"] else ("q_proj",)
        attention = (*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
        names = [f"self_attn.{p}.weight" for p in attention] + [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
        return {n: n for n in names}

    def plain_config(self) -> dict[str, Any]:
        return dict(self._config)

    def warm_start_names(self) -> dict[str, str]:
        if self.init_from != "target":
            return {}
        norms = {"hidden_norm.weight": "input_layernorm.weight", "post_attention_layernorm.weight": "post_attention_layernorm.weight"}
        return {**self.layer_weight_names(), **norms}
