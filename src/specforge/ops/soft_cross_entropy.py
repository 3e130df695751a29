"""Soft cross-entropy between a draft head and the target's renormalised kept distribution, without keeping the logits.

Loss of a row = −Σ_v p_v log q_v with p = softmax of the kept target logits and q = softmax(head · hidden) (conventions §3).
"""

from __future__ import annotations

from typing import Any

import torch


def soft_cross_entropy_reference(
    hidden: torch.Tensor, head: torch.Tensor, teacher_logits: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [R, H], head [Vd, H], teacher_logits [R, Vd], weights [R] -> (Σ weights·loss, loss [R], argmax [R]); plain and slow."""
    logits = torch.nn.functional.linear(hidden, head).float()
    log_q = torch.log_softmax(logits, dim=-1)
    rows = -(torch.softmax(teacher_logits.float(), dim=-1) * log_q).sum(-1)
    return (rows * weights).sum(), rows.detach(), logits.argmax(-1)


class _LinearSoftCrossEntropy(torch.autograd.Function):
    """Head product, loss and both gradients in one pass over tiles of rows; the backward only scales what the forward made."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        teacher_logits: torch.Tensor,
        teacher_rows: torch.Tensor,
        weights: torch.Tensor,
        tile: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_rows = hidden.shape[0]
        losses = torch.empty(num_rows, device=hidden.device, dtype=torch.float32)
        predicted = torch.empty(num_rows, device=hidden.device, dtype=torch.int64)
        wants_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        grad_head = torch.zeros_like(head, dtype=torch.float32) if wants_gradient else None
        for start in range(0, num_rows, tile):
            rows = slice(start, start + tile)
            logits = torch.nn.functional.linear(hidden[rows], head).float()
            teacher = torch.softmax(teacher_logits[teacher_rows[rows]].float(), dim=-1)
            lse = torch.logsumexp(logits, dim=-1)
            losses[rows] = lse - (teacher * logits).sum(-1)  # Σ p = 1
            predicted[rows] = logits.argmax(-1)
            if grad_hidden is None or grad_head is None:
                continue
            # d loss / d logits = q − p, weighted; computed in place to keep one tile of logits alive.
            gradient = logits.sub_(lse.unsqueeze(-1)).exp_().sub_(teacher).mul_(weights[rows].unsqueeze(-1)).to(head.dtype)
            grad_hidden[rows] = gradient @ head
            if head.dtype == torch.float32:
                grad_head.addmm_(gradient.t(), hidden[rows])
            else:
                grad_head += gradient.t() @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(losses, predicted)
        return (losses * weights).sum(), losses, predicted

    @staticmethod
    def backward(ctx: Any, grad_sum: torch.Tensor, _losses: Any, _predicted: Any) -> tuple[Any, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_sum.to(grad_hidden.dtype), (grad_head * grad_sum).to(ctx.head_dtype), None, None, None, None


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
    return _LinearSoftCrossEntropy.apply(hidden, head, teacher_logits, teacher_rows, weights, tile)
