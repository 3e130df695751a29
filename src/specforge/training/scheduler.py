"""Learning-rate schedules: pure functions from (step, total steps) to a factor of the optimizer's lr, with linear warm-up.

A schedule has no state, so resuming needs the step alone. ``step`` counts the optimizer steps already done: the first update uses
``factor(0, total)``. The last update is step ``total − 1``; later steps (there are none in a run) keep the final factor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, Literal

from pydantic import Field

Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Steps = Annotated[int, Field(ge=0)]


class Schedule(ABC):
    """Warm-up, then the shape of a subclass from 1 down to ``min_ratio``."""

    def __init__(self, warmup_steps: int | None, warmup_ratio: float, min_ratio: float) -> None:
        self.warmup_steps = warmup_steps
        self.warmup_ratio = warmup_ratio
        self.min_ratio = min_ratio

    def num_warmup_steps(self, total_steps: int) -> int:
        """``warmup_steps`` when it is set, else the ratio's share of all steps, rounded up."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil(self.warmup_ratio * total_steps - 1e-9)

    def factor(self, step: int, total_steps: int) -> float:
        """What the lr is multiplied with for the update after ``step`` done ones; in [0, 1] and positive during warm-up."""
        warmup = self.num_warmup_steps(total_steps)
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, total_steps - warmup)
        return self.min_ratio + (1.0 - self.min_ratio) * self.shape(min(1.0, progress))

    @abstractmethod
    def shape(self, progress: float) -> float:
        """The curve after warm-up: 1 at progress 0, at least 0 at progress 1."""


class Cosine(Schedule):
    """Half a cosine from 1 to ``min_ratio`` (Loshchilov and Hutter, arXiv 1608.03983, without restarts)."""

    def __init__(self, *, warmup_steps: Steps | None, warmup_ratio: Ratio, min_ratio: Ratio) -> None:
        super().__init__(warmup_steps, warmup_ratio, min_ratio)

    def shape(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


class Constant(Schedule):
    """No decay after warm-up."""

    def __init__(self, *, warmup_steps: Steps | None, warmup_ratio: Ratio) -> None:
        super().__init__(warmup_steps, warmup_ratio, min_ratio=0.0)

    def shape(self, progress: float) -> float:
        return 1.0


class WarmupStableDecay(Schedule):
    """WSD: a plateau, then a decay over the last ``decay_ratio`` of the steps after warm-up (arXiv 2404.06395)."""

    def __init__(
        self,
        *,
        warmup_steps: Steps | None,
        warmup_ratio: Ratio,
        min_ratio: Ratio,
        decay_ratio: Ratio,
        decay_shape: Literal["linear", "cosine", "one_minus_sqrt"],
    ) -> None:
        super().__init__(warmup_steps, warmup_ratio, min_ratio)
        self.decay_ratio = decay_ratio
        self.decay_shape = decay_shape

    def shape(self, progress: float) -> float:
        start = 1.0 - self.decay_ratio
        if progress <= start:
            return 1.0
        done = (progress - start) / self.decay_ratio
        if self.decay_shape == "linear":
            return 1.0 - done
        if self.decay_shape == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0 - math.sqrt(done)
