"""Attention of block drafts: every slot sees the context before its anchor and the slots of its own block (conventions.md §2).

A block's own keys never join the context's: the context part is computed by an injected ``attend`` and merged with the small own part
through the log-sum-exp, so the cost is queries × context plus blocks × block size².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specforge.ops.attention import Attend, plain_attention


@dataclass(frozen=True)
class BlockMask:
    """What the slots of each anchor see of the context. Positions decide, never indices; −1 as a document is padding on either side.

    ``query_document``/``anchor_position`` [B, A], ``key_document``/``key_position`` [B, S]. Slot k of an anchor at position a sees the
    keys of its document at positions < a, and under a ``window`` of W tokens only those ≥ a + k − (W − 1).
    """

    query_document: torch.Tensor
    anchor_position: torch.Tensor
    key_document: torch.Tensor
    key_position: torch.Tensor
    block_size: int
    window: int | None = None

    def visible(self) -> torch.Tensor:
        """bool [B, A·bs, S]; all false for a slot without context."""
        same = (self.query_document.unsqueeze(-1) == self.key_document.unsqueeze(1)) & (self.query_document >= 0).unsqueeze(-1)
        seen = same & (self.key_position.unsqueeze(1) < self.anchor_position.unsqueeze(-1))
        if self.window is None:
            return seen.repeat_interleave(self.block_size, dim=1)
        slots = torch.arange(self.block_size, device=seen.device)
        oldest = self.anchor_position.unsqueeze(-1) + slots - (self.window - 1)  # [B, A, bs]
        return (seen.unsqueeze(2) & (self.key_position[:, None, None] >= oldest.unsqueeze(-1))).flatten(1, 2)

    def own(self) -> torch.Tensor | None:
        """bool [bs, bs] (query slot, key slot) inside a block; None when all slots see each other.

        Sliding layers are causal within the block and keep their window there, as SGLang's DFlash layers do.
        """
        if self.window is None:
            return None
        slots = torch.arange(self.block_size, device=self.key_document.device)
        distance = slots.unsqueeze(1) - slots
        return (distance >= 0) & (distance < self.window)

    def prepare(self, attend: Attend) -> PreparedMask:
        """The mask in the form that ``attend`` wants; made once for all layers of one window."""
        if attend is plain_attention:
            visible = self.visible()
            empty = ~visible.any(-1)
            # A slot that sees no context gets key 0, so that its softmax stays finite; its context part then weighs nothing.
            first = torch.arange(visible.shape[-1], device=visible.device) == 0
            return PreparedMask(visible | (empty.unsqueeze(-1) & first), empty, self.own(), self.block_size)
        empty = self._empty()
        return PreparedMask(self._flex(empty), empty, self.own(), self.block_size)

    def _empty(self) -> torch.Tensor:
        """bool [B, A·bs]: slots without context, found without the [A·bs, S] mask (the keys of a document are its positions 0, 1, …)."""
        slots = torch.arange(self.block_size, device=self.key_document.device)
        anchor = self.anchor_position.unsqueeze(-1)
        oldest = 0 if self.window is None else (anchor + slots - (self.window - 1)).clamp(min=0)
        nothing = (anchor - oldest <= 0) | (self.query_document < 0).unsqueeze(-1)
        return nothing.expand(*nothing.shape[:2], self.block_size).flatten(1)

    def _flex(self, empty: torch.Tensor) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        query_document, anchor_position = self.query_document, self.anchor_position
        key_document, key_position, size, window = self.key_document, self.key_position, self.block_size, self.window

        def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            anchor = q // size
            position = anchor_position[b, anchor]
            seen = (query_document[b, anchor] == key_document[b, k]) & (key_position[b, k] < position)
            if window is not None:
                seen = seen & (key_position[b, k] >= position + q % size - (window - 1))
            return (seen & ~empty[b, q]) | (empty[b, q] & (k == 0))

        batch, anchors = query_document.shape
        return create_block_mask(rule, batch, None, anchors * size, key_document.shape[1], device=str(key_document.device))


@dataclass(frozen=True)
class PreparedMask:
    """``context`` is for ``attend``; ``empty`` bool [B, A·bs] marks slots whose context part counts nothing; ``own`` as in BlockMask."""

    context: Any
    empty: torch.Tensor
    own: torch.Tensor | None
    block_size: int


def block_attention(
    q: torch.Tensor,
    context_keys: torch.Tensor,
    context_values: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    mask: PreparedMask,
    scale: float,
    attend: Attend = plain_attention,
) -> torch.Tensor:
    """q [B, A·bs, h, D]; context keys/values [B, S, hk, ·]; own keys/values [B, A·bs, hk, ·] -> [B, A·bs, h, Dv]."""
    o, lse = attend(q, context_keys, context_values, mask.context, scale)
    lse = lse.masked_fill(mask.empty.unsqueeze(-1), float("-inf"))
    size, kv_heads = mask.block_size, own_keys.shape[2]
    queries = q.unflatten(2, (kv_heads, -1)).unflatten(1, (-1, size))  # [B, A, bs, hk, g, D]
    keys, values = own_keys.unflatten(1, (-1, size)), own_values.unflatten(1, (-1, size))
    scores = torch.einsum("baqkgd,bajkd->baqkgj", queries, keys).float() * scale
    if mask.own is not None:
        scores = scores.masked_fill(~mask.own[:, None, None], float("-inf"))
    outer = lse.unflatten(2, (kv_heads, -1)).unflatten(1, (-1, size)).unsqueeze(-1)
    weights = torch.softmax(torch.cat((outer, scores), dim=-1), dim=-1).to(o.dtype)
    own = torch.einsum("baqkgj,bajkd->baqkgd", weights[..., 1:], values)
    return o * weights[..., 0].flatten(3, 4).flatten(1, 2).unsqueeze(-1) + own.flatten(3, 4).flatten(1, 2)
