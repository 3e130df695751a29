"""Cross-entropy of hard labels under a frozen head over the whole vocabulary, a tile of rows at a time (conventions.md §3).

Logits are head · hidden, without the target's scale, bias or soft-cap: SGLang multiplies draft states by the bare head weight.
No more than ``tile`` rows of logits exist at once; both gradients are made in the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

# Logits that exist at a time.
_TILE_VALUES_CUDA, _TILE_VALUES_CPU = 2**27, 2**24


def rows_per_tile(head: torch.Tensor) -> int:
    """Rows whose logits over ``head`` [V, H] are made at a time."""
    return max(16, (_TILE_VALUES_CUDA if head.is_cuda else _TILE_VALUES_CPU) // head.shape[0])


class _HardCrossEntropy(torch.autograd.Function):
    """The head is frozen and rows do not meet, so a row's gradient is made in the forward and scaled by whatever weight comes back."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
        losses = torch.empty(hidden.shape[0], device=hidden.device, dtype=torch.float32)
        predicted = torch.empty_like(labels)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden.shape[0], tile):
            rows = slice(start, start + tile)
            logits = linear(hidden[rows].to(head.dtype), head).float()
            label = labels[rows].unsqueeze(-1)
            lse = torch.logsumexp(logits, dim=-1, keepdim=True)
            losses[rows] = (lse - logits.gather(-1, label)).squeeze(-1)
            predicted[rows] = logits.argmax(-1)
            if grad_hidden is not None:
                grad_hidden[rows] = softmax_minus_label(logits, lse, label).to(head.dtype) @ head
        ctx.save_for_backward(grad_hidden)
        ctx.mark_non_differentiable(predicted)
        return losses, predicted

    @staticmethod
    def backward(ctx: Any, grad_losses: torch.Tensor, _predicted: Any) -> tuple[Any, ...]:
        (grad_hidden,) = ctx.saved_tensors
        return grad_hidden * grad_losses.to(grad_hidden.dtype).unsqueeze(-1), None, None, None


def softmax_minus_label(logits: torch.Tensor, lse: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """d cross-entropy / d logits, made in the place of ``logits`` [T, V]; ``lse`` and ``label`` [T, 1]."""
    gradient = logits.sub_(lse).exp_()
    return gradient.scatter_add_(-1, label, gradient.new_full(label.shape, -1.0))


def hard_cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, tile: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [R, H], frozen head [V, H], labels int64 [R] -> (loss [R] float32 with a gradient to hidden, argmax [R]). R = 0 is legal."""
    return _HardCrossEntropy.apply(hidden, head, labels, tile or rows_per_tile(head))


def argmax_of_head(hidden: torch.Tensor, head: torch.Tensor, tile: int | None = None) -> torch.Tensor:
    """argmax of head · hidden: [R, H] -> int64 [R]; ties go to the lowest id."""
    parts = [linear(part.to(head.dtype), head).float().argmax(-1) for part in hidden.split(tile or rows_per_tile(head))]
    return torch.cat(parts)
