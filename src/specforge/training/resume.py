"""Continuing a run bit for bit: what is restored, in which order, and why nothing else is needed.

Order: weights, masters, moments (backend); then step, metric window and seconds (:class:`Progress`); generators last, because
building and loading may draw from them. The schedule is a function of the step, and the data order one of (seed, epoch), so neither
has state: the loader seeks to the step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from specforge.distributed.groups import Group
from specforge.errors import CheckpointError
from specforge.training.backend import Backend
from specforge.training.checkpoint import Checkpoint, CheckpointManager, find_checkpoint
from specforge.training.metrics import MetricWindow


@dataclass
class Progress:
    """Where the run stands, besides weights and optimizer: everything the loop itself must remember."""

    step: int = 0  # optimizer steps done
    skipped_steps: int = 0
    seconds: float = 0.0  # training wall time of all attempts
    tokens: int = 0
    best_score: float | None = None
    last_metrics: dict[str, Any] = field(default_factory=dict)  # of the last evaluation
    window: MetricWindow = field(default_factory=MetricWindow)

    def state(self) -> dict[str, Any]:
        return {**asdict(self), "window": self.window.state()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        return cls(**{**state, "window": MetricWindow.from_state(state["window"])})


def find_resume(policy: str, checkpoints: CheckpointManager) -> Checkpoint | None:
    """Which checkpoint to start from: ``auto`` = the newest complete one of this run, ``never``, or a run or checkpoint folder.

    Raises :class:`CheckpointError` for a path without one, and for a path of this run that newer checkpoints would contradict.
    """
    if policy == "auto":
        return checkpoints.latest()
    newest = checkpoints.latest()
    if policy == "never":
        if newest is not None:
            raise CheckpointError(
                f"trainer.resume=never, but {checkpoints.root} already holds the checkpoint of step {newest.meta.step}, which the new run "
                "would overwrite. Start without run=… to get a new run folder."
            )
        return None
    chosen = find_checkpoint(Path(policy), "latest")
    if newest is not None and newest.meta.step > chosen.meta.step:
        raise CheckpointError(
            f"trainer.resume={policy} is step {chosen.meta.step}, but this run folder already goes to step {newest.meta.step}. "
            "Continue from an older checkpoint in a new run folder (start without run=…)."
        )
    return chosen


def capture(progress: Progress, backend: Backend, group: Group) -> dict[str, Any]:
    """The content of ``training.pt``. Collective: generators differ between ranks, so all of them are kept."""
    return {
        "backend": backend.training_state(),
        "progress": progress.state(),
        "generators": group.all_gather_object(generator_states()),
        "world_size": group.world_size,
    }


def restore(checkpoint: Checkpoint, backend: Backend, group: Group) -> Progress:
    """Load weights, masters, moments and generators into a prepared backend's run and return the progress.

    Every rank reads the files itself: they lie on a disk that all ranks see.
    """
    backend.load_model_state(checkpoint.weights())
    training = checkpoint.training()
    backend.load_training_state(training["backend"])
    progress = Progress.from_state(training["progress"])
    if progress.step != checkpoint.meta.step:
        raise CheckpointError(
            f"{checkpoint.path}: meta.json says step {checkpoint.meta.step}, training.pt says {progress.step}. "
            "The files are of two checkpoints."
        )
    saved = training["generators"]
    # Another number of ranks is allowed: nothing in training draws from these generators (conventions §2), they are a safety net.
    if len(saved) == group.world_size:
        restore_generators(saved[group.rank])
    return progress


def generator_states() -> dict[str, Any]:
    """Python, numpy, torch and CUDA generator states as plain values and tensors."""
    name, keys, position, has_gauss, gauss = numpy.random.get_state()
    version, internal, gauss_next = random.getstate()
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [name, torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64).copy()), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else [],
    }


def restore_generators(state: Mapping[str, Any]) -> None:
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def generators_untouched() -> Iterator[None]:
    """Whatever is drawn inside (an evaluation) does not change what training draws after it."""
    states = generator_states()
    try:
        yield
    finally:
        restore_generators(states)
