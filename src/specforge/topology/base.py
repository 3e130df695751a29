"""The contract of a topology: where a rank's features come from. The trainer and the strategy never see which one it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from specforge.runtime.contracts import CaptureSpec, PromptTask, SampleRef, TargetIdentity
from specforge.runtime.data_plane.collate import FeatureLayout
from specforge.runtime.data_plane.feature_store import FeatureStore

if TYPE_CHECKING:
    from specforge.data.dataset import TokenizedDataset
    from specforge.distributed.groups import Group
    from specforge.inference.target_engine.base import TargetEngine


class RefSource(ABC):
    """References of one rank's samples. Every rank opens its own and asks for its own samples only.

    Attributes: ``store`` is where the references lead; ``identity`` and ``capture`` are what they must be; ``layout`` gives the
    width and dtype of each feature, also for a rank that has no sample.
    """

    store: FeatureStore
    identity: TargetIdentity
    capture: CaptureSpec
    layout: FeatureLayout

    @abstractmethod
    def announce(self, tasks: Sequence[PromptTask]) -> None:
        """Samples that will be taken soon, in order; a hint that may be ignored."""

    @abstractmethod
    def take(self, tasks: Sequence[PromptTask]) -> list[SampleRef]:
        """References of exactly these samples in this order; blocks until their features are in the store."""

    @abstractmethod
    def acknowledge(self, sample_ids: Sequence[str], step: int) -> None:
        """The step that used these samples is done; their features may go. Repeating it does no harm."""

    def interrupt(self) -> None:  # noqa: B027 - only sources that wait have something to interrupt
        """Make a :meth:`take` that waits in another thread raise there, and every later wait too, until :meth:`restart`."""

    def restart(self) -> None:  # noqa: B027
        """Forget what was announced, or taken and not acknowledged: the loader goes to another step and takes it again."""

    def close(self) -> None:  # noqa: B027
        """Give back what :meth:`Topology.open` took."""


class Topology(ABC):
    """A node of ``conf/topology``. ``needs_engine`` says whether the training processes run the target themselves."""

    needs_engine: bool

    @abstractmethod
    def open(
        self,
        *,
        identity: TargetIdentity,
        hidden_size: int,
        dataset: TokenizedDataset,
        capture: CaptureSpec,
        store: FeatureStore,
        engine_factory: Callable[[], TargetEngine],
        device: torch.device,
        group: Group,
    ) -> RefSource:
        """This rank's source. ``store`` is the configured store, ``engine_factory`` makes the target engine when it is needed.

        ``identity`` and ``hidden_size`` are the target's. Raises :class:`FeatureError` when the features cannot be had.
        """
