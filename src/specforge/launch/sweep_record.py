"""What a sweep is on disk: ``<output_dir>/sweeps/<name>/<hash>/sweep.json``, its points with their signatures, run folders and states.

The folder is found again from the command line, so that the same sweep started twice goes on where it was: the hash is that of the command,
of what is fixed and of the keys that are swept, but not of their values. A sweep with one value more lands in the same folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from specforge import __version__
from specforge.config import freeze
from specforge.errors import ConfigError, RunError
from specforge.launch import outcome

RECORD_FILE = "sweep.json"
RECORD_VERSION = 1
SWEEPS = "sweeps"
Status = Literal["not started", "submitted", "running", "done", "failed", "interrupted", "in use", "refused"]


@dataclass
class PointRecord:
    """One point. ``id`` says what it computes; ``run_dir`` is absolute; ``seconds`` is the time of all its attempts in this sweep."""

    id: str
    label: str
    overrides: list[str]
    run_dir: str | None = None
    status: Status = "not started"
    exit_code: int | None = None
    seconds: float = 0.0
    value: float | None = None  # what a sampler was told
    note: str = ""

    @property
    def folder(self) -> Path | None:
        return None if self.run_dir is None else Path(self.run_dir)


@dataclass
class SweepRecord:
    """The content of ``sweep.json``. Only the process that holds the folder's lock writes it."""

    folder: Path
    command: str
    keys: list[str]
    line: str
    points: dict[str, PointRecord] = field(default_factory=dict)

    def save(self) -> None:
        data = {
            "format_version": RECORD_VERSION,
            "specforge": __version__,
            "command": self.command,
            "line": self.line,
            "keys": self.keys,
            "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "points": [asdict(point) for point in self.points.values()],
        }
        freeze.write_atomic(self.folder / RECORD_FILE, json.dumps(data, indent=1, allow_nan=False) + "\n")

    def point(self, identifier: str, label: str, overrides: Sequence[str]) -> PointRecord:
        """The record of a point, new or from an earlier start; its label is that of the newest line."""
        point = self.points.setdefault(identifier, PointRecord(identifier, label, list(overrides)))
        point.label, point.overrides = label, list(overrides)
        return point


def read_record(folder: Path) -> SweepRecord:
    """The record of a sweep folder.

    Raises:
        ConfigError: there is none, it is damaged, or it is of another release.
    """
    path = folder / RECORD_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder}: is not a sweep folder ({RECORD_FILE} is not there).") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: is not readable ({error}). Move it away to start the sweep anew; the run folders stay.") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != RECORD_VERSION:
        raise ConfigError(f"{path}: format_version {version!r} — this release reads {RECORD_VERSION}. Move the folder away to start anew.")
    try:
        points = {one["id"]: PointRecord(**one) for one in data["points"]}
        return SweepRecord(folder, data["command"], list(data["keys"]), data["line"], points)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is damaged ({error!r}). Move it away to start the sweep anew; the run folders stay.") from error


def is_sweep(folder: Path) -> bool:
    """Whether this is a sweep's folder."""
    return (folder / RECORD_FILE).is_file()


def current_status(point: PointRecord) -> Status:
    """The status by the run folder itself, which knows more than the record when the process that wrote that is gone."""
    if point.folder is None or not point.folder.is_dir():
        return "not started" if point.status in ("running", "submitted", "done", "interrupted") else point.status
    if outcome.succeeded(point.folder):
        return "done"
    if outcome.in_use(point.folder):
        return "running"
    return "interrupted" if point.status == "running" else point.status


def point_id(command: str, config: dict[str, Any], words: Sequence[str]) -> str:
    """Hex digest of what a point computes: the run's signature, the command and the format of its files.

    ``words`` are the swept overrides. Those that the signature leaves out (a name, a number of processes) still tell points apart; so
    does the run that a command works on.
    """
    volatile = [word for word in words if freeze.is_excluded(key_of(word), freeze.EXCLUDED_FROM_SIGNATURE)]
    parts = [freeze.signature(config), command, freeze.FORMAT_VERSION, __version__, config.get("run"), sorted(volatile)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def sweep_folder(output_dir: str, name: str, command: str, fixed: Sequence[str], keys: Sequence[str]) -> Path:
    """Where the record of a sweep lies, absolute."""
    kept = sorted(word for word in fixed if not freeze.is_excluded(key_of(word), freeze.EXCLUDED_FROM_SIGNATURE) or key_of(word) == "run")
    digest = hashlib.sha256(json.dumps([command, kept, sorted(keys)]).encode()).hexdigest()[:8]
    return Path(output_dir).expanduser().absolute() / SWEEPS / name / digest


def sweep_name(names: Sequence[str], keys: Sequence[str]) -> str:
    """The runs' name if they share one, else one made of the keys that are swept."""
    if len(set(names)) == 1:
        return names[0]
    return re.sub(r"[^\w.-]", "_", "-".join(key.rpartition(".")[2] for key in keys))[:60].strip("._-") or "sweep"


def key_of(word: str) -> str:
    """The key of one override word."""
    return word.partition("=")[0].lstrip("+~")


@contextlib.contextmanager
def open_sweep(folder: Path, command: str, arguments: Sequence[str], keys: Sequence[str]) -> Iterator[SweepRecord]:
    """The record, new or as it was left, held by this process until the block ends.

    Raises:
        RunError: another process runs the same sweep, or the folder cannot be written.
        ConfigError: the record that is there cannot be read.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"output_dir: {folder} cannot be written ({error.strerror}). Choose another output_dir.") from error
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(freeze.lock(folder))
        except RunError as error:
            owner = re.search(r"in use by (.+?)\. Wait", str(error))
            raise RunError(
                f"-m: {folder} — the same sweep is at work in {owner[1] if owner else 'another process'}. Wait for it, or sweep other values "
                "or another name=."
            ) from None
        line = shlex.join(["specforge", *([] if command == "train" else [command.replace("_", "-")]), "-m", *arguments])
        record = read_record(folder) if is_sweep(folder) else SweepRecord(folder, command, list(keys), line)
        record.line = line
        for point in record.points.values():
            point.status = current_status(point)
        yield record
        record.save()


def shown_seconds(seconds: float) -> str:
    """``42 s``, ``3 min 05 s`` or ``2 h 03 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
