"""Rank facts from tables of environment variables."""

from __future__ import annotations

import pytest

from specforge.errors import RunError
from specforge.launch.env import SINGLE, RankFacts, rank_facts

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, SINGLE),
        ({"MASTER_ADDR": "node7", "LOCAL_RANK": "3"}, SINGLE),
        (TORCHRUN, RankFacts(3, 8, 1, 2, "node7", 29500, "torchrun")),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": ""}, RankFacts(3, 8, 1, 8, "node7", 29500, "torchrun")),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            RankFacts(0, 1, 0, 1, "localhost", 1, "torchrun"),
        ),
    ],
)
def test_facts(environ, expected):
    facts = rank_facts(environ)
    assert facts == expected and facts.is_main == (expected.rank == 0)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
        ({"RANK": "8"}, "RANK=8 with WORLD_SIZE=8"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
    ],
)
def test_contradictions_are_named(changed, message):
    with pytest.raises(RunError, match=message):
        rank_facts({**TORCHRUN, **changed})


def test_a_lonely_rank_names_all_that_is_missing():
    with pytest.raises(RunError, match="WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not"):
        rank_facts({"RANK": "0"})
