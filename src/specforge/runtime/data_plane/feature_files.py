"""Captured features on disk: safetensors shards of many unpadded samples, one manifest a shard, one header a folder.

    header.json                       format version, target identity, capture spec
    shard-r0000-000000.safetensors    each feature of all samples of the shard, concatenated along the tokens
    shard-r0000-000000.jsonl          one sample a line: id, first row, rows, specs with checksums

A shard counts when its manifest is there, and the manifest is renamed into place last; so a writer that was killed leaves nothing
that a reader sees. One concatenated tensor a feature keeps the file's own header small and reads as memory-mapped views. ``r0000`` is
the writer's rank: ranks never touch each other's files, and any number of ranks may go on with what others began.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specforge.errors import FeatureError, RunError
from specforge.runtime.contracts import (
    FEATURE_FORMAT_VERSION,
    CapturedFeatures,
    CaptureSpec,
    FeatureSpec,
    SampleRef,
    TargetIdentity,
    capture_spec_from_json,
    to_json,
)
from specforge.runtime.data_plane.feature_store import check_ref, check_tensors, specs_of

HEADER = "header.json"


class FeatureFileWriter:
    """Adds samples to a feature folder; a context manager whose normal exit writes the last, smaller shard.

    Opening an existing folder goes on with it: :attr:`finished` names the samples that need no capture. Raises
    :class:`FeatureError` when the folder holds features of another target or capture, :class:`RunError` when the disk is full.
    """

    def __init__(self, folder: Path, target: TargetIdentity, capture: CaptureSpec, *, rank: int = 0, shard_bytes: int = 1 << 28) -> None:
        self.folder = folder
        self.target = target
        self.capture = capture
        self.rank = rank
        self.shard_bytes = shard_bytes
        self._pending: list[CapturedFeatures] = []
        self._pending_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(folder, rank)
        if (folder / HEADER).is_file():
            check_header(folder, target, capture)
        else:
            self._guarded(lambda: _write_atomic(folder / HEADER, json.dumps(_header(target, capture), indent=1).encode()))
        self.finished = {line["sample_id"] for manifest in folder.glob("shard-*.jsonl") for line in _manifest_lines(manifest)}

    def add(self, features: CapturedFeatures) -> None:
        """Queue one sample; a full shard is written at once. A sample that is already there is ignored."""
        if features.sample_id in self.finished:
            return
        check_tensors(features.sample_id, features.tensors, self.capture)
        host = {name: t.detach().cpu() for name, t in features.tensors.items()}
        self._pending.append(CapturedFeatures(features.sample_id, host))
        self._pending_bytes += features.num_bytes
        self.finished.add(features.sample_id)
        if self._pending_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is queued as one shard."""
        if self._pending:
            self._guarded(self._write_shard)
            self._pending, self._pending_bytes = [], 0

    def __enter__(self) -> FeatureFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After Ctrl-C or an error of the engine the queued samples are good, so they are kept; a full disk would fail again.
        if kind is None or not issubclass(kind, RunError):
            self.flush()

    def _write_shard(self) -> None:
        from safetensors.torch import save_file

        number = 1 + max((int(p.stem.rsplit("-", 1)[1]) for p in self.folder.glob(f"shard-r{self.rank:04d}-*.jsonl")), default=-1)
        stem = f"shard-r{self.rank:04d}-{number:06d}"
        lines, row = [], 0
        for sample in self._pending:
            specs = [to_json(spec) for spec in specs_of(sample.tensors, checksums=True)]
            num_tokens = specs[0]["shape"][0]
            lines.append(
                json.dumps(
                    {"sample_id": sample.sample_id, "row": row, "num_tokens": num_tokens, "num_bytes": sample.num_bytes, "specs": specs}
                )
            )
            row += num_tokens
        joined = {name: torch.cat([s.tensors[name] for s in self._pending]).contiguous() for name in self._pending[0].tensors}
        temporary = self.folder / f".partial-r{self.rank:04d}-{uuid.uuid4().hex[:8]}"
        save_file(joined, temporary, metadata={"format_version": str(FEATURE_FORMAT_VERSION)})
        temporary.chmod(0o644)  # safetensors makes files that only their owner reads; features are shared on clusters
        _sync(temporary)
        os.replace(temporary, self.folder / f"{stem}.safetensors")
        _write_atomic(self.folder / f"{stem}.jsonl", "".join(line + "\n" for line in lines).encode(), self.rank)

    def _guarded(self, write: Any) -> None:
        try:
            write()
        except Exception as error:
            _remove_unfinished(self.folder, self.rank)
            if (
                getattr(error, "errno", None) != errno.ENOSPC
                and "os error 28" not in str(error).lower()
                and "no space left" not in str(error).lower()
            ):
                raise
            kept = sum(1 for manifest in self.folder.glob("shard-*.jsonl") for _ in _manifest_lines(manifest))
            raise RunError(
                f"disk full while writing features to {self.folder}: {kept} samples are complete and kept, nothing half-written is left. "
                "Free some space, or move the folder, and start the same command again: it goes on after them"
            ) from error


