"""The contract of the control plane: who works on which prompt, which features are ready, which are done. Metadata only.

A prompt is registered, leased to a producer, published as a reference, delivered to the trainer and acknowledged when the step that
used it is done; what was leased or delivered and not acknowledged comes again after a failure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from specforge.runtime.contracts import PromptTask, SampleRef


class ControlPlane(ABC):
    """Every method checks its arguments with ``assert_no_tensors`` and may be called from several threads."""

    @abstractmethod
    def register(self, tasks: Sequence[PromptTask]) -> None:
        """Prompts that will be wanted, in order; known ones are ignored."""

    @abstractmethod
    def lease(self, worker: str, limit: int) -> list[PromptTask]:
        """At most ``limit`` prompts that nobody works on, in order of registration, now leased to ``worker``."""

    @abstractmethod
    def publish(self, refs: Sequence[SampleRef]) -> None:
        """Features of leased prompts are in the store."""

    @abstractmethod
    def acknowledge(self, sample_ids: Sequence[str], step: int) -> None:
        """The optimizer step ``step`` that used these samples is done; unknown ids are ignored."""

    @abstractmethod
    def fail(self, sample_id: str, reason: str) -> None:
        """The lease of a prompt ended without features; it may be leased again."""

    def close(self) -> None:  # noqa: B027 - most planes hold nothing
        """Leave the control plane."""
