"""Colocated: each training process runs the target itself and captures what its store does not hold."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from specforge.errors import RunError
from specforge.inference.capture import fill_up
from specforge.inference.rollout_worker import RolloutWorker
from specforge.runtime.contracts import CaptureSpec, PromptTask, SampleRef, TargetIdentity
from specforge.runtime.control_plane.noop import NoOpControlPlane
from specforge.runtime.data_plane.collate import FeatureLayout
from specforge.runtime.data_plane.feature_store import FeatureStore, StoreFullError
from specforge.topology.base import RefSource, Topology

if TYPE_CHECKING:
    from specforge.data.dataset import TokenizedDataset
    from specforge.distributed.groups import Group
    from specforge.inference.target_engine.base import TargetEngine

_CUDA_LOOKAHEAD_TOKENS = 16384


class ColocatedTopology(Topology):
    """Values in ``conf/topology/colocated.yaml``."""

    needs_engine = True

    def __init__(self, *, lookahead_tokens: Annotated[int, Field(ge=0)] | None) -> None:
        self.lookahead_tokens = lookahead_tokens

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
        lookahead = self.lookahead_tokens
        if lookahead is None:
            lookahead = _CUDA_LOOKAHEAD_TOKENS if device.type == "cuda" else 0
        layout = FeatureLayout.of(capture, hidden_size)
        return ColocatedSource(engine_factory(), store, identity, capture, layout, lookahead)


class ColocatedSource(RefSource):
    """Takes from the store what is there, captures the rest together with announced samples up to ``lookahead`` tokens.

    A full store makes :meth:`take` wait for acknowledgements of earlier steps: backpressure by bytes. The engine is not closed with
    the source, since training and evaluation may share it: who made it closes it.
    """

    def __init__(
        self,
        engine: TargetEngine,
        store: FeatureStore,
        identity: TargetIdentity,
        capture: CaptureSpec,
        layout: FeatureLayout,
        lookahead: int,
    ) -> None:
        self.store = store
        self.identity = identity
        self.capture = capture
        self.layout = layout
        self.lookahead = lookahead
        self.control = NoOpControlPlane()
        self.worker = RolloutWorker(engine, store, self.control, capture, self._wait_for_room)
        self._announced: OrderedDict[str, PromptTask] = OrderedDict()
        # Samples of takes that are not acknowledged: one entry a take, since a sample may be wanted by two steps at once.
        self._held: dict[str, deque[SampleRef]] = {}
        self._changed = threading.Condition()
        self._interrupted = False

    def announce(self, tasks: Sequence[PromptTask]) -> None:
        for task in tasks:
            self._announced[task.sample_id] = task

    def take(self, tasks: Sequence[PromptTask]) -> list[SampleRef]:
        refs: dict[str, SampleRef] = {}
        for task in tasks:
            self._announced.pop(task.sample_id, None)
            ref = self.store.find(task.sample_id)
            if ref is not None and self.store.pin(ref):
                refs[task.sample_id] = ref
        missing = [task for task in tasks if task.sample_id not in refs]
        self.control.register(missing)
        try:
            captured = self.worker.run(missing, self._ahead(missing)) if missing else []
        except BaseException:
            for ref in refs.values():
                self.store.release(ref)
            raise
        refs.update((ref.sample_id, ref) for ref in captured)
        taken = [refs[task.sample_id] for task in tasks]
        with self._changed:
            for ref in taken:
                self._held.setdefault(ref.sample_id, deque()).append(ref)
        return taken

    def acknowledge(self, sample_ids: Sequence[str], step: int) -> None:
        self.control.acknowledge(sample_ids, step)
        with self._changed:
            for sample_id in sample_ids:
                held = self._held.get(sample_id)
                if held:
                    self.store.release(held.popleft())
                    if not held:
                        del self._held[sample_id]
            self._changed.notify_all()

    def interrupt(self) -> None:
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def restart(self) -> None:
        with self._changed:
            for held in self._held.values():
                for ref in held:
                    self.store.release(ref)
            self._held.clear()
            self._announced.clear()
            self._interrupted = False

    def _ahead(self, missing: Sequence[PromptTask]) -> list[PromptTask]:
        if not missing or not self.lookahead:
            return []
        coming = [task for task in self._announced.values() if not self.store.contains(task.sample_id)]
        tokens = sum(len(task.input_ids) for task in missing)
        return coming[: fill_up(tokens, [len(task.input_ids) for task in coming], self.lookahead)]

    def _wait_for_room(self, full: StoreFullError) -> None:
        with self._changed:
            if not self._held:
                raise RunError(f"the features of one step do not fit into the store. {full}") from full
            before = sum(map(len, self._held.values()))
            # Whoever uses the features acknowledges them when it asks for the step after; then there is room.
            self._changed.wait_for(lambda: self._interrupted or sum(map(len, self._held.values())) < before)
            if self._interrupted:
                raise RunError("the wait for room in the feature store was interrupted") from full

    def close(self) -> None:
        self.interrupt()
        self.restart()
