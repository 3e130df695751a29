"""Feature store in this process's memory: views handed out, a cap in bytes, least recently used samples evicted first."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from specforge.errors import ConfigError, FeatureError
from specforge.runtime.contracts import CaptureSpec, SampleRef, TargetIdentity
from specforge.runtime.data_plane.feature_store import FeatureStore, StoreFullError, check_stored, check_tensors, specs_of

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass
class _Entry:
    ref: SampleRef
    tensors: dict[str, Tensor]
    pins: int = 1


class LocalFeatureStore(FeatureStore):
    """Values in ``conf/feature_store/local.yaml``. Captured features stay across epochs as long as the cap allows."""

    def __init__(self, *, max_bytes: int | str, checksums: bool, placement: Literal["host", "as_captured"]) -> None:
        self.max_bytes = parse_bytes(max_bytes)
        self.checksums = checksums
        self.placement = placement
        self.evictions = 0
        self.hits = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()

    def put(
        self, sample_id: str, tensors: Mapping[str, Tensor], target: TargetIdentity, capture: CaptureSpec, attempt: int = 0
    ) -> SampleRef:
        num_tokens = check_tensors(sample_id, tensors, capture)
        kept = {name: t.detach().cpu() if self.placement == "host" else t.detach() for name, t in tensors.items()}
        num_bytes = sum(t.numel() * t.element_size() for t in kept.values())
        ref = SampleRef(sample_id, f"local:{sample_id}", specs_of(kept, self.checksums), target, capture, num_tokens, num_bytes, attempt)
        with self._lock:
            old = self._entries.get(sample_id)
            pins = old.pins if old else 0
            self._make_room(sample_id, num_bytes - (old.ref.num_bytes if old and pins else 0))
            if (old := self._entries.pop(sample_id, None)) is not None:
                self._bytes -= old.ref.num_bytes
            # A sample that is captured again keeps the pins of those who still wait for its release.
            self._entries[sample_id] = _Entry(ref, kept, 1 + pins)
            self._bytes += num_bytes
        return ref

    def get(self, ref: SampleRef) -> dict[str, Tensor]:
        with self._lock:
            entry = self._entries.get(ref.sample_id)
            if entry is None:
                raise FeatureError(f"sample {ref.sample_id}: its features are not in the local store (evicted or never captured)")
            self._entries.move_to_end(ref.sample_id)
            self.hits += 1
        check_stored(ref, entry.tensors, self.checksums)
        return dict(entry.tensors)

    def find(self, sample_id: str) -> SampleRef | None:
        with self._lock:
            entry = self._entries.get(sample_id)
            return entry.ref if entry else None

    def pin(self, ref: SampleRef) -> bool:
        with self._lock:
            entry = self._entries.get(ref.sample_id)
            if entry is None:
                return False
            entry.pins += 1
            self._entries.move_to_end(ref.sample_id)
            return True

    def release(self, ref: SampleRef) -> None:
        with self._lock:
            entry = self._entries.get(ref.sample_id)
            if entry is not None:
                entry.pins = max(0, entry.pins - 1)

    @property
    def bytes_used(self) -> int:
        return self._bytes

    @property
    def pinned_bytes(self) -> int:
        with self._lock:
            return sum(e.ref.num_bytes for e in self._entries.values() if e.pins)

    def stats(self) -> dict[str, int]:
        """Samples, bytes, evictions and reads so far, for the tracker."""
        return {"samples": len(self._entries), "bytes": self._bytes, "evictions": self.evictions, "reads": self.hits}

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _make_room(self, sample_id: str, num_bytes: int) -> None:
        if self._bytes + num_bytes <= self.max_bytes:
            return
        pinned = self.pinned_bytes
        if pinned + num_bytes > self.max_bytes:  # nothing is evicted in vain
            raise StoreFullError(
                f"feature_store.max_bytes={self.max_bytes}: sample {sample_id} needs {num_bytes} bytes and {pinned} are held by samples of "
                "steps that are not done. Raise feature_store.max_bytes (for example 16GiB), lower trainer.prefetch_steps or the batch size"
            )
        for candidate in [key for key, entry in self._entries.items() if entry.pins == 0]:
            self._bytes -= self._entries.pop(candidate).ref.num_bytes
            self.evictions += 1
            if self._bytes + num_bytes <= self.max_bytes:
                return


def parse_bytes(value: int | str) -> int:
    """``8GiB``, ``500MB`` or a number of bytes; raises :class:`ConfigError` for anything else or nothing above 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None or float(match.group(1)) * unit < 1:
        raise ConfigError(f"feature_store.max_bytes={value}: give a number of bytes or one with a unit, for example 8GiB or 500MB")
    return int(float(match.group(1)) * unit)
