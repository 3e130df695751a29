"""Control plane of runs whose producer and trainer are one process: no ledger, no lease that could expire, no channel."""

from __future__ import annotations

from collections.abc import Sequence

from specforge.runtime.contracts import PromptTask, SampleRef, assert_no_tensors
from specforge.runtime.control_plane.base import ControlPlane


class NoOpControlPlane(ControlPlane):
    """Remembers nothing: the caller hands prompts to its own producer, and if the process dies, its work dies with it.

    What it does do is refuse tensors, so that a colocated run fails on what would break a distributed one.
    """

    def register(self, tasks: Sequence[PromptTask]) -> None:
        assert_no_tensors(tasks, "control plane, register")

    def lease(self, worker: str, limit: int) -> list[PromptTask]:
        assert_no_tensors([worker, limit], "control plane, lease")
        return []

    def publish(self, refs: Sequence[SampleRef]) -> None:
        assert_no_tensors(refs, "control plane, publish")

    def acknowledge(self, sample_ids: Sequence[str], step: int) -> None:
        assert_no_tensors([sample_ids, step], "control plane, acknowledge")

    def fail(self, sample_id: str, reason: str) -> None:
        assert_no_tensors([sample_id, reason], "control plane, fail")
