"""Rotary position embedding whose frequencies are those of the target's own module, for every scaling transformers knows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from specforge.errors import ConfigError


class _RopeConfig:
    """The few attributes that transformers' RoPE initialisers read from a model config."""

    def __init__(self, rope: dict[str, Any], head_dim: int, max_position_embeddings: int) -> None:
        self.rope_parameters = dict(rope)
        self.head_dim = head_dim
        self.hidden_size = head_dim
        self.num_attention_heads = 1
        self.max_position_embeddings = max_position_embeddings

    def standardize_rope_params(self) -> None:
        """Called by some initialisers; the parameters already are in the standard form."""


def inverse_frequencies(rope: dict[str, Any], head_dim: int, max_position_embeddings: int) -> tuple[torch.Tensor, float]:
    """Frequencies [rotary_dim/2] in float32 and the factor on cos and sin, by transformers' own initialiser of that type.

    Raises :class:`ConfigError` for an unknown type or a key that the type needs and ``rope`` lacks.
    """
    kind = rope.get("rope_type", "default")
    if rope.get("rope_theta") is None:
        raise ConfigError(f"draft.rope: {rope} — lacks rope_theta. Set draft.rope=null to take the target's, or give it.")
    if kind == "default":
        rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
        return 1.0 / (rope["rope_theta"] ** exponent), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(f"draft.rope.rope_type: {kind!r} — is unknown. Allowed: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}.")
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](_RopeConfig(rope, head_dim, max_position_embeddings), torch.device("cpu"))
    except KeyError as error:
        raise ConfigError(f"draft.rope: {rope} — rope_type {kind} needs {error}. Set draft.rope=null to take the target's.") from None
    return frequencies.float(), float(factor)


class RotaryEmbedding(nn.Module):
    """cos and sin for given positions. ``dynamic`` scaling is applied at its original length, as serving starts it."""

    def __init__(self, rope: dict[str, Any], head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        # Computed on the CPU even under a meta or CUDA default device: the frequencies are facts, not weights.
        with torch.device("cpu"):
            frequencies, self.factor = inverse_frequencies(rope, head_dim, max_position_embeddings)
        self._frequencies = frequencies

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [...] int64 -> cos, sin [..., rotary_dim/2] in ``dtype``."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions.float().unsqueeze(-1) * self._frequencies
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


def rotate_half_pairs(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate x [..., heads, D] with cos, sin [..., rotary/2]: pairs are (j, j + rotary/2), dimensions past ``rotary`` pass through."""
    cos, sin = rope[0].unsqueeze(-2), rope[1].unsqueeze(-2)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def rotate_adjacent_pairs(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate x [..., heads, D] with cos, sin [..., D/2]: pairs are (2j, 2j + 1), as DeepSeek's checkpoints lay them out."""
    cos, sin = rope[0].unsqueeze(-2), rope[1].unsqueeze(-2)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


def yarn_softmax_factor(rope: dict[str, Any]) -> float:
    """m² of conventions §8, by which YaRN multiplies the scores of latent attention; 1 under any other scaling.

    m = 0.1 · mscale_all_dim · ln(factor) + 1 (arXiv 2309.00071, as DeepSeek-V2 applies it).
    """
    share, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor") or 1.0
    if rope.get("rope_type") != "yarn" or factor <= 1:
        return 1.0
    return float((0.1 * share * math.log(factor) + 1.0) ** 2)
