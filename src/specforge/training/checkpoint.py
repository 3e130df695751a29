"""Checkpoints: written so that a crash, a full disk or a kill at any moment leaves the previous one whole.

``run_dir/checkpoints/step_0000123/`` holds ``model.safetensors`` (exactly ``state_dict()``), ``training.pt`` (masters, moments, generators,
position), ``meta.json`` (what it belongs to, digests, metrics) and ``_SUCCESS``. Files are written in a temporary folder, synced, the
folder renamed, then the marker is made: a folder without the marker does not count and is swept away at the next start.
``latest`` and ``best`` are text files with a folder's name; they are for people and scripts, the manager itself looks at the folders.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specforge.errors import CheckpointError, RunError
from specforge.training.identity import DraftIdentity

CHECKPOINT_FORMAT_VERSION = 1
BEST_METRIC = "walk_accept_length"
WEIGHTS, TRAINING, META, SUCCESS = "model.safetensors", "training.pt", "meta.json", "_SUCCESS"
STEP_FOLDER = re.compile(r"step_(\d{7,})")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class CheckpointMeta:
    """The content of ``meta.json``. ``files`` maps a file name to its size in bytes and blake2b digest."""

    identity: DraftIdentity
    step: int
    epoch: int
    metrics: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format_version: int = CHECKPOINT_FORMAT_VERSION

    @property
    def weights_digest(self) -> str:
        """Digest of the draft's weights: provenance for exports and evaluations."""
        return str(self.files[WEIGHTS]["blake2b"])

    def score(self) -> float:
        """By what the best checkpoint is chosen; −inf when it was not evaluated."""
        value = self.metrics.get(BEST_METRIC)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else -math.inf


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk, opened by :func:`open_checkpoint`."""

    path: Path
    meta: CheckpointMeta

    def require(self, identity: DraftIdentity) -> None:
        """Raise :class:`CheckpointError` naming both sides when the weights belong to another draft, strategy, target or vocabulary."""
        differences = identity.differences(self.meta.identity)
        if differences:
            raise CheckpointError(
                f"checkpoint {self.path} is of another draft:\n  " + "\n  ".join(differences) + "\nUse the configuration it was "
                "trained with (run=<its run folder>), or start a new run folder."
            )

    def weights(self, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """The draft's ``state_dict``, after its digest was compared."""
        path = self._verified(WEIGHTS)
        try:
            return load_file(path, device=str(device))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. {_RECOVER}") from error

    def training(self) -> dict[str, Any]:
        """The content of ``training.pt``, on the CPU."""
        path = self._verified(TRAINING)
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises half a dozen classes for a damaged file
            raise CheckpointError(f"{path} cannot be read: {error}. {_RECOVER}") from error

    def _verified(self, name: str) -> Path:
        path = self.path / name
        expected = self.meta.files[name]
        size = path.stat().st_size if path.exists() else None
        if size != expected["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes, {expected['bytes']} were written: the file is truncated. {_RECOVER}")
        if _digest(path) != expected["blake2b"]:
            raise CheckpointError(f"{path} is damaged: its content is not what was written. {_RECOVER}")
        return path


_RECOVER = "Delete this checkpoint folder to use the one before, or copy the file again."


def open_checkpoint(path: Path) -> Checkpoint:
    """Read ``meta.json`` of a complete checkpoint folder; :class:`CheckpointError` says what is wrong with it."""
    if not (path / META).exists():
        raise CheckpointError(f"{path} is not a checkpoint: it has no {META}.")
    if not (path / SUCCESS).exists():
        raise CheckpointError(f"checkpoint {path} is incomplete (no {SUCCESS}): the run ended while it was written. Use an earlier one.")
    try:
        data = json.loads((path / META).read_text())
        version = data["format_version"]
        if version != CHECKPOINT_FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {path} has format version {version}, this SpecForge reads {CHECKPOINT_FORMAT_VERSION}. "
                "Use the SpecForge version that wrote it."
            )
        return Checkpoint(path, CheckpointMeta(**{**data, "identity": DraftIdentity.from_json(data["identity"])}))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / META} cannot be read: {error!r}. {_RECOVER}") from error


def complete_checkpoints(root: Path) -> list[Checkpoint]:
    """Every complete checkpoint below ``run_dir/checkpoints``, by step."""
    if not root.is_dir():
        return []
    folders = [
        (int(match[1]), path) for path in root.iterdir() if (match := STEP_FOLDER.fullmatch(path.name)) and (path / SUCCESS).exists()
    ]
    return [open_checkpoint(path) for _, path in sorted(folders)]


