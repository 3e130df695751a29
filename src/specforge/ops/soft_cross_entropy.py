"""Soft cross-entropy between a draft head and the target's renormalised kept distribution, without keeping the logits.

Loss of a row = −Σ_v p_v log q_v with p = softmax of the kept target logits and q = softmax(head · hidden) (conventions §3).
"""

from __future__ import annotations

import torch

from specforge.ops.head_loss import head_loss


def soft_cross_entropy_reference(
    hidden: torch.Tensor, head: torch.Tensor, teacher_logits: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [R, H], head [Vd, H], teacher_logits [R, Vd], weights [R] -> (Σ weights·loss, loss [R], argmax [R]); plain and slow."""
    logits = torch.nn.functional.linear(hidden, head).float()
    log_q = torch.log_softmax(logits, dim=-1)
    rows = -(torch.softmax(teacher_logits.float(), dim=-1) * log_q).sum(-1)
    return (rows * weights).sum(), rows.detach(), logits.argmax(-1)


def soft_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    teacher_logits: torch.Tensor,
    teacher_rows: torch.Tensor,
    weights: torch.Tensor,
    tile: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fast path of :func:`soft_cross_entropy_reference`; row r is taught by ``teacher_logits[teacher_rows[r]]``.

    hidden [R, H], head [Vd, H], teacher_logits [P, Vd], teacher_rows int64 [R], weights float32 [R] ->
    (Σ weights·loss, loss [R] without gradient, draft argmax [R]). ``tile`` rows of logits exist at a time. R = 0 is legal.
    """

    def tile_loss(logits: torch.Tensor, rows: slice, wants_gradient: bool) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        teacher = torch.softmax(teacher_logits[teacher_rows[rows]].float(), dim=-1)
        lse = torch.logsumexp(logits, dim=-1)
        losses = lse - (teacher * logits).sum(-1)  # Σ p = 1
        if not wants_gradient:
            return losses, None, None
        # d loss / d logits = q − p; computed in place to keep one tile of logits alive.
        return losses, logits.sub_(lse.unsqueeze(-1)).exp_().sub_(teacher), None

    loss, losses, predicted, _ = head_loss(hidden, head, weights, tile_loss, tile)
    return loss, losses, predicted
