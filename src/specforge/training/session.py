"""What happens between optimizer steps: start or resume, count, log, evaluate, save, report the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from specforge.distributed.groups import Group
from specforge.tracking.base import Tracker
from specforge.training import preemption, resume
from specforge.training.backend import Backend
from specforge.training.checkpoint import BEST_METRIC, CheckpointManager, open_checkpoint
from specforge.training.step import StepResult

if TYPE_CHECKING:
    from specforge.training.trainer import Trainer

Evaluator = Callable[[nn.Module], dict[str, Any]]


@dataclass(frozen=True)
class TrainResult:
    """How a call of :meth:`Trainer.fit` ended."""

    step: int
    total_steps: int
    stopped_by: Literal["finished", "time_limit", "signal"]
    exit_code: int  # 0, or 128 + the signal's number
    checkpoint: Path | None  # the newest
    best_checkpoint: Path | None
    metrics: dict[str, Any]  # of the last evaluation
    seconds: float  # training wall time of all attempts
    tokens: int


@dataclass
class Session:
    """The moving state of one ``fit`` and what happens at its step boundaries."""

    trainer: Trainer
    model: nn.Module
    backend: Backend
    evaluator: Evaluator | None
    checkpoints: CheckpointManager
    tracker: Tracker
    group: Group
    steps_per_epoch: int
    total_steps: int
    on_checkpoint: Callable[[int], None] | None
    progress: resume.Progress = field(default_factory=resume.Progress)
    saved_seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)
    last_log: float = field(default_factory=time.monotonic)
    logged_steps: int = 0
    evaluated_step: int | None = None

    def start(self) -> None:
        """Resume or begin; rank 0 decides from which checkpoint, so that a slow shared disk cannot split the ranks."""
        if self.group.is_main:
            self.checkpoints.sweep()
        path = _on_main(self.group, self._find_checkpoint)
        if path is not None:
            checkpoint = open_checkpoint(path)
            checkpoint.require(self.checkpoints.identity)
            self.progress = resume.restore(checkpoint, self.backend, self.group)
        self.saved_seconds = self.progress.seconds
        self.tracker.begin(self.progress.step, self.total_steps)
        if path is not None:
            self.tracker.message(f"resumed from {path}: step {self.progress.step} of {self.total_steps}")
        self.started = self.last_log = time.monotonic()
        self.model.train()

    def _find_checkpoint(self) -> Path | None:
        checkpoint = resume.find_resume(self.trainer.resume, self.checkpoints)
        return checkpoint.path if checkpoint else None

    @property
    def epoch(self) -> int:
        return self.progress.step // self.steps_per_epoch

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.total_steps

    @property
    def out_of_time(self) -> bool:
        return self.seconds >= self.trainer.time_limit_seconds

    @property
    def seconds(self) -> float:
        return self.saved_seconds + time.monotonic() - self.started

    def due(self, every: int | None) -> bool:
        """Whether something that happens each ``every`` steps (null: at each epoch's end) happens after the step just done."""
        return self.progress.step % (every or self.steps_per_epoch) == 0

    def count(self, result: StepResult) -> None:
        progress = self.progress
        progress.step += 1
        progress.tokens += result.tokens
        progress.window.add(result.metrics, result.tokens)
        self.logged_steps += 1
        if result.skipped:
            progress.skipped_steps += 1
            self.tracker.message(
                f"warning: step {progress.step} has no supervised token on any rank and was skipped ({progress.skipped_steps} so far); "
                "look at trainer.max_row_tokens and at show-sample"
            )

    def log(self, result: StepResult, lr: float) -> None:
        now = time.monotonic()
        elapsed, self.last_log = max(now - self.last_log, 1e-9), now
        tokens, steps, self.logged_steps = self.progress.window.tokens, self.logged_steps, 0
        row: dict[str, Any] = dict(self.progress.window.take())
        row |= {"lr": lr, "gradient_norm": result.gradient_norm, "weight_sum": result.weight_sum}
        row |= {"skipped_steps": self.progress.skipped_steps}
        row |= {"epoch": self.progress.step / self.steps_per_epoch, "tokens": self.progress.tokens, "seconds": self.seconds}
        row |= {"steps_per_second": steps / elapsed, "tokens_per_second": tokens / elapsed}
        self.tracker.log(self.progress.step, row, "train")

    def evaluate(self) -> bool:
        """Run the evaluator on the weights as they are; whether they are the best so far."""
        if self.evaluator is None:
            return False
        self.model.eval()
        with resume.generators_untouched(), torch.no_grad():
            metrics = self.group.broadcast_object(self.evaluator(self.model))
        self.model.train()
        self.progress.last_metrics = metrics
        self.tracker.log(self.progress.step, metrics, "eval")
        score, best = metrics.get(BEST_METRIC), self.progress.best_score
        improved = score is not None and math.isfinite(score) and (best is None or score > best)
        if improved:
            self.progress.best_score = float(score)
        self.evaluated_step = self.progress.step
        return improved

    def save(self) -> None:
        """Write a checkpoint that holds everything up to this step. Collective; a failure on rank 0 is every rank's."""
        progress = self.progress
        progress.seconds = self.seconds
        weights, training = self.backend.model_state(), resume.capture(progress, self.backend, self.group)
        metrics = progress.last_metrics if self.evaluated_step == progress.step else {}
        self.tracker.flush()
        _on_main(self.group, lambda: self.checkpoints.save(progress.step, self.epoch, weights, training, metrics).path)
        if self.on_checkpoint is not None:
            self.on_checkpoint(progress.step)

    def result(self, signum: int) -> TrainResult:
        latest, best = _on_main(
            self.group, lambda: tuple(c.path if c else None for c in (self.checkpoints.latest(), self.checkpoints.best()))
        )
        stopped_by: Literal["finished", "time_limit", "signal"] = "signal" if signum else ("finished" if self.finished else "time_limit")
        if stopped_by != "finished":
            why = "a signal" if signum else "trainer.time_limit_minutes"
            self.tracker.message(
                f"stopped by {why} at step {self.progress.step} of {self.total_steps}; saved in {latest}. "
                f"Continue with: specforge run={_typed(latest.parents[1])}"
            )
        return TrainResult(
            self.progress.step,
            self.total_steps,
            stopped_by,
            preemption.exit_code(signum),
            latest,
            best,
            self.progress.last_metrics,
            self.seconds,
            self.progress.tokens,
        )


def _typed(path: Path) -> str:
    """A path as short as it can be typed here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _on_main(group: Group, action: Callable[[], Any]) -> Any:
    """Do ``action`` on rank 0 and give its result, or its user error, to every rank. Collective."""
    outcome: tuple[Any, Exception | None] = (None, None)
    if group.is_main:
        try:
            outcome = (action(), None)
        except Exception as error:  # handed to all ranks below: a rank that does not hear of it would wait for ever
            outcome = (None, error)
    value, problem = group.broadcast_object(outcome)
    if problem is not None:
        raise problem
    return value
