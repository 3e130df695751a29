"""Random draws that depend on (seed, epoch, sample id) alone: they survive any cut, world size, topology and restart (conventions.md §2)."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def random_words(count: int, seed: int, epoch: int, sample_id: str, what: str) -> np.ndarray:
    """``count`` uniform 64-bit words of the stream named by (seed, epoch, sample id, what): uint64 [count].

    A longer stream begins with the shorter one. Raw Philox words, since numpy keeps a bit generator's stream the same between releases.
    """
    digest = hashlib.blake2b(f"{seed}:{epoch}:{sample_id}:{what}".encode(), digest_size=16).digest()
    return np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)).random_raw(count)


def random_order(count: int, seed: int, epoch: int, sample_id: str, what: str) -> np.ndarray:
    """A uniform permutation of 0 … count − 1: int64 [count]."""
    return np.argsort(random_words(count, seed, epoch, sample_id, what), kind="stable")


def choose(count: int, wanted: int, seed: int, epoch: int, sample_id: str, what: str) -> np.ndarray:
    """``wanted`` of 0 … count − 1 without replacement, ascending; all of them when there are no more: int64 [min(count, wanted)]."""
    if wanted >= count:
        return np.arange(count)
    return np.sort(random_order(count, seed, epoch, sample_id, what)[:wanted])


def torch_generator(seed: int, epoch: int, sample_id: str, what: str) -> torch.Generator:
    """The same stream's name as the seed of a CPU generator, for draws that torch makes."""
    return torch.Generator().manual_seed(int(random_words(1, seed, epoch, sample_id, what)[0] >> np.uint64(1)))
