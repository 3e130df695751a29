"""The contract of a draft architecture: a factory of norms, feed-forward and attention that knows no algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from specforge.errors import ConfigError
from specforge.modeling.rope import inverse_frequencies
from specforge.modeling.target_facts import TargetFacts

Rope = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionFacts:
    """What an attention operator must know: head counts, widths, score scale, sliding window (tokens, itself included) and sinks."""

    num_heads: int
    num_kv_heads: int
    query_key_width: int
    value_width: int
    scale: float
    window: int | None = None
    sinks: bool = False


class DraftAttention(nn.Module, ABC):
    """Projections of one attention layer; the scores are computed outside, by an injected operator.

    Shapes: x [..., input_width]; queries [..., num_heads, query_key_width]; keys [..., num_kv_heads, query_key_width];
    values [..., num_kv_heads, value_width]; the operator's result [..., num_heads, value_width]. Rotation happens inside, so
    cached keys are already rotated (conventions §4).
    """

    facts: AttentionFacts

    @abstractmethod
    def queries(self, x: torch.Tensor, rope: Rope) -> torch.Tensor: ...

    @abstractmethod
    def keys_values(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]: ...

    @abstractmethod
    def output(self, o: torch.Tensor) -> torch.Tensor:
        """[..., num_heads, value_width] -> [..., hidden_width]."""


class DraftArchitecture(ABC):
    """What a draft layer is made of. Built by ``config.build`` from ``conf/draft/<name>.yaml``; holds dimensions, no weights."""

    name: ClassVar[str]
    hidden_size: int
    num_layers: int
    rms_norm_eps: float

    @classmethod
    @abstractmethod
    def fill_from_target(cls, node: Mapping[str, Any], target: TargetFacts) -> dict[str, Any]:
        """The config node with every null dimension replaced by the target's."""

    @abstractmethod
    def rotary(self) -> nn.Module:
        """A module: (positions [...], dtype) -> the ``rope`` argument of the attention."""

    @abstractmethod
    def norm(self, width: int) -> nn.Module: ...

    @abstractmethod
    def attention(self, input_width: int, hidden_width: int, layer_idx: int) -> DraftAttention: ...

    @abstractmethod
    def feed_forward(self, layer_idx: int) -> nn.Module:
        """[..., hidden_size] -> [..., hidden_size]."""

    @abstractmethod
    def config_fields(self) -> dict[str, Any]:
        """The architecture's half of an exported config.json: dimensions under the names that loaders read."""

    @abstractmethod
    def layer_weight_names(self) -> dict[str, str]:
        """Inner half of the export map: our parameter name below a layer -> the serving loader's name below a layer."""

    @abstractmethod
    def plain_config(self) -> dict[str, Any]:
        """The constructor's arguments, stored in checkpoints instead of any ``_target_``."""

    def check_paths(self) -> None:
        """Raise :class:`ConfigError` when ``init_from`` names neither a way to start nor the folder of a published draft."""
        start = getattr(self, "init_from", "random")
        if start not in ("random", "target") and not (Path(start).expanduser() / "config.json").is_file():
            raise ConfigError(f"draft.init_from: {start} — allowed are random, target, or a published draft's folder (with config.json).")

    def warm_start_names(self) -> dict[str, str]:
        """Parameters below a layer that can start from the target's own layer: ours -> theirs. Empty: no warm start."""
        return {}


def size_problems(node: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Sentences about the dimensions of a draft's config node that are given and below 1."""
    return [
        f"draft.{key}: {node[key]} — must be at least 1. Set draft.{key}=null to take the target's."
        for key in keys
        if isinstance(node.get(key), int) and node[key] < 1
    ]


def rope_problems(node: Mapping[str, Any], key: str) -> list[str]:
    """Sentences about the rotated width ``node[key]`` and the RoPE parameters of a filled node."""
    if node[key] % 2:
        return [f"draft.{key}: {node[key]} — must be even, since RoPE turns pairs. Change draft.{key}."]
    try:
        inverse_frequencies(node["rope"], node[key], node["max_position_embeddings"])
    except ConfigError as error:
        return list(error.problems)
    return []


class RMSNorm(nn.Module):
    """x / rms(x) · weight with the statistics in float32, as the Llama family computes it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight
