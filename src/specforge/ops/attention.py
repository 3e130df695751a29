"""Attention operators with one signature, ``attend(q, k, v, mask, scale) -> (o, lse)``, and the EAGLE-3 unroll built on it.

Shapes: q [B, T, h, D], k [B, S, hk, D], v [B, S, hk, Dv], o [B, T, h, Dv], lse [B, T, h] (float32, differentiable). ``h`` is a
multiple of ``hk``; query head j reads key head j // (h / hk).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class CausalDocumentMask:
    """Query rows see keys of their own document at positions up to their own; −1 marks padding on either side.

    ``query_document``/``query_index`` [B, T] and ``key_document`` [B, S]; ``query_index`` is the row's place among the S keys. Under a
    ``window`` of W tokens a row that has moved ``shift`` < W places on sees only keys less than W places behind where it stands.
    """

    query_document: torch.Tensor
    query_index: torch.Tensor
    key_document: torch.Tensor
    window: int | None = None
    shift: int = 0

    def over_keys(self) -> CausalDocumentMask:
        """The same rule where every key's row asks."""
        place = torch.arange(self.key_document.shape[1], device=self.key_document.device)
        return replace(self, query_document=self.key_document, query_index=place.expand_as(self.key_document))

    def prepare(self, attend: Attend) -> Any:
        """The mask in the form that ``attend`` wants."""
        return self.dense() if attend is plain_attention else self.block_mask()

    @property
    def _oldest(self) -> torch.Tensor:
        """First place that each query may see, [B, T]."""
        return self.query_index + (self.shift - self.window + 1) if self.window is not None else torch.zeros_like(self.query_index)

    def dense(self) -> torch.Tensor:
        """bool [B, T, S]; a padding query sees key 0, so that its softmax stays finite (its result is never read)."""
        place = torch.arange(self.key_document.shape[1], device=self.key_document.device)
        seen = (self.query_document.unsqueeze(-1) == self.key_document.unsqueeze(1)) & (place <= self.query_index.unsqueeze(-1))
        if self.window is not None:
            seen = seen & (place >= self._oldest.unsqueeze(-1))
        padding = (self.query_document < 0).unsqueeze(-1)
        return torch.where(padding, place == 0, seen)

    def block_mask(self) -> Any:
        """The same rule as a flex-attention block mask."""
        from torch.nn.attention.flex_attention import create_block_mask

        query_document, query_index, key_document = self.query_document, self.query_index, self.key_document
        oldest = None if self.window is None else self._oldest

        def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            padding = (query_document[b, q] < 0) & (k == 0)
            seen = (query_document[b, q] == key_document[b, k]) & (k <= query_index[b, q])
            return padding | (seen if oldest is None else seen & (k >= oldest[b, q]))

        # Not compiled: every batch has other tensors in the rule, and the mask costs less than looking for its kernel.
        return create_block_mask(
            rule, query_document.shape[0], None, query_document.shape[1], key_document.shape[1], device=str(query_document.device)
        )


Mask = torch.Tensor | CausalDocumentMask | None
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, float], tuple[torch.Tensor, torch.Tensor]]


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with materialised scores: the reference everywhere and the fast choice on a CPU. ``mask`` bool [B, T, S] or None."""
    batch, rows, heads, _ = q.shape
    kv_heads = k.shape[2]
    grouped = q.unflatten(2, (kv_heads, heads // kv_heads)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, hk, g·T, D]
    scores = (grouped @ k.permute(0, 2, 3, 1)).float() * scale  # [B, hk, g·T, S]
    scores = scores.unflatten(2, (-1, rows))
    if mask is not None:
        visible = mask.dense() if isinstance(mask, CausalDocumentMask) else mask
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(v.dtype).flatten(2, 3)
    o = (weights @ v.permute(0, 2, 1, 3)).unflatten(2, (-1, rows))  # [B, hk, g, T, Dv]
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)


_compiled_flex: Callable[..., Any] | None = None


def flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch's flex attention: scores are never stored. ``mask`` is a block mask of :meth:`CausalDocumentMask.block_mask`."""
    global _compiled_flex
    from torch.nn.attention.flex_attention import AuxRequest

    if _compiled_flex is None:
        from torch.nn.attention.flex_attention import flex_attention as flex

        _compiled_flex = torch.compile(flex, dynamic=True) if q.is_cuda else flex
    o, aux = _compiled_flex(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
        return_aux=AuxRequest(lse=True),
    )
    return o.transpose(1, 2), aux.lse.transpose(1, 2)


# Narrower heads have no flex kernel.
_FLEX_MIN_WIDTH = 16


def fastest_attention(device: torch.device, query_key_width: int) -> Attend:
    """The operator to use on ``device``: flex on a GPU, materialised scores on a CPU and for very narrow heads."""
    return flex_attention if device.type == "cuda" and query_key_width >= _FLEX_MIN_WIDTH else plain_attention


def unroll_attention(
    q: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    mask: Any,
    scale: float,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    attend: Attend = plain_attention,
) -> torch.Tensor:
    """Attention of TTT step k (conventions §4): the step-0 keys that ``mask`` shows, plus one own key of each of steps 1 … k.

    q [B, T, h, D]; keys, values [B, S, hk, ·] of step 0; each own key [B, T, hk, D] belongs to the query row of the same index.
    The step-0 part is computed by ``attend``; the own keys are merged through the log-sum-exp, so no score matrix grows with k. ``keys``
    None: no step-0 key is in reach of the window.
    """
    if not own_keys:
        assert keys is not None and values is not None, "a row sees some key"
        return attend(q, keys, values, mask, scale)[0]
    group = q.shape[2] // own_keys[0].shape[2]
    own_k = torch.stack(list(own_keys), dim=-2).repeat_interleave(group, dim=2)  # [B, T, h, k, D]
    own_v = torch.stack(list(own_values), dim=-2).repeat_interleave(group, dim=2)
    own_scores = (own_k * q.unsqueeze(-2)).sum(-1).float() * scale  # [B, T, h, k]
    if keys is None or values is None:
        return (torch.softmax(own_scores, dim=-1).to(own_v.dtype).unsqueeze(-1) * own_v).sum(-2)
    o, lse = attend(q, keys, values, mask, scale)
    weights = torch.softmax(torch.cat((lse.unsqueeze(-1), own_scores), dim=-1), dim=-1).to(o.dtype)
    return o * weights[..., :1] + (weights[..., 1:].unsqueeze(-1) * own_v).sum(-2)


def unroll_attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
) -> torch.Tensor:
    """One softmax over all visible keys of each row, written out; slow, for tests. ``mask`` bool [B, T, S]."""
    group = q.shape[2] // keys.shape[2]
    scores = torch.einsum("bthd,bshd->bths", q, keys.repeat_interleave(group, dim=2)).float() * scale
    scores = scores.masked_fill(~mask.unsqueeze(2), float("-inf"))
    own = [torch.einsum("bthd,bthd->bth", q, k.repeat_interleave(group, dim=2)).float() * scale for k in own_keys]
    weights = torch.softmax(torch.cat([scores, *(s.unsqueeze(-1) for s in own)], dim=-1), dim=-1).to(values.dtype)
    num_keys = keys.shape[1]
    o = torch.einsum("bths,bshd->bthd", weights[..., :num_keys], values.repeat_interleave(group, dim=2))
    for j, v in enumerate(own_values):
        o = o + weights[..., num_keys + j, None] * v.repeat_interleave(group, dim=2)
    return o
