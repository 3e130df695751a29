"""``jobs.json`` in a run folder: what was submitted for this run, so that it can be seen, stopped and not started twice.

Every submission adds an entry; nothing is ever removed. Ids are SLURM's as squeue writes them (``17`` or ``17_3`` of an array).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specforge.config.freeze import write_atomic
from specforge.errors import ConfigError

RECORD_FILE = "jobs.json"
RECORD_VERSION = 1
# Written by the job itself when it ends: exit code, and whether SLURM starts it again.
ENDED_FILE = "ended.json"


@dataclass(frozen=True)
class JobEntry:
    """One job. ``name`` is the role (``trainer``), ``pack`` for all roles in one allocation, or the command; ``leads`` ends the run."""

    id: str
    name: str
    leads: bool
    nodes: int
    tasks_per_node: int
    log: str


@dataclass(frozen=True)
class Submission:
    """What one start of the run submitted. ``cluster`` is SLURM's name of itself."""

    time: str
    cluster: str
    jobs: tuple[JobEntry, ...]

    @property
    def leader(self) -> JobEntry:
        return next(job for job in self.jobs if job.leads)


def read_submissions(run_dir: Path) -> list[Submission]:
    """All submissions, oldest first; empty for a run that was never submitted.

    Raises:
        ConfigError: the file is damaged or of another release.
    """
    path = run_dir / RECORD_FILE
    if not path.is_file():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format_version"] != RECORD_VERSION:
            raise ConfigError(f"{path}: format_version {data['format_version']!r} — this release reads {RECORD_VERSION}.")
        return [Submission(s["time"], s["cluster"], tuple(JobEntry(**job) for job in s["jobs"])) for s in data["submissions"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is damaged ({error!r}). Move it away; the jobs it named are in squeue.") from error


def add_submission(run_dir: Path, cluster: str, jobs: Sequence[JobEntry]) -> Submission:
    """Write down what was just submitted."""
    submission = Submission(time.strftime("%Y-%m-%dT%H:%M:%S%z"), cluster, tuple(jobs))
    data = {"format_version": RECORD_VERSION, "submissions": [asdict(s) for s in (*read_submissions(run_dir), submission)]}
    write_atomic(run_dir / RECORD_FILE, json.dumps(data, indent=1) + "\n")
    return submission


@dataclass(frozen=True)
class Ended:
    """The last word of a job: ``exit_code`` of the run, ``requeued`` when SLURM will start it again from its last checkpoint."""

    job: str
    exit_code: int
    requeued: bool
    restarts: int


def write_ended(run_dir: Path, ended: Ended) -> None:
    write_atomic(run_dir / ENDED_FILE, json.dumps(asdict(ended)) + "\n")


def read_ended(run_dir: Path) -> Ended | None:
    """The last word of the newest job that had one; ``None`` for none, also while a shared disk does not show it yet."""
    try:
        data: dict[str, Any] = json.loads((run_dir / ENDED_FILE).read_text(encoding="utf-8"))
        return Ended(**data)
    except (OSError, ValueError, TypeError):
        return None
