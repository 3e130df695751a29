"""Architecture ``gelu``: the Llama layer with a plain GELU feed-forward, as an example of a plug-in outside of the package."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specforge.modeling.draft.llama import LlamaDraft


class GeluFeedForward(nn.Module):
    """down(gelu(up(x))): [..., hidden_size] -> [..., hidden_size]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.gelu(self.up_proj(x)))


class GeluDraft(LlamaDraft):
    """Everything but the feed-forward is that of ``llama``, the constructor and its keys included."""

    name = "gelu"  # goes into checkpoints: weights of another architecture are refused by it

    def feed_forward(self, layer_idx: int) -> nn.Module:
        return GeluFeedForward(self.hidden_size, self.intermediate_size)

    def layer_weight_names(self) -> dict[str, str]:
        return {n: n for n in super().layer_weight_names() if n != "mlp.gate_proj.weight"}

    def config_fields(self) -> dict[str, Any]:
        return {**super().config_fields(), "hidden_act": "gelu"}
