"""A producer: prompts through the target engine into the feature store, references to the control plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specforge.inference.target_engine.base import TargetEngine
from specforge.runtime.contracts import CapturedFeatures, CaptureSpec, PromptTask, SampleRef
from specforge.runtime.control_plane.base import ControlPlane
from specforge.runtime.data_plane.feature_store import FeatureStore, StoreFullError

WhenFull = Callable[[StoreFullError], None]


class RolloutWorker:
    """Works for one store. ``when_full`` is called when the store has no room and returns when it may have some, or raises."""

    def __init__(self, engine: TargetEngine, store: FeatureStore, control: ControlPlane, capture: CaptureSpec, when_full: WhenFull) -> None:
        self.engine = engine
        self.store = store
        self.control = control
        self.capture = capture
        self.when_full = when_full

    def run(self, tasks: Sequence[PromptTask], optional: Sequence[PromptTask] = ()) -> list[SampleRef]:
        """Capture ``tasks`` and, in the same forwards, ``optional``; store and publish them. The references of ``tasks``, pinned.

        Optional samples stay in the store unpinned, and are dropped when they find no room. If anything fails, every prompt is
        reported as failed, nothing stays pinned and the error goes on.
        """
        refs: list[SampleRef] = []
        try:
            captured = self.engine.capture([*tasks, *optional], self.capture)
            for features in captured[: len(tasks)]:
                refs.append(self._put(features))
            extra = self._put_optional(captured[len(tasks) :])
            self.control.publish([*refs, *extra])
        except BaseException as error:
            for ref in refs:
                self.store.release(ref)
            for task in tasks:
                self.control.fail(task.sample_id, type(error).__name__)
            raise
        return refs

    def _put(self, features: CapturedFeatures) -> SampleRef:
        while True:
            try:
                return self.store.put(features.sample_id, features.tensors, self.engine.identity, self.capture)
            except StoreFullError as full:
                self.when_full(full)

    def _put_optional(self, captured: Sequence[CapturedFeatures]) -> list[SampleRef]:
        refs = []
        for features in captured:
            try:
                ref = self.store.put(features.sample_id, features.tensors, self.engine.identity, self.capture)
            except StoreFullError:
                break
            self.store.release(ref)
            refs.append(ref)
        return refs
