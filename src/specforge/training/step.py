"""One optimizer step: micro-batches → loss → backward → one reduction → clip → update, and what it says about itself.

Two collectives and one wait for the device: the sums (weight_sum, loss, metrics, stop requests of all ranks) travel in one vector,
the gradient in another, and everything the host must decide on is read at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specforge.distributed.groups import Group
from specforge.errors import NumericalError, RunError
from specforge.runtime.contracts import StepContext, TrainBatch
from specforge.training.backend import Backend
from specforge.training.metrics import FlatSums
from specforge.training.strategies.base import DraftTrainStrategy


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank. ``metrics`` are (numerators, denominators), not yet divided."""

    metrics: dict[str, tuple[list[float], list[float]]]
    loss: float  # loss_sum / weight_sum; NaN when the step was skipped
    weight_sum: float
    tokens: int
    gradient_norm: float  # of the normalised gradient, before clipping
    skipped: bool  # no supervised row on any rank: nothing was updated
    stop_requests: int  # ranks that want to stop after this step


def train_step(
    *,
    model: nn.Module,
    strategy: DraftTrainStrategy,
    head: Any,
    batches: Sequence[TrainBatch],
    context: StepContext,
    backend: Backend,
    group: Group,
    device: torch.device,
    lr_factor: float,
    clip_norm: float | None,
    stop_requested: bool,
) -> StepResult:
    """Train on this rank's ``batches`` of one global batch. Collective.

    Raises :class:`NumericalError` on every rank when a loss or the gradient is not finite; the weights are then untouched.
    """
    sums = FlatSums(device)
    for name in ("loss_sum", "weight_sum", "bad_losses", "tokens"):
        sums.add(name, 0.0)
    sums.add("stop_requests", float(stop_requested))
    bad = []
    for batch in batches:
        batch = batch.to(device, non_blocking=True)
        output = strategy.forward_loss(model, batch, head, context)
        backend.backward(output.loss_sum)
        bad.append(~torch.isfinite(output.loss_sum.detach()))
        sums.add("loss_sum", output.loss_sum)
        sums.add("weight_sum", output.weight_sum)
        sums.add("bad_losses", bad[-1])
        sums.add("tokens", (batch.tensors["document_ids"] >= 0).sum())
        sums.add_metrics(output.metrics)

    if context.step == 0:
        check_same_layout(sums, group)
    vector = sums.pack()
    group.all_reduce_sum(vector)
    backend.reduce_gradients()
    norm = backend.gradient_norm().reshape(1).to(vector)
    values = torch.cat([vector, norm]).tolist()  # the step's one wait for the device

    scalars, metrics = sums.unpack(values)
    weight_sum, raw_norm = scalars["weight_sum"], values[-1]
    if scalars["bad_losses"] or not math.isfinite(raw_norm) or not math.isfinite(weight_sum):
        raise not_finite(context, batches, bad, group)
    skipped = weight_sum <= 0.0
    if skipped:
        backend.drop_gradients()
        loss = gradient_norm = math.nan
    else:
        loss, gradient_norm = scalars["loss_sum"] / weight_sum, raw_norm / weight_sum
        clip = 1.0 if clip_norm is None else min(1.0, clip_norm / max(gradient_norm, 1e-12))
        backend.update(lr_factor, clip / weight_sum)
        metrics["loss"] = ([scalars["loss_sum"]], [weight_sum])
    return StepResult(metrics, loss, weight_sum, int(scalars["tokens"]), gradient_norm, skipped, int(scalars["stop_requests"]))


def check_same_layout(sums: FlatSums, group: Group) -> None:
    """Ranks whose strategies report different metrics would add apples to pears; say so instead."""
    if group.world_size == 1:
        return
    layouts = group.all_gather_object(sums.layout())
    for rank, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise RunError(
                f"rank {rank} reports other metrics than rank 0: {layout} versus {layouts[0]}. A strategy must always report the same."
            )


def not_finite(context: StepContext, batches: Sequence[TrainBatch], bad: Sequence[torch.Tensor], group: Group) -> NumericalError:
    """The error that names the step and the samples. Collective: every rank knows by now that some rank is in trouble."""
    mine = [sample for batch, flag in zip(batches, bad, strict=True) if bool(flag) for sample in batch.sample_ids]
    from_loss = [sample for samples in group.all_gather_object(mine) for sample in samples]
    if from_loss:
        what, samples = "the loss", from_loss
    else:
        here = [sample for batch in batches for sample in batch.sample_ids]
        what, samples = "the gradient", [sample for part in group.all_gather_object(here) for sample in part]
    shown = ", ".join(samples[:8]) + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")
    return NumericalError(
        f"step {context.step + 1}: {what} is not finite; samples: {shown or 'none'}. The weights were not updated and every "
        "checkpoint is intact. Lower optimizer.lr, raise scheduler.warmup_steps, set trainer.clip_norm, or look at these samples."
    )
