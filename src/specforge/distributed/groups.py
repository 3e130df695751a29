"""Process groups behind one small interface: nobody else calls ``torch.distributed`` for a plain collective.

Model code never sees a group. The trainer, the checkpoint manager and the launcher take a :class:`Group`, so that every one of
them runs in a test with :class:`FakeGroup` and in a single process with :class:`SingleGroup` without a branch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

import torch

from specforge.errors import RunError
from specforge.launch.env import RankFacts


class Group(ABC):
    """The ranks that train one draft together. Every method except the properties is collective: all ranks must call it."""

    rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    @abstractmethod
    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` on every rank by the sum over ranks, in place."""

    @abstractmethod
    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` on every rank by the element-wise maximum over ranks, in place."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` on every rank by rank 0's, in place."""

    @abstractmethod
    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank; pickled, for small plain objects."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's ``value`` in rank order, on every rank; pickled, for small plain objects."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have come here."""

    def close(self) -> None:
        """Leave the group; idempotent."""
        return None


class SingleGroup(Group):
    """One process: every collective is the identity."""

    rank = 0
    world_size = 1

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        return None

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        return None

    def broadcast(self, tensor: torch.Tensor) -> None:
        return None

    def broadcast_object(self, value: Any) -> Any:
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return None


class FakeGroup(SingleGroup):
    """One process that claims any rank and world size and writes down each collective; for tests.

    It behaves as if every other rank contributed zeros to a sum. ``calls`` holds (operation, number of elements).
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.calls: list[tuple[str, int]] = []
        self.closed = False

    def count(self, operation: str, numel: int | None = None) -> int:
        """How often ``operation`` was called (with ``numel`` elements, if given)."""
        return sum(1 for name, size in self.calls if name == operation and numel in (None, size))

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self.calls.append(("all_reduce_sum", tensor.numel()))

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        self.calls.append(("all_reduce_max", tensor.numel()))

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.calls.append(("broadcast", tensor.numel()))

    def broadcast_object(self, value: Any) -> Any:
        self.calls.append(("broadcast_object", 1))
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        self.calls.append(("all_gather_object", 1))
        return [value] * self.world_size

    def barrier(self) -> None:
        self.calls.append(("barrier", 0))

    def close(self) -> None:
        self.closed = True


class TorchGroup(Group):
    """The default group of ``torch.distributed``: gloo for CPU ranks, NCCL for CUDA ranks.

    ``timeout_minutes`` bounds every collective, so that a lost rank ends the run instead of hanging it. Raises :class:`RunError`
    when the ranks cannot meet.
    """

    def __init__(self, facts: RankFacts, device: torch.device, timeout_minutes: float) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.rank = facts.rank
        self.world_size = facts.world_size
        self.device = device
        address = f"{facts.master_address}:{facts.master_port}"
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=f"tcp://{address}",
                rank=facts.rank,
                world_size=facts.world_size,
                timeout=timedelta(minutes=timeout_minutes),
                device_id=device if device.type == "cuda" else None,
            )
        except Exception as error:  # the class differs between back ends; the cause is kept
            raise RunError(
                f"rank {facts.rank} of {facts.world_size} could not meet the others at {address} within {timeout_minutes:g} minutes: "
                f"{error}. See that MASTER_ADDR and MASTER_PORT are reachable from every rank and that all ranks were started."
            ) from error

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self._dist.all_reduce(tensor, op=self._dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        self._dist.all_reduce(tensor, op=self._dist.ReduceOp.MAX)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._dist.broadcast(tensor, src=0)

    def broadcast_object(self, value: Any) -> Any:
        box = [value]
        self._dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        self._dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        # An all-reduce of one element instead of dist.barrier: it needs no guess of the device on NCCL.
        token = torch.zeros(1, device=self.device)
        self.all_reduce_sum(token)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


def open_group(facts: RankFacts, device: torch.device, timeout_minutes: float) -> Group:
    """The group of this process: :class:`SingleGroup` for one rank, else :class:`TorchGroup`."""
    if facts.world_size == 1:
        return SingleGroup()
    return TorchGroup(facts, device, timeout_minutes)
