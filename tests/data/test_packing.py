"""Packing: every document once, no row over the budget, first fit in order."""

from __future__ import annotations

import random

import pytest

from specforge.data.packing import pack


def test_first_fit_in_order():
    assert pack([4, 5, 3, 2, 6, 1], 8) == [[0, 2, 5], [1, 3], [4]]
    assert pack([], 8) == []
    assert pack([9, 1, 8], 8) == [[0], [1], [2]]


@pytest.mark.parametrize("seed", range(5))
def test_every_document_once_and_no_row_over_the_budget(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 120) for _ in range(200)]
    rows = pack(lengths, 100)
    assert sorted(i for row in rows for i in row) == list(range(200))
    assert all(row == sorted(row) for row in rows)
    for r, row in enumerate(rows):
        assert sum(lengths[i] for i in row) <= 100 or len(row) == 1
        # First fit: the first document of a row had no room in any earlier row at that time.
        for earlier in rows[:r]:
            assert sum(lengths[i] for i in earlier if i < row[0]) + lengths[row[0]] > 100


def test_budget_below_one():
    with pytest.raises(ValueError, match="max_row_tokens"):
        pack([1], 0)
