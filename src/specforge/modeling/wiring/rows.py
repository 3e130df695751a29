"""Ragged rows: a flat list of the positions that matter, and its padded [B, T] view for attention.

Linear layers run on the flat rows, so neither padding nor unsupervised positions cost anything; attention needs one row list per
batch entry and sees the padded view.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RaggedRows:
    """``flat`` int64 [R]: places b·S + i in ascending order; ``gather`` int64 [B, T] and ``valid`` bool [B, T]: their padded view."""

    flat: torch.Tensor
    gather: torch.Tensor
    valid: torch.Tensor
    slot: torch.Tensor  # int64 [R]: place of each flat row in the padded view, b·T + t
    dense: bool  # the padded view has no padding: gather and slot are reshapes

    @classmethod
    def from_mask(cls, mask: torch.Tensor, groups: torch.Tensor, num_groups: int) -> RaggedRows:
        """Rows where ``mask`` bool [B, S] is true; those of equal ``groups`` [B, S] (0 … B'−1, ascending in flat order) share a padded row.

        Grouping by batch row keeps packed documents together; grouping by document lets each attend within itself only. Without any
        true entry the result has zero rows and T = 1.
        """
        flat = mask.flatten().nonzero().squeeze(-1)
        owner = groups.flatten()[flat]
        counts = torch.bincount(owner, minlength=num_groups)
        width = max(int(counts.max()), 1)
        starts = counts.cumsum(0) - counts
        place = torch.arange(width, device=mask.device)
        valid = place < counts.unsqueeze(-1)
        gather = torch.where(valid, starts.unsqueeze(-1) + place, 0)
        slot = owner * width + torch.arange(flat.numel(), device=mask.device) - starts[owner]
        return cls(flat, gather, valid, slot, dense=flat.numel() == num_groups * width)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[R, ...] -> [B, T, ...]; padding repeats row 0 (or is zero when there are no rows)."""
        if self.dense:
            return x.unflatten(0, self.gather.shape)
        if x.shape[0] == 0:
            # Stays in the graph, so that every parameter has a gradient on a rank that has no row.
            return x.new_zeros(*self.gather.shape, *x.shape[1:]) + x.sum() * 0
        # index_select, since the gradient of plain indexing sorts its indices.
        return x.index_select(0, self.gather.flatten()).unflatten(0, self.gather.shape)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] -> [R, ...]."""
        return x.flatten(0, 1) if self.dense else x.flatten(0, 1).index_select(0, self.slot)
