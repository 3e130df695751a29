"""The vocabulary map against a slow loop written from conventions §6."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specforge.data.dataset import TokenizedDataset
from specforge.data.report import DataReport
from specforge.data.vocabulary_map import VocabularyMap
from specforge.errors import DataError


def dataset(rng: np.random.Generator, vocab_size: int, num: int = 30) -> TokenizedDataset:
    parts = []
    for i in range(num):
        length = int(rng.integers(1, 40))
        # A skewed draw makes ties and ids that never occur.
        ids = np.minimum(rng.geometric(0.2, length) * 2, vocab_size - 1)
        parts.append((ids, rng.random(length) < 0.6, i, 1))
    return TokenizedDataset.build(parts, DataReport())


def slow(data: TokenizedDataset, vocab_size: int, size: int) -> tuple[list[int], list[bool], float]:
    counts = [0] * vocab_size
    for i in range(len(data)):
        task = data[i]
        for token, m in zip(task.input_ids, task.loss_mask, strict=True):
            counts[token] += m
    kept = sorted(sorted(range(vocab_size), key=lambda t: (-counts[t], t))[:size])
    return [t - j for j, t in enumerate(kept)], [t in kept for t in range(vocab_size)], sum(counts[t] for t in kept) / sum(counts)


@pytest.mark.parametrize("size", [1, 5, 17, 40, 64])
@pytest.mark.parametrize("seed", range(4))
def test_equals_slow_loop(seed, size):
    data = dataset(np.random.default_rng(seed), 64)
    vocabulary = VocabularyMap.count(data, 64, size)
    d2t, t2d, coverage = slow(data, 64, size)
    assert vocabulary.d2t.tolist() == d2t and vocabulary.d2t.dtype == torch.int64
    assert vocabulary.t2d.tolist() == t2d and vocabulary.t2d.dtype == torch.bool
    assert vocabulary.coverage == pytest.approx(coverage)
    assert vocabulary.target_ids.tolist() == [t for t in range(64) if t2d[t]]


def test_fill_up_takes_lowest_ids():
    vocabulary = VocabularyMap.from_counts(np.array([0, 0, 0, 3, 0, 3]), 4)
    assert vocabulary.target_ids.tolist() == [0, 1, 3, 5]
    assert vocabulary.coverage == 1.0


def test_whole_vocabulary_is_the_identity():
    data = dataset(np.random.default_rng(0), 64)
    for size in (64, None):
        vocabulary = VocabularyMap.count(data, 64, size)
        assert vocabulary.is_identity and vocabulary.coverage == 1.0
        assert torch.equal(vocabulary.d2t, VocabularyMap.identity(64).d2t)
        assert torch.equal(vocabulary.t2d, VocabularyMap.identity(64).t2d)


def test_tensors_round_trip_and_foreign_maps_are_refused():
    vocabulary = VocabularyMap.count(dataset(np.random.default_rng(1), 64), 64, 9)
    tensors = vocabulary.to_tensors()
    again = VocabularyMap.from_tensors(tensors)
    assert torch.equal(again.d2t, vocabulary.d2t) and torch.equal(again.t2d, vocabulary.t2d) and again.coverage == vocabulary.coverage
    with pytest.raises(DataError, match="do not belong together"):
        VocabularyMap.from_tensors({**tensors, "t2d": torch.ones(64, dtype=torch.bool)})


def test_wrong_sizes_are_refused():
    data = dataset(np.random.default_rng(0), 64)
    with pytest.raises(DataError, match="draft vocabulary of 65"):
        VocabularyMap.count(data, 64, 65)
    with pytest.raises(DataError, match="the target's vocabulary has 8 entries"):
        VocabularyMap.count(data, 8, 4)
