"""The target as teacher of drafts with a vocabulary of their own: kept logits and the full-vocabulary choice (conventions.md §2, §3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specforge.runtime import contracts
from specforge.runtime.contracts import TrainBatch

if TYPE_CHECKING:
    from specforge.modeling.target import TargetHead


@torch.no_grad()
def kept_teacher(draft: Any, batch: TrainBatch, head: TargetHead, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept target logits [P, Vd] and the full-vocabulary argmax [P] at flat ``places`` [P]; ``draft`` has the buffer ``d2t``."""
    from specforge.training.strategies.eagle3 import kept_ids

    final = batch.tensors[contracts.FINAL_HIDDEN_STATES].flatten(0, 1)[places]
    whole = draft.d2t.numel() == head.vocab_size
    logits = head.logits(final, None if whole else kept_ids(draft))
    known = batch.tensors.get(contracts.TARGET_ARGMAX)
    if whole:
        return logits, logits.argmax(-1)
    # Where the engine gave its choice, it has already looked over the whole vocabulary.
    return logits, head.argmax(final) if known is None else known.flatten()[places]


@torch.no_grad()
def teacher_normalizers(logits: torch.Tensor, batch: TrainBatch, head: TargetHead, places: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp over the target's whole vocabulary [P] at flat ``places``; ``logits`` [P, Vd] are the kept ones there."""
    if logits.shape[-1] == head.vocab_size:
        return torch.logsumexp(logits, dim=-1)
    return head.log_normalizer(batch.tensors[contracts.FINAL_HIDDEN_STATES].flatten(0, 1)[places])
