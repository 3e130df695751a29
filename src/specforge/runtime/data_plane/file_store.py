"""Feature store over a folder of captured feature files: read only, memory-mapped, each sample verified once."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from specforge.errors import FeatureError
from specforge.runtime.contracts import CaptureSpec, SampleRef, TargetIdentity
from specforge.runtime.data_plane.feature_files import open_shard, read_manifests, split_uri
from specforge.runtime.data_plane.feature_store import FeatureStore, check_stored


class FeatureFileStore(FeatureStore):
    """``get`` gives views of the mapped shard. ``checksums`` verifies the bytes of a sample when it is read for the first time.

    Raises :class:`FeatureError` when the folder is not of ``target`` and ``capture``, or a file is damaged.
    """

    def __init__(self, folder: Path, target: TargetIdentity, capture: CaptureSpec, *, checksums: bool) -> None:
        self.folder = folder
        self.checksums = checksums
        self._refs = read_manifests(folder, target, capture)
        self._shards: dict[str, dict[str, Tensor]] = {}
        self._verified: set[str] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._refs)

    def get(self, ref: SampleRef) -> dict[str, Tensor]:
        shard, row = split_uri(ref.store_uri)
        with self._lock:
            if shard not in self._shards:
                self._shards[shard] = open_shard(self.folder / shard)
            whole = self._shards[shard]
        tensors = {}
        for spec in ref.specs:
            if spec.name not in whole or row + spec.shape[0] > whole[spec.name].shape[0]:
                raise FeatureError(f"{self.folder / shard}: rows {row} to {row + spec.shape[0]} of {spec.name} are missing; capture again")
            tensors[spec.name] = whole[spec.name].narrow(0, row, spec.shape[0])
        try:
            check_stored(ref, tensors, self.checksums and ref.sample_id not in self._verified)
        except FeatureError as error:
            raise FeatureError(f"{self.folder}: {error}") from None
        self._verified.add(ref.sample_id)
        return tensors

    def find(self, sample_id: str) -> SampleRef | None:
        return self._refs.get(sample_id)

    def put(
        self, sample_id: str, tensors: Mapping[str, Tensor], target: TargetIdentity, capture: CaptureSpec, attempt: int = 0
    ) -> SampleRef:
        raise FeatureError(f"{self.folder}: captured feature files are read only here; `python -m specforge capture` writes them")

    def pin(self, ref: SampleRef) -> bool:
        return ref.sample_id in self._refs

    def release(self, ref: SampleRef) -> None:
        """Nothing is evicted, so nothing is released."""

    @property
    def bytes_used(self) -> int:
        return sum(ref.num_bytes for ref in self._refs.values())

    def close(self) -> None:
        self._shards.clear()