def read_manifests(folder: Path, target: TargetIdentity, capture: CaptureSpec) -> dict[str, SampleRef]:
    """All complete samples of a feature folder by id.

    Raises :class:`FeatureError` when the folder is none, is of another format version, target or capture, or a shard is missing.
    """
    check_header(folder, target, capture)
    refs = {}
    for manifest in sorted(folder.glob("shard-*.jsonl")):
        shard = manifest.with_suffix(".safetensors").name
        if not (folder / shard).is_file():
            raise FeatureError(f"{folder}: {manifest.name} is there but {shard} is missing; copy the whole folder or capture again")
        for line in _manifest_lines(manifest):
            specs = tuple(FeatureSpec(s["name"], tuple(s["shape"]), s["dtype"], s["checksum"]) for s in line["specs"])
            # Relative to the folder, so that it can be moved.
            uri = f"file:{shard}#{line['row']}"
            refs[line["sample_id"]] = SampleRef(line["sample_id"], uri, specs, target, capture, line["num_tokens"], line["num_bytes"])
    return refs


def require_feature_folder(folder: Path) -> Path:
    """The header's path; :class:`FeatureError` when ``folder`` is no feature folder."""
    path = folder / HEADER
    if not path.is_file():
        raise FeatureError(
            f"{folder} holds no {HEADER}, so it is not a feature folder; write one with: python -m specforge capture output={folder}"
        )
    return path


def check_header(folder: Path, target: TargetIdentity, capture: CaptureSpec) -> None:
    """Refuse a folder that is no feature folder, or whose format version, target or capture is not this run's."""
    path = require_feature_folder(folder)
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        version = header["format_version"]
        if version == FEATURE_FORMAT_VERSION:
            stored = TargetIdentity(**header["target"]), capture_spec_from_json(header["capture"])
    except (ValueError, KeyError, TypeError) as error:
        raise FeatureError(f"{path} is damaged ({error}); capture again into another folder") from error
    if version != FEATURE_FORMAT_VERSION:
        raise FeatureError(f"{path}: feature format version {version}, this release reads {FEATURE_FORMAT_VERSION}; capture again")
    check_ref(SampleRef("", "", (), stored[0], stored[1], 0, 0), target, capture, f"the features in {folder}")


def _header(target: TargetIdentity, capture: CaptureSpec) -> dict[str, Any]:
    return {"format_version": FEATURE_FORMAT_VERSION, "target": to_json(target), "capture": to_json(capture)}


def _manifest_lines(manifest: Path) -> list[Mapping[str, Any]]:
    try:
        return [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise FeatureError(f"{manifest} is damaged ({error}); remove it and its shard, then capture again") from error


def _remove_unfinished(folder: Path, rank: int) -> None:
    """Remove this rank's temporary files and shards without a manifest: what a killed writer leaves."""
    for path in folder.glob(f".partial-r{rank:04d}-*"):
        path.unlink(missing_ok=True)
    for shard in folder.glob(f"shard-r{rank:04d}-*.safetensors"):
        if not shard.with_suffix(".jsonl").is_file():
            shard.unlink(missing_ok=True)


def _write_atomic(path: Path, content: bytes, rank: int = 0) -> None:
    temporary = path.parent / f".partial-r{rank:04d}-{uuid.uuid4().hex[:8]}"
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def split_uri(uri: str) -> tuple[str, int]:
    """``file:<shard>#<first row>`` → shard name and row."""
    shard, _, row = uri.removeprefix("file:").rpartition("#")
    return shard, int(row)


def open_shard(path: Path) -> dict[str, Tensor]:
    """All tensors of a shard as memory-mapped views. Raises :class:`FeatureError` naming a missing or damaged file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise FeatureError(f"{path} is damaged or cut short ({error}); remove it and its .jsonl, then capture again") from error
