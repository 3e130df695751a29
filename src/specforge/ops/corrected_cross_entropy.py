"""Losses of draft heads that add a low-rank term to the frozen head's logits: Domino's correction and DSpark's Markov bias.

logits = head · hidden + projection · latent, with ``latent`` [R, r] and ``projection`` [V, r] trained. As in
:mod:`specforge.ops.hard_cross_entropy` one tile of rows exists at a time and gradients are made in the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from specforge.ops.hard_cross_entropy import rows_per_tile, softmax_minus_label


class _Gradients:
    """Sums of one forward pass: d loss / d (hidden, latent, projection)."""

    def __init__(self, hidden: torch.Tensor, head: torch.Tensor, latent: torch.Tensor, projection: torch.Tensor) -> None:
        self.hidden, self.latent = torch.empty_like(hidden), torch.empty_like(latent)
        self.projection = torch.zeros_like(projection, dtype=torch.float32)
        self._head, self._latent, self._projection = head, latent, projection

    def add(self, rows: slice, head_gradient: torch.Tensor, correction_gradient: torch.Tensor) -> None:
        """Gradients [T, V] with respect to the base logits and to the correction of these rows."""
        self.hidden[rows] = head_gradient.to(self._head.dtype) @ self._head
        correction_gradient = correction_gradient.to(self._projection.dtype)
        self.latent[rows] = correction_gradient @ self._projection
        self.projection += correction_gradient.t() @ self._latent[rows]

    def save(self, ctx: Any) -> None:
        ctx.save_for_backward(self.hidden, self.latent, self.projection.to(self._projection.dtype))


def _scaled(ctx: Any, grad_sum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, latent, projection = (t * grad_sum.to(t.dtype) for t in ctx.saved_tensors)
    return hidden, latent, projection


class _Domino(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        latent: torch.Tensor,
        projection: torch.Tensor,
        corrected: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        base_share: float,
        tile: int,
    ) -> tuple[torch.Tensor, ...]:
        gradients = _Gradients(hidden, head, latent, projection) if any(ctx.needs_input_grad) else None
        losses = torch.empty(2, hidden.shape[0], device=hidden.device, dtype=torch.float32)
        predicted = torch.empty_like(labels)
        for start in range(0, hidden.shape[0], tile):
            rows = slice(start, start + tile)
            base = linear(hidden[rows].to(head.dtype), head).float()
            on = corrected[rows].unsqueeze(-1)
            final = base + linear(latent[rows], projection).float() * on
            label, weight = labels[rows].unsqueeze(-1), weights[rows].unsqueeze(-1)
            lses = [torch.logsumexp(logits, dim=-1, keepdim=True) for logits in (final, base)]
            for i, logits in enumerate((final, base)):
                losses[i, rows] = (lses[i] - logits.gather(-1, label)).squeeze(-1)
            predicted[rows] = final.argmax(-1)
            if gradients is None:
                continue
            final_gradient = softmax_minus_label(final, lses[0], label).mul_((1.0 - base_share) * weight)
            base_gradient = softmax_minus_label(base, lses[1], label).mul_(base_share * weight).add_(final_gradient)
            gradients.add(rows, base_gradient, final_gradient.mul_(on))
        if gradients is not None:
            gradients.save(ctx)
        loss = (((1.0 - base_share) * losses[0] + base_share * losses[1]) * weights).sum()
        ctx.mark_non_differentiable(losses, predicted)
        return loss, losses, predicted

    @staticmethod
    def backward(ctx: Any, grad_sum: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        hidden, latent, projection = _scaled(ctx, grad_sum)
        return hidden, None, latent, projection, None, None, None, None, None


def domino_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    latent: torch.Tensor,
    projection: torch.Tensor,
    corrected: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    base_share: float,
    tile: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Σ weights · ((1 − λ) · CE(corrected logits) + λ · CE(base logits)), λ = ``base_share`` (Domino, arXiv 2605.29707).

    ``corrected`` bool [R]: rows that get the correction; the others keep their base logits. Returns (sum, the two losses [2, R] without
    gradient, corrected first, and the argmax [R] of the corrected logits).
    """
    tile = tile or max(16, rows_per_tile(head) // 2)
    return _Domino.apply(hidden, head, latent, projection, corrected, labels, weights, base_share, tile)


class _DSpark(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        latent: torch.Tensor,
        projection: torch.Tensor,
        teacher: Callable[[slice], torch.Tensor],
        labels: torch.Tensor,
        weights: torch.Tensor,
        shares: tuple[float, float],
        tile: int,
    ) -> tuple[torch.Tensor, ...]:
        gradients = _Gradients(hidden, head, latent, projection) if any(ctx.needs_input_grad) else None
        losses = torch.empty(2, hidden.shape[0], device=hidden.device, dtype=torch.float32)
        predicted = torch.empty_like(labels)
        ce_share, l1_share = shares
        for start in range(0, hidden.shape[0], tile):
            rows = slice(start, start + tile)
            logits = linear(hidden[rows].to(head.dtype), head).float() + linear(latent[rows], projection).float()
            label, weight = labels[rows].unsqueeze(-1), weights[rows].unsqueeze(-1)
            lse = torch.logsumexp(logits, dim=-1, keepdim=True)
            losses[0, rows] = (lse - logits.gather(-1, label)).squeeze(-1)
            predicted[rows] = logits.argmax(-1)
            q = logits.sub_(lse).exp_()
            difference = q - torch.softmax(teacher(rows), dim=-1)
            losses[1, rows] = difference.abs().sum(-1)
            if gradients is None:
                continue
            # d |q − p|₁ / d logits = q · (s − Σ s q) with s = sign(q − p); d CE / d logits = q − label.
            sign = difference.sign_()
            gradient = sign.sub_((sign * q).sum(-1, keepdim=True)).mul_(l1_share).add_(ce_share).mul_(q)
            gradient.scatter_add_(-1, label, gradient.new_full(label.shape, -ce_share))
            gradient.mul_(weight)
            gradients.add(rows, gradient, gradient)
        if gradients is not None:
            gradients.save(ctx)
        loss = ((ce_share * losses[0] + l1_share * losses[1]) * weights).sum()
        ctx.mark_non_differentiable(losses, predicted)
        return loss, losses, predicted

    @staticmethod
    def backward(ctx: Any, grad_sum: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        hidden, latent, projection = _scaled(ctx, grad_sum)
        return hidden, None, latent, projection, None, None, None, None, None


def dspark_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    latent: torch.Tensor,
    projection: torch.Tensor,
    teacher: Callable[[slice], torch.Tensor],
    labels: torch.Tensor,
    weights: torch.Tensor,
    ce_share: float,
    l1_share: float,
    tile: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Σ weights · (ce_share · CE + l1_share · ‖q − p‖₁) over the whole vocabulary (DSpark, arXiv 2607.05147).

    ``teacher(rows)`` gives the target's own logits [T, V] in float32 for a slice of rows. Returns (sum, CE and L1 [2, R] without
    gradient, argmax [R]). The L1 term has no ½.
    """
    tile = tile or max(16, rows_per_tile(head) // 2)
    return _DSpark.apply(hidden, head, latent, projection, teacher, labels, weights, (ce_share, l1_share), tile)