def find_checkpoint(path: Path, which: str = "best") -> Checkpoint:
    """A checkpoint by hand: ``path`` is a run folder or a checkpoint folder; ``which`` is best, latest or a step number.

    ``best`` falls back to the latest when nothing was evaluated.
    """
    if (path / META).exists() and STEP_FOLDER.fullmatch(path.name):
        return open_checkpoint(path)
    found = complete_checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if not found:
        raise CheckpointError(
            f"{path} holds no complete checkpoint. Give a run folder, or a folder checkpoints/step_… with a {SUCCESS} file."
        )
    if which == "latest":
        return found[-1]
    if which == "best":
        return best_of(found) or found[-1]
    for checkpoint in found:
        if which in (str(checkpoint.meta.step), checkpoint.path.name):
            return checkpoint
    raise CheckpointError(f"{path} has no checkpoint '{which}'. There are: best, latest, {', '.join(str(c.meta.step) for c in found)}.")


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The highest walk_accept_length, the earlier one on a tie; None when none was evaluated."""
    best = max(checkpoints, key=lambda c: (c.meta.score(), -c.meta.step), default=None)
    return best if best is not None and best.meta.score() > -math.inf else None


class CheckpointManager:
    """Writes, rotates and finds the checkpoints of one run; used by rank 0 only.

    ``keep`` is how many of the newest stay; the best stays besides, and null keeps all.
    """

    def __init__(self, root: Path, identity: DraftIdentity, keep: int | None) -> None:
        self.root = root
        self.identity = identity
        self.keep = keep

    def latest(self) -> Checkpoint | None:
        found = complete_checkpoints(self.root)
        return found[-1] if found else None

    def best(self) -> Checkpoint | None:
        return best_of(complete_checkpoints(self.root))

    def sweep(self) -> list[Path]:
        """Remove what a crash left behind: temporary folders and folders without the success marker."""
        if not self.root.is_dir():
            return []
        left = [p for p in self.root.iterdir() if p.is_dir() and not (STEP_FOLDER.fullmatch(p.name) and (p / SUCCESS).exists())]
        left = [p for p in left if p.name.startswith(".tmp-") or STEP_FOLDER.fullmatch(p.name)]
        for path in left:
            shutil.rmtree(path)
        return left

    def save(
        self, step: int, epoch: int, weights: Mapping[str, torch.Tensor], training: Mapping[str, Any], metrics: Mapping[str, Any]
    ) -> Checkpoint:
        """Write the checkpoint of ``step``, move the pointers, drop old ones. :class:`RunError` when the disk is full."""
        final = self.root / f"step_{step:07d}"
        temporary = self.root / f".tmp-step_{step:07d}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            meta = CheckpointMeta(self.identity, step, epoch, dict(metrics))
            meta = _write_files(temporary, meta, weights, training)
            if final.exists():  # an incomplete one of an earlier attempt, or the same step saved again
                shutil.rmtree(final)
            os.rename(temporary, final)
            _sync(self.root)
            write_atomic(final / SUCCESS, "")
            write_atomic(self.root / "latest", final.name + "\n")
            self._point_to_best_and_rotate()
        except (OSError, SafetensorError, RuntimeError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._failure(step, error) from error
        return Checkpoint(final, meta)

    def _point_to_best_and_rotate(self) -> None:
        found = complete_checkpoints(self.root)
        best = best_of(found)
        if best is not None:
            write_atomic(self.root / "best", best.path.name + "\n")
        if self.keep is None:
            return
        for checkpoint in found[: -self.keep]:
            if best is None or checkpoint.path != best.path:
                # The marker goes first: a kill in between leaves something that the sweep recognises.
                (checkpoint.path / SUCCESS).unlink()
                shutil.rmtree(checkpoint.path)

    def _failure(self, step: int, error: Exception) -> RunError:
        previous = self.latest()
        kept = f"The previous checkpoint is intact: {previous.path}" if previous else "There is no earlier checkpoint"
        cause = _os_error(error)
        if cause is not None and cause in FULL:
            free = shutil.disk_usage(self.root).free / 2**20 if self.root.exists() else 0.0
            return RunError(
                f"the disk is full: the checkpoint of step {step} could not be written below {self.root} ({free:.0f} MiB free, "
                f"{os.strerror(cause)}). {kept}. Free some space or lower trainer.keep_checkpoints, then start the run again: it resumes."
            )
        return RunError(f"the checkpoint of step {step} could not be written below {self.root}: {error}. {kept}.")


def _write_files(folder: Path, meta: CheckpointMeta, weights: Mapping[str, torch.Tensor], training: Mapping[str, Any]) -> CheckpointMeta:
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in weights.items()}, folder / WEIGHTS)
    # Through a stream of ours: given a path, torch hides that the disk was full behind an error about positions.
    with (folder / TRAINING).open("wb") as stream:
        torch.save(dict(training), stream)
    for name in (WEIGHTS, TRAINING):
        meta.files[name] = {"bytes": (folder / name).stat().st_size, "blake2b": _digest(folder / name)}
    (folder / META).write_text(json.dumps(asdict(meta), indent=1, default=str))
    for name in (WEIGHTS, TRAINING, META):
        _sync(folder / name)
    _sync(folder)
    return meta


def write_atomic(path: Path, text: str) -> None:
    """Write a small text file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _os_error(error: BaseException | None) -> int | None:
    """The operating system's number behind an error; safetensors and torch hide it in a text or in the context."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        if match := re.search(r"os error (\d+)", str(error)):
            return int(match[1])
        error = error.__cause__ or error.__context__
    return None
