"""Domino drafting as SGLang 0.5.23 rolls it out: greedy, one correction after another, within one pool of candidates a block."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from specforge.evaluation.block_proposer import BlockProposer
from specforge.evaluation.proposer import Proposal


class DominoProposer(BlockProposer):
    """Slot 0's base argmax comes first; then the GRU reads each chosen token and corrects the next slot. Also greedy above temperature 0."""

    draft: Any

    def from_slots(self, slots: torch.Tensor, temperature: float, generator: torch.Generator | None) -> Proposal:
        base = self.base_logits(slots)
        allowed = self._pool(base)
        tokens: list[int] = []
        margins = []
        state = self.draft.prefix_states(torch.tensor([[self._anchor]], device=slots.device))[:, 0]
        for k in range(base.shape[0]):
            logits = base[k]
            if k > 0:
                state = self.draft.next_state(torch.tensor([tokens[-1]], device=slots.device), state)
                latent = self.draft.latent(slots[k], state[0])
                logits = logits + linear(latent, self.draft.correction_weight).float()
                if allowed is not None:
                    logits = logits.masked_fill(~allowed, float("-inf"))
            best = logits.topk(min(2, logits.numel()))
            tokens.append(int(logits.argmax()))
            margins.append(best.values[0] - best.values[-1])
        chosen = None
        if generator is not None:  # a greedy draft is a point mass
            chosen = torch.nn.functional.one_hot(torch.tensor(tokens), base.shape[-1]).float()
        return Proposal(tokens, chosen, torch.stack(margins))

    def _pool(self, base: torch.Tensor) -> torch.Tensor | None:
        """bool [V] of the words that a corrected slot may say; None when all may."""
        size = self.strategy.candidate_pool_size  # type: ignore[attr-defined]
        if not 0 < size < base.shape[-1] or base.shape[0] < 2:
            return None
        allowed = torch.zeros(base.shape[-1], dtype=torch.bool, device=base.device)
        allowed[base[1:].amax(0).topk(size).indices] = True
        return allowed
