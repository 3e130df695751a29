"""A loss of a trainable draft head, a tile of rows at a time: no more than one tile of logits exists, both gradients are made forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# (logits float32 [T, Vd], which may be overwritten; the tile's rows; whether a gradient is wanted)
#   -> (loss [T], d loss / d logits [T, Vd] or None, and a further number of each row [T] or None)
TileLoss = Callable[[torch.Tensor, slice, bool], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


class _HeadLoss(torch.autograd.Function):
    """Head product, loss and both gradients in one pass over tiles of rows; the backward only scales what the forward made."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, weights: torch.Tensor, tile_loss: TileLoss, tile: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        num_rows = hidden.shape[0]
        losses, extra = torch.zeros(2, num_rows, device=hidden.device, dtype=torch.float32)
        predicted = torch.empty(num_rows, device=hidden.device, dtype=torch.int64)
        wants_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        grad_head = torch.zeros_like(head, dtype=torch.float32) if wants_gradient else None
        for start in range(0, num_rows, tile):
            rows = slice(start, start + tile)
            logits = torch.nn.functional.linear(hidden[rows], head).float()
            predicted[rows] = logits.argmax(-1)
            losses[rows], gradient, further = tile_loss(logits, rows, wants_gradient)
            if further is not None:
                extra[rows] = further
            if gradient is None or grad_hidden is None or grad_head is None:
                continue
            gradient = gradient.mul_(weights[rows].unsqueeze(-1)).to(head.dtype)
            grad_hidden[rows] = gradient @ head
            if head.dtype == torch.float32:
                grad_head.addmm_(gradient.t(), hidden[rows])
            else:
                grad_head += gradient.t() @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(losses, predicted, extra)
        return (losses * weights).sum(), losses, predicted, extra

    @staticmethod
    def backward(ctx: Any, grad_sum: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_sum.to(grad_hidden.dtype), (grad_head * grad_sum).to(ctx.head_dtype), None, None, None


def head_loss(
    hidden: torch.Tensor, head: torch.Tensor, weights: torch.Tensor, tile_loss: TileLoss, tile: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [R, H], head [Vd, H], weights float32 [R] -> (Σ weights·loss, loss [R], draft argmax [R], further numbers [R]).

    Only the sum has a gradient. ``tile`` rows of logits exist at a time. R = 0 is legal.
    """
    return _HeadLoss.apply(hidden, head, weights, tile_loss, tile)
