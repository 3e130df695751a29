"""Which samples make which step: a pure function of a few numbers, so that any rank, any restart and any topology agrees."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class BatchPlan:
    """Step → rank → micro-batch → dataset indices.

    Each epoch runs through a permutation of the dataset that depends on (seed, epoch) alone. A step takes the next
    ``global_batch_size`` samples; the last step of an epoch takes what is left, so every sample is seen exactly once an epoch. The
    samples of a step are cut into near-equal, contiguous shares, first by rank, then by micro-batch: a share may be empty.
    """

    num_samples: int
    seed: int
    global_batch_size: int
    world_size: int = 1
    micro_batches: int = 1
    shuffle: bool = True
    _order: tuple[int, np.ndarray] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch_size", "world_size", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch_size)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def global_batch(self, step: int) -> list[int]:
        """Dataset indices of a step over all ranks."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.global_batch_size
        return self._permutation(epoch)[start : start + self.global_batch_size].tolist()

    def rank_batches(self, step: int, rank: int) -> list[list[int]]:
        """Dataset indices of a step for one rank: exactly ``micro_batches`` lists, some perhaps empty."""
        share = _share(self.global_batch(step), rank, self.world_size)
        return [_share(share, micro, self.micro_batches) for micro in range(self.micro_batches)]

    def _permutation(self, epoch: int) -> np.ndarray:
        order = self._order  # a local name: the prefetch thread may be an epoch ahead of whoever asks
        if order is None or order[0] != epoch:
            order = (epoch, permutation(self.num_samples, self.seed, epoch) if self.shuffle else np.arange(self.num_samples))
            self._order = order
        return order[1]


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Order of ``count`` items as a pure function of (seed, epoch): int64 [count]."""
    # Sorting raw Philox words: numpy promises that a bit generator's stream stays the same between releases, not `permutation`.
    words = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable")


def _share(items: list[int], index: int, count: int) -> list[int]:
    return items[len(items) * index // count : len(items) * (index + 1) // count]
