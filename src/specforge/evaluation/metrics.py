"""The numbers of conventions.md §7, each under its own name and from sums, never from averages of averages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch


def simulated_acc_len(per_position_accuracy: Sequence[float]) -> float:
    """a0 + a0·a1 + a0·a1·a2 + … ; a comparison with peers, not a prediction (rows are correlated)."""
    total, product = 0.0, 1.0
    for accuracy in per_position_accuracy:
        product *= accuracy
        total += product
    return total


def prefix_lengths(correct: torch.Tensor) -> torch.Tensor:
    """Leading right steps of each row: bool [R, n] -> int64 [R]."""
    return correct.long().cumprod(-1).sum(-1)


@dataclass
class Walk:
    """A pooled walk over replies: verify steps made and draft tokens they accepted."""

    steps: int = 0
    accepted: int = 0

    def add(self, other: Walk) -> None:
        self.steps += other.steps
        self.accepted += other.accepted

    @property
    def accept_length(self) -> float:
        """Σ (prefix + 1) / Σ steps; 1.0 when nothing was walked."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0


def walk_document(places: Sequence[int], prefixes: Sequence[int], last_start: int | None = None) -> Walk:
    """Walk one document's replies as serving would: the next start after row i is i + prefix + 1 (conventions §7).

    ``places`` ascending are the legal rows; a gap in them is the border between two replies, where the walk starts anew at the next
    legal row. Rows after ``last_start`` are read ahead but never started from.
    """
    walk = Walk()
    following, previous = -1, None
    for place, prefix in zip(places, prefixes, strict=True):
        new_reply = previous is not None and place != previous + 1
        previous = place
        if (place < following and not new_reply) or (last_start is not None and place > last_start):
            continue
        walk.steps += 1
        walk.accepted += prefix
        following = place + prefix + 1
    return walk


def bootstrap_interval(
    counts: Sequence[tuple[int, int]], confidence: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Interval of the pooled accept_length by resampling requests; ``counts`` is (accepted drafts, verify steps) of each request."""
    counts = [c for c in counts if c[1]]
    if not counts:
        return 1.0, 1.0
    generator = random.Random(seed)
    values = []
    for _ in range(draws):
        drawn = generator.choices(counts, k=len(counts))
        values.append(1.0 + sum(a for a, _ in drawn) / sum(s for _, s in drawn))
    values.sort()
    margin = (1.0 - confidence) / 2.0
    return values[int(margin * draws)], values[min(int((1.0 - margin) * draws), draws - 1)]
