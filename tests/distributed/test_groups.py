"""Groups: the fake and the single one here; real gloo ranks in tests/launch/test_local_ranks.py."""

from __future__ import annotations

import socket

import pytest
import torch

from specforge.distributed.groups import FakeGroup, SingleGroup, TorchGroup, open_group
from specforge.errors import RunError
from specforge.launch.env import SINGLE, RankFacts


def test_single_is_the_identity():
    group = open_group(SINGLE, torch.device("cpu"), 1.0)
    assert isinstance(group, SingleGroup) and group.is_main and group.world_size == 1
    tensor = torch.tensor([1.0, 2.0])
    for operation in (group.all_reduce_sum, group.all_reduce_max, group.broadcast):
        operation(tensor)
    assert tensor.tolist() == [1.0, 2.0]
    assert group.broadcast_object({"a": 1}) == {"a": 1} and group.all_gather_object(3) == [3]
    group.barrier()
    group.close()


def test_fake_records():
    group = FakeGroup(rank=2, world_size=4)
    assert not group.is_main
    group.all_reduce_sum(torch.zeros(3))
    group.all_reduce_sum(torch.zeros(5))
    group.barrier()
    assert group.all_gather_object("x") == ["x"] * 4
    assert group.calls == [("all_reduce_sum", 3), ("all_reduce_sum", 5), ("barrier", 0), ("all_gather_object", 1)]
    assert group.count("all_reduce_sum") == 2 and group.count("all_reduce_sum", 5) == 1


def test_ranks_that_cannot_meet_say_where_they_tried():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        port = taken.getsockname()[1]
        facts = RankFacts(1, 2, 1, 2, "127.0.0.1", port, "torchrun")
        with pytest.raises(RunError, match=rf"rank 1 of 2 could not meet the others at 127.0.0.1:{port} within 0.02 minutes"):
            TorchGroup(facts, torch.device("cpu"), 0.02)
