"""LK losses (arXiv 2602.23881): a draft head trained on the acceptance that it will have, without keeping the logits (conventions §3).

Acceptance of a row α = Σ_v min(pd_v, q_v), where pd are the target's probabilities of the kept words out of its **whole** vocabulary (they
do not sum to one) and q = softmax(head · hidden).

    alpha    −log α                                (no loss where α is 0)
    lambda   w · KL(p ‖ q) + (1 − w) · (1 − α)     w = kl_scale · exp(−kl_decay · α), of this row and without gradient

p are the kept probabilities renormalised, as in soft cross-entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from specforge.ops.head_loss import head_loss


@dataclass(frozen=True)
class LKForm:
    """Which of the two, and the mixing of the second."""

    kind: Literal["alpha", "lambda"]
    kl_scale: float
    kl_decay: float

    def mix(self, alpha: torch.Tensor) -> torch.Tensor:
        """w of acceptances [R]; how much of the ``lambda`` form is divergence."""
        return self.kl_scale * torch.exp(-self.kl_decay * alpha)


def lk_loss_reference(
    hidden: torch.Tensor, head: torch.Tensor, teacher_logits: torch.Tensor, normalizers: torch.Tensor, weights: torch.Tensor, form: LKForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [R, H], head [Vd, H], teacher_logits [R, Vd], normalizers [R], weights [R]; plain and slow, by autograd alone.

    Returns (Σ weights·loss, loss [R], argmax [R], α [R]).
    """
    logits = torch.nn.functional.linear(hidden, head).float()
    log_q = torch.log_softmax(logits, dim=-1)
    alpha = torch.minimum((teacher_logits.float() - normalizers.unsqueeze(-1)).exp(), log_q.exp()).sum(-1)
    if form.kind == "alpha":
        rows = -torch.where(alpha > 0, alpha, 1.0).log()
    else:
        log_p = torch.log_softmax(teacher_logits.float(), dim=-1)
        w = form.mix(alpha.detach())
        rows = w * (log_p.exp() * (log_p - log_q)).sum(-1) + (1 - w) * (1 - alpha)
    return (rows * weights).sum(), rows.detach(), logits.argmax(-1), alpha.detach()


def lk_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    teacher_logits: torch.Tensor,
    normalizers: torch.Tensor,
    teacher_rows: torch.Tensor,
    weights: torch.Tensor,
    form: LKForm,
    tile: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fast path of :func:`lk_loss_reference`; row r is taught by ``teacher_logits[teacher_rows[r]]``.

    teacher_logits [P, Vd] and ``normalizers`` [P], the log-sum-exp over the whole vocabulary; teacher_rows int64 [R]; weights float32 [R]
    -> (Σ weights·loss, loss [R], draft argmax [R], α [R]); only the sum has a gradient. ``tile`` rows of logits exist at a time.
    """

    def tile_loss(logits: torch.Tensor, rows: slice, wants_gradient: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        taught = teacher_rows[rows]
        log_p = torch.log_softmax(teacher_logits[taught].float(), dim=-1)
        # Kept words' share of the target's probability turns renormalised into un-renormalised ones.
        kept = torch.logsumexp(teacher_logits[taught].float(), dim=-1) - normalizers[taught]
        log_q = torch.log_softmax(logits, dim=-1)
        q = log_q.exp()
        pd = (log_p + kept.unsqueeze(-1)).exp()
        alpha = torch.minimum(pd, q).sum(-1)
        # d α / d logits = q · (s − Σ s q) with s = 1 where q is the smaller one.
        smaller = (q < pd).float()
        reached = (smaller * q).sum(-1, keepdim=True)
        if form.kind == "alpha":
            losses = -torch.where(alpha > 0, alpha, 1.0).log()
            if not wants_gradient:
                return losses, None, alpha
            steep = torch.where(alpha > 0, 1.0 / alpha.clamp(min=torch.finfo(alpha.dtype).tiny), 0.0).unsqueeze(-1)
            return losses, smaller.sub_(reached).mul_(q).mul_(-steep), alpha
        p, w = log_p.exp(), form.mix(alpha)
        losses = w * (p * (log_p - log_q)).sum(-1) + (1 - w) * (1 - alpha)
        if not wants_gradient:
            return losses, None, alpha
        w = w.unsqueeze(-1)
        return losses, smaller.sub_(reached).mul_(q).mul_(w - 1).add_((q - p).mul_(w)), alpha

    return head_loss(hidden, head, weights, tile_loss, tile)
