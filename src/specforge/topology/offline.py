"""Offline: features were captured to files before; training only reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from specforge.errors import FeatureError
from specforge.runtime.contracts import INPUT_IDS, LOSS_MASK, CaptureSpec, PromptTask, SampleRef, TargetIdentity
from specforge.runtime.data_plane.collate import FeatureLayout
from specforge.runtime.data_plane.feature_files import require_feature_folder
from specforge.runtime.data_plane.feature_store import FeatureStore
from specforge.runtime.data_plane.file_store import FeatureFileStore
from specforge.topology.base import RefSource, Topology

if TYPE_CHECKING:
    from specforge.data.dataset import TokenizedDataset
    from specforge.distributed.groups import Group
    from specforge.inference.target_engine.base import TargetEngine


class OfflineTopology(Topology):
    """Values in ``conf/topology/offline.yaml``; the configured feature store is not used."""

    needs_engine = False

    def __init__(self, *, features_dir: str, verify_checksums: bool) -> None:
        self.features_dir = features_dir
        self.verify_checksums = verify_checksums

    def check_paths(self) -> None:
        """Raise :class:`FeatureError` now for a folder that holds no features, before anything is loaded."""
        require_feature_folder(Path(self.features_dir).expanduser())

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
        folder = Path(self.features_dir).expanduser()
        files = FeatureFileStore(folder, identity, capture, checksums=self.verify_checksums)
        missing = [i for i in range(len(dataset)) if not files.contains(dataset.sample_id(i))]
        if missing:
            raise FeatureError(
                f"topology.features_dir={self.features_dir} lacks {len(missing)} of {len(dataset)} samples of the dataset (first: "
                f"{dataset.sample_id(missing[0])}). Capture them with the same data and target: python -m specforge capture output={folder}"
            )
        return OfflineSource(files, identity, capture, FeatureLayout.of(capture, hidden_size))


class OfflineSource(RefSource):
    """References straight from the manifests; tokens and loss mask must be those of the dataset."""

    store: FeatureFileStore

    def __init__(self, store: FeatureFileStore, identity: TargetIdentity, capture: CaptureSpec, layout: FeatureLayout) -> None:
        self.store = store
        self.identity = identity
        self.capture = capture
        self.layout = layout

    def announce(self, tasks: Sequence[PromptTask]) -> None:
        """Files need no warning."""

    def take(self, tasks: Sequence[PromptTask]) -> list[SampleRef]:
        return [self._checked(task) for task in tasks]

    def _checked(self, task: PromptTask) -> SampleRef:
        ref = self.store.find(task.sample_id)
        if ref is None:
            raise FeatureError(f"{self.store.folder}: sample {task.sample_id} is not there; capture it first")
        stored = {spec.name: spec.checksum for spec in ref.specs}
        for name, values, dtype in ((INPUT_IDS, task.input_ids, np.int64), (LOSS_MASK, task.loss_mask, np.bool_)):
            actual = hashlib.blake2b(np.asarray(values, dtype=dtype).tobytes(), digest_size=16).hexdigest()
            if stored.get(name) not in (None, actual):
                raise FeatureError(
                    f"{self.store.folder}: sample {task.sample_id} was captured with another {name} (checksum {stored[name]}, "
                    f"the dataset has {actual}). Capture the features again into a new folder"
                )
        return ref

    def acknowledge(self, sample_ids: Sequence[str], step: int) -> None:
        """Files stay."""

    def close(self) -> None:
        self.store.close()
