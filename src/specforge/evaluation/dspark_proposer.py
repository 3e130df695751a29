"""DSpark drafting as SGLang 0.5.23 serves it: one backbone forward, then a walk along the block with the Markov head.

The confidence head is left out: in serving it decides how many drafts a step verifies under load (SGLANG_RAGGED_VERIFY_MODE other than
``static``), never which tokens are drafted.
"""

from __future__ import annotations

from typing import Any

import torch

from specforge.evaluation.block_proposer import BlockProposer
from specforge.evaluation.proposer import Proposal, draw


class DSparkProposer(BlockProposer):
    """Slot k's logits are the head's plus the bias of the token drafted before it; sampled when the caller samples."""

    draft: Any

    def from_slots(self, slots: torch.Tensor, temperature: float, generator: torch.Generator | None) -> Proposal:
        markov = self.draft.markov_head
        base, state = self.base_logits(slots), markov.start(slots[:1])
        tokens, margins, distributions = [self._anchor], [], []
        for k in range(base.shape[0]):
            previous = markov.markov_w1(torch.tensor([tokens[-1]], device=slots.device))
            latent, state = markov.step(previous, slots[k : k + 1], state)
            logits = base[k] + markov.markov_w2(latent)[0].float()
            token, probabilities = draw(logits, temperature, generator)
            if generator is None:
                best = logits.topk(min(2, logits.numel())).values
                margins.append(best[0] - best[-1])
            tokens.append(token)
            if probabilities is not None:
                distributions.append(probabilities)
        return Proposal(tokens[1:], torch.stack(distributions) if distributions else None, torch.stack(margins) if margins else None)
