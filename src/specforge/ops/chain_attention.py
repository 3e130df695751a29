"""Attention of parallel depths (P-EAGLE, arXiv 2602.01469): a row sees the context up to its anchor and its own chain.

Row (a, d) sees the keys of (j, 0) for j ≤ a in its document, and of (a, 1) … (a, d). The first part is one call of the injected operator
over all rows; the second is a small triangle an anchor. Both are joined through the log-sum-exp, so nothing grows with rows × rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specforge.ops.attention import Attend, plain_attention


@dataclass(frozen=True)
class AnchorMask:
    """Query rows see context keys of their document at places up to their anchor's; −1 marks padding on either side.

    ``query_document``, ``anchor_place`` and ``depth`` [B, T]; ``key_document`` [B, S]; a key's place is its index among the S. Under a
    ``window`` of W tokens only places ≥ anchor + depth − (W − 1) are seen.
    """

    query_document: torch.Tensor
    anchor_place: torch.Tensor
    depth: torch.Tensor
    key_document: torch.Tensor
    window: int | None = None

    @property
    def oldest(self) -> torch.Tensor:
        """First place that each query may see: int64 [B, T]."""
        if self.window is None:
            return torch.zeros_like(self.anchor_place)
        return (self.anchor_place + self.depth - (self.window - 1)).clamp(min=0)

    @property
    def blind(self) -> torch.Tensor:
        """bool [B, T]: queries that see no context, being padding or further from their anchor than the window reaches."""
        return (self.query_document < 0) | (self.oldest > self.anchor_place)

    def dense(self) -> torch.Tensor:
        """bool [B, T, S]; a blind query is shown key 0, so that its softmax stays finite (:func:`join` leaves its result out)."""
        place = torch.arange(self.key_document.shape[1], device=self.key_document.device)
        seen = self.query_document.unsqueeze(-1) == self.key_document.unsqueeze(1)
        seen = seen & (place <= self.anchor_place.unsqueeze(-1)) & (place >= self.oldest.unsqueeze(-1))
        return torch.where(self.blind.unsqueeze(-1), place == 0, seen)

    def prepare(self, attend: Attend) -> Any:
        """The mask in the form that ``attend`` wants."""
        return self.dense() if attend is plain_attention else self._block_mask()

    def _block_mask(self) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        query_document, anchor, oldest, key_document = self.query_document, self.anchor_place, self.oldest, self.key_document
        blind = self.blind

        def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            seen = (query_document[b, q] == key_document[b, k]) & (k <= anchor[b, q]) & (k >= oldest[b, q])
            return (blind[b, q] & (k == 0)) | (seen & ~blind[b, q])

        return create_block_mask(
            rule, query_document.shape[0], None, query_document.shape[1], key_document.shape[1], device=str(query_document.device)
        )


def own_chain_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each depth of a chain on the depths up to it: q [N, L, h, D], keys and values [N, L, hk, ·] -> (o [N, L, h, Dv], lse [N, L, h])."""
    depth = torch.arange(q.shape[1], device=q.device)
    distance = depth.unsqueeze(-1) - depth
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    return plain_attention(q, keys, values, seen.unsqueeze(0), scale)


def join(o: torch.Tensor, lse: torch.Tensor, blind: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    """One softmax over two disjoint sets of keys from the results over each: o [..., h, Dv], lse [..., h].

    Where ``blind`` bool [...] the first set is empty and its result is not used.
    """
    weight = torch.sigmoid(lse - other_lse).masked_fill(blind.unsqueeze(-1), 0.0).unsqueeze(-1).to(o.dtype)
    return o * weight + other * (1 - weight)
