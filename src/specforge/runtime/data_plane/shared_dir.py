"""Feature store in a folder that several processes share: a file a sample and attempt, complete or not there at all.

    ab/<key>-<attempt>.safetensors        features, their reference and checksums; renamed into place when complete
    ab/<key>-<attempt>.pin-<owner>-<n>    one pin; those of a process that died on this machine do not count
    ab/<key>-<attempt>.failed             why a writer gave this attempt up
    lock                                  held for moments: whoever pins, evicts or renames

``key`` is a digest of the sample id and ``ab`` its beginning. A later attempt replaces the earlier ones, and a writer that comes late
with an older attempt is refused, so a sample that was tried again is never trained from a stale file. Works on any file system with
rename and flock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from specforge.errors import FeatureError, RunError
from specforge.runtime.contracts import CaptureSpec, SampleRef, TargetIdentity
from specforge.runtime.data_plane.feature_store import FeatureStore, StoreFullError, check_stored, check_tensors, specs_of
from specforge.runtime.data_plane.local import parse_bytes
from specforge.runtime.data_plane.process_owner import is_dead, owner
from specforge.runtime.data_plane.sample_file import read_reference, read_tensors, write_sample

_SUFFIX, _PIN, _FAILED, _PARTIAL = ".safetensors", ".pin-", ".failed", ".partial-"


class SharedDirStore(FeatureStore):
    """Values in ``conf/feature_store/shared_dir.yaml``. Released samples stay until their room is needed, oldest first.

    Raises :class:`RunError` when the folder cannot be made or the disk is full.
    """

    def __init__(self, *, path: str, max_bytes: int | str, checksums: bool) -> None:
        self.folder = Path(path).expanduser()
        self.max_bytes = parse_bytes(max_bytes)
        self.checksums = checksums
        self.evictions = 0
        self._threads = threading.RLock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "lock").touch()
        except OSError as error:
            raise RunError(f"feature_store.path={path}: the folder cannot be written ({error.strerror}). Name another one") from error
        with self._locked():
            self._remove_partials()

    def put(
        self, sample_id: str, tensors: Mapping[str, Tensor], target: TargetIdentity, capture: CaptureSpec, attempt: int = 0
    ) -> SampleRef:
        num_tokens = check_tensors(sample_id, tensors, capture)
        host = {name: t.detach().cpu() for name, t in tensors.items()}
        num_bytes = sum(t.numel() * t.element_size() for t in host.values())
        path = self._path(sample_id, attempt)
        specs = specs_of(host, self.checksums)
        ref = SampleRef(sample_id, f"shared_dir:{path.name}", specs, target, capture, num_tokens, num_bytes, attempt)
        with self._locked():
            self._make_room(sample_id, num_bytes)
            path.parent.mkdir(exist_ok=True)
        partial = self.folder / f"{_PARTIAL}{owner()}-{uuid.uuid4().hex[:8]}"
        write_sample(partial, ref, host)
        with self._locked():
            newer = [a for a in self._attempts(sample_id) if a > attempt]
            if newer:
                partial.unlink(missing_ok=True)
                raise FeatureError(f"sample {sample_id}: attempt {attempt} comes late, attempt {max(newer)} is in {self.folder} already")
            self._new_pin(path)
            os.replace(partial, path)
            for old in self._attempts(sample_id):
                if old < attempt:
                    self._remove(self._path(sample_id, old))
        return ref

    def get(self, ref: SampleRef) -> dict[str, Tensor]:
        tensors = read_tensors(self._path(ref.sample_id, ref.attempt))
        check_stored(ref, tensors, self.checksums)
        return tensors

    def find(self, sample_id: str) -> SampleRef | None:
        attempts = self._attempts(sample_id)
        return self.find_attempt(sample_id, max(attempts)) if attempts else None

    def find_attempt(self, sample_id: str, attempt: int) -> SampleRef | None:
        """The reference of exactly this attempt, or None; a cheap call to wait with."""
        path = self._path(sample_id, attempt)
        ref = read_reference(path) if path.is_file() else None
        if ref is not None and ref.sample_id != sample_id:
            raise FeatureError(f"{path} holds sample {ref.sample_id}, not {sample_id}")
        return ref

    def pin(self, ref: SampleRef) -> bool:
        path = self._path(ref.sample_id, ref.attempt)
        with self._locked():
            if not path.is_file():
                return False
            self._new_pin(path)
            os.utime(path)
            return True

    def release(self, ref: SampleRef) -> None:
        path = self._path(ref.sample_id, ref.attempt)
        with self._locked():
            pins = self._pins(path)
            # Its own pin first; a consumer that never pinned releases the producer's.
            own = [pin for pin in pins if f"{_PIN}{owner()}-" in pin.name]
            for pin in (own or pins)[:1]:
                pin.unlink(missing_ok=True)

    def discard(self, ref: SampleRef) -> None:
        """Remove a sample now, whoever pinned it; views that were handed out stay valid."""
        with self._locked():
            self._remove(self._path(ref.sample_id, ref.attempt))

    def fail(self, sample_id: str, attempt: int, reason: str) -> None:
        """Tell whoever waits for this attempt that it will not come."""
        path = self._path(sample_id, attempt).with_suffix(_FAILED)
        partial = self.folder / f"{_PARTIAL}{owner()}-{uuid.uuid4().hex[:8]}"
        partial.write_text(json.dumps({"reason": reason}), encoding="utf-8")
        path.parent.mkdir(exist_ok=True)
        os.replace(partial, path)

    def failure(self, sample_id: str, attempt: int) -> str | None:
        """Why this attempt will not come, or None; reading it removes it."""
        path = self._path(sample_id, attempt).with_suffix(_FAILED)
        try:
            reason = json.loads(path.read_text(encoding="utf-8"))["reason"]
        except FileNotFoundError:
            return None
        path.unlink(missing_ok=True)
        return str(reason)

    @property
    def bytes_used(self) -> int:
        return sum(size for _, _, size in self._files())

    def stats(self) -> dict[str, int]:
        """Samples, bytes and this process's evictions, for the tracker."""
        files = self._files()
        return {"samples": len(files), "bytes": sum(size for _, _, size in files), "evictions": self.evictions}

    def close(self) -> None:
        """Take this process's pins away; the files stay for the others."""
        with self._locked():
            for pin in self.folder.glob(f"*/*{_PIN}{owner()}-*"):
                pin.unlink(missing_ok=True)

    # -- files; everything below that changes something is called with the lock held ---------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # flock keeps processes apart and ends with its holder; threads of one process need a lock of their own.
        with self._threads, (self.folder / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, sample_id: str, attempt: int) -> Path:
        key = hashlib.blake2b(sample_id.encode(), digest_size=16).hexdigest()
        return self.folder / key[:2] / f"{key}-{attempt}{_SUFFIX}"

    def _attempts(self, sample_id: str) -> list[int]:
        first = self._path(sample_id, 0)
        return [int(path.stem.rpartition("-")[2]) for path in first.parent.glob(f"{first.stem[:-1]}*{_SUFFIX}")]

    def _files(self) -> list[tuple[float, Path, int]]:
        """Modification time, path and size of every complete sample, oldest first."""
        found = []
        for path in self.folder.glob(f"*/*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process removes while we look
                status = path.stat()
                found.append((status.st_mtime, path, status.st_size))
        return sorted(found)

    def _pins(self, path: Path) -> list[Path]:
        """Pins that count; those of dead processes are removed."""
        alive = []
        for pin in sorted(path.parent.glob(f"{path.stem}{_PIN}*")):
            if is_dead(pin.name.partition(_PIN)[2].rpartition("-")[0]):
                pin.unlink(missing_ok=True)
            else:
                alive.append(pin)
        return alive

    def _new_pin(self, path: Path) -> None:
        path.with_name(f"{path.stem}{_PIN}{owner()}-{uuid.uuid4().hex[:8]}").touch()

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        for pin in path.parent.glob(f"{path.stem}{_PIN}*"):
            pin.unlink(missing_ok=True)

    def _make_room(self, sample_id: str, num_bytes: int) -> None:
        files = self._files()
        used = sum(size for _, _, size in files)
        if used + num_bytes <= self.max_bytes:
            return
        self._remove_partials()
        free = [(path, size) for _, path, size in files if not self._pins(path)]
        if used - sum(size for _, size in free) + num_bytes > self.max_bytes:  # nothing is evicted in vain
            raise StoreFullError(
                f"feature_store.max_bytes={self.max_bytes}: sample {sample_id} needs {num_bytes} bytes and {used} are used in "
                f"{self.folder}, "
                "too many of them by samples that are still needed. Raise feature_store.max_bytes (for example 16GiB)"
            )
        for path, size in free:
            if used + num_bytes <= self.max_bytes:
                return
            self._remove(path)
            self.evictions += 1
            used -= size

    def _remove_partials(self) -> None:
        for path in self.folder.glob(f"{_PARTIAL}*"):
            if is_dead(path.name.removeprefix(_PARTIAL).rpartition("-")[0]):
                path.unlink(missing_ok=True)

