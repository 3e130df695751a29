"""The training loop: one page from "resume or start" to "finished, out of time or asked to stop".

:class:`Trainer` holds the numbers of ``conf/trainer``; :meth:`Trainer.fit` gets everything that exists only at run time. What a step
does is in ``step.py``, what happens between steps (log, evaluate, save) in ``session.py``, how weights are spread and updated in
``backend.py``, what survives a crash in ``checkpoint.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field
from torch import nn

from specforge.distributed.groups import Group
from specforge.errors import RunError
from specforge.runtime.contracts import StepContext, TrainBatch
from specforge.tracking.base import Tracker
from specforge.training import preemption
from specforge.training.backend import Backend
from specforge.training.checkpoint import CheckpointManager
from specforge.training.optimizer import OptimizerFactory
from specforge.training.scheduler import Schedule
from specforge.training.session import Evaluator, Session, TrainResult
from specforge.training.step import train_step
from specforge.training.strategies.base import DraftTrainStrategy

Count = Annotated[int, Field(ge=1)]


class StepLoader(Protocol):
    """What the loop needs of a loader: this rank's micro-batches of each optimizer step, from any step on."""

    def seek(self, step: int) -> None: ...

    def __iter__(self) -> Iterator[tuple[int, list[TrainBatch]]]: ...


class Trainer:
    """Built from ``conf/trainer/<name>.yaml``, where each number is explained."""

    def __init__(
        self,
        *,
        epochs: Count,
        max_steps: Count | None,
        global_batch_size: Count,
        micro_batches: Count,
        packing: bool,
        max_row_tokens: Count,
        prefetch_steps: Annotated[int, Field(ge=0)],
        param_dtype: Literal["auto", "float32", "bfloat16"],
        clip_norm: Annotated[float, Field(gt=0)] | None,
        log_every: Count,
        eval_every: Count | None,
        save_every: Count | None,
        keep_checkpoints: Count | None,
        resume: str,
        time_limit_minutes: Annotated[float, Field(gt=0)] | None,
    ) -> None:
        self.epochs, self.max_steps = epochs, max_steps
        self.global_batch_size, self.micro_batches = global_batch_size, micro_batches
        self.packing, self.max_row_tokens, self.prefetch_steps = packing, max_row_tokens, prefetch_steps
        self.param_dtype, self.clip_norm = param_dtype, clip_norm
        self.log_every, self.eval_every, self.save_every = log_every, eval_every, save_every
        self.keep_checkpoints, self.resume = keep_checkpoints, resume
        self.time_limit_seconds = math.inf if time_limit_minutes is None else 60.0 * time_limit_minutes

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run; the schedule is laid out over them."""
        return min(self.epochs * steps_per_epoch, self.max_steps or math.inf)  # type: ignore[return-value]

    def resolve_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype that the draft runs in; ``auto`` is bf16 on CUDA and fp32 on the CPU. Masters are fp32 always."""
        name = self.param_dtype if self.param_dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
        return torch.bfloat16 if name == "bfloat16" else torch.float32

    def fit(
        self,
        *,
        model: nn.Module,
        strategy: DraftTrainStrategy,
        head: Any,
        loader: StepLoader,
        steps_per_epoch: int,
        seed: int,
        backend: Backend,
        optimizer: OptimizerFactory,
        schedule: Schedule,
        evaluator: Evaluator | None,
        checkpoints: CheckpointManager,
        tracker: Tracker,
        group: Group,
        device: torch.device,
        on_checkpoint: Callable[[int], None] | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> TrainResult:
        """Train until the last step, the time limit or a signal. Collective: every rank calls it with the same configuration.

        ``evaluator`` is called on every rank; its dict (rank 0's counts) should hold ``walk_accept_length``, by which the best
        checkpoint is chosen. ``on_checkpoint(step)`` is called once the steps before and including ``step`` are durable, on every
        rank; ``on_start`` once an earlier state, if there is one, was accepted. Raises :class:`NumericalError`,
        :class:`CheckpointError` or :class:`RunError`; the last checkpoint is then intact.
        """
        model = backend.prepare(model, group, optimizer, self.resolve_dtype(device))
        run = Session(
            self, model, backend, evaluator, checkpoints, tracker, group, steps_per_epoch, self.total_steps(steps_per_epoch), on_checkpoint
        )
        run.start()
        if on_start is not None:
            on_start()
        if run.finished or run.out_of_time:
            return run.result(0)

        signum = 0
        loader.seek(run.progress.step)
        with preemption.StopSignals() as signals:
            for step, batches in loader:
                if step != run.progress.step:
                    raise RuntimeError(f"the loader gave step {step}, expected {run.progress.step}")
                factor = schedule.factor(step, run.total_steps)
                result = train_step(
                    model=model,
                    strategy=strategy,
                    head=head,
                    batches=batches,
                    context=StepContext(step, run.total_steps, run.epoch, seed),
                    backend=backend,
                    group=group,
                    device=device,
                    lr_factor=factor,
                    clip_norm=self.clip_norm,
                    stop_requested=signals.requested or run.out_of_time,
                )
                run.count(result)
                stopping = result.stop_requests > 0
                signum = preemption.agree(signals, group, device) if stopping else 0
                ending = run.finished or stopping
                if ending or run.due(self.log_every):
                    run.log(result, optimizer.lr * factor)
                # Somebody who sends a signal waits for a save, not for an evaluation.
                improved = run.evaluate() if not signum and (ending or run.due(self.eval_every)) else False
                if ending or improved or run.due(self.save_every):
                    run.save()
                if ending:
                    break
            else:
                raise RunError(
                    f"the loader ended after step {run.progress.step} of {run.total_steps}; "
                    "its plan is shorter than trainer.epochs asks for."
                )
        return run.result(signum)
