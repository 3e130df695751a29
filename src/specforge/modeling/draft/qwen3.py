"""Architecture ``qwen3``: the Llama layer with a norm on each query and key head, and sliding-window layers if asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from specforge.modeling.draft.base import DraftAttention, RMSNorm
from specforge.modeling.draft.llama import LlamaAttention, LlamaDraft

LayerType = Literal["full_attention", "sliding_attention"]


class Qwen3Attention(LlamaAttention):
    """Grouped-query attention with RMSNorm over each head of queries and keys, before rotation."""

    def __init__(
        self, input_width: int, hidden_width: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, window: int | None
    ) -> None:
        super().__init__(input_width, hidden_width, num_heads, num_kv_heads, head_dim)
        self.facts = dataclasses.replace(self.facts, window=window)
        self.q_norm, self.k_norm = RMSNorm(head_dim, eps), RMSNorm(head_dim, eps)


class Qwen3Draft(LlamaDraft):
    """The Qwen3 family's layer. Arguments as :class:`LlamaDraft`, and:

    Args:
        layer_types: ``full_attention`` or ``sliding_attention`` for each layer; null = all full.
        sliding_window: tokens that a sliding layer sees, its own included; needed exactly when there is one.
    """

    name = "qwen3"

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
        layer_types: list[LayerType] | None,
        sliding_window: Annotated[int, Field(ge=1)] | None,
        init_from: str,
    ) -> None:
        super().__init__(
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=rms_norm_eps,
            max_position_embeddings=max_position_embeddings,
            rope=rope,
            init_from=init_from,
        )
        self._config |= {"layer_types": layer_types, "sliding_window": sliding_window}
        self.layer_types, self.sliding_window = layer_types, sliding_window

    @classmethod
    def rules(cls, choices: Mapping[str, str], config: Mapping[str, Any]) -> list[str]:
        node, problems = config["draft"], super().rules(choices, config)
        types, window, layers = node.get("layer_types"), node.get("sliding_window"), node.get("num_layers")
        if types is not None and len(types) != layers:
            problems.append(
                f"draft.layer_types: {len(types)} entries for draft.num_layers={layers}. Give one for each layer, or null for full attention."
            )
        slides = "sliding_attention" in (types or ())
        if slides and window is None:
            problems.append("draft.sliding_window: null — a sliding_attention layer needs it. Set draft.sliding_window=<tokens>.")
        if window is not None and not slides:
            problems.append(
                f"draft.sliding_window: {window} — no layer of draft.layer_types is sliding_attention. Name those layers, or set it to null."
            )
        return problems

    def attention(self, input_width: int, hidden_width: int, layer_idx: int) -> DraftAttention:
        slides = self.layer_types is not None and self.layer_types[layer_idx] == "sliding_attention"
        window = self.sliding_window if slides else None
        return Qwen3Attention(input_width, hidden_width, self.num_heads, self.num_kv_heads, self.head_dim, self.rms_norm_eps, window)

    def config_fields(self) -> dict[str, Any]:
        fields = {**super().config_fields(), "model_type": "qwen3"}
        del fields["mlp_bias"]  # a key of Llama's
        if self.sliding_window is not None:
            fields |= {"layer_types": self.layer_types, "sliding_window": self.sliding_window, "use_sliding_window": True}
        return fields

    def layer_weight_names(self) -> dict[str, str]:
        norms = {f"self_attn.{n}_norm.weight": f"self_attn.{n}_norm.weight" for n in "qk"}
        return {**super().layer_weight_names(), **norms}
