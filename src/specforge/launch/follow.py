"""``launcher.wait=true``: stay with submitted runs until they end, show what one of them prints, and give back its exit code.

What a run itself says (``ended.json``, ``_SUCCESS``) counts before what SLURM says, for SLURM forgets jobs after a few minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from specforge.launch import slurm_queue
from specforge.launch.base import Changed, Stopped, Task
from specforge.launch.job_record import Submission, read_ended, read_submissions
from specforge.launch.slurm_queue import JobState, SlurmError

# A job that is neither in the queue nor has said its last word gets this long: the file may be on its way over a shared disk.
PATIENCE_SECONDS = 30.0


@dataclass
class _Watched:
    task: Task
    submission: Submission
    log: _Log | None
    started: bool = False
    gone_since: float | None = None
    code: int | None = None
    state: str = ""
    shown: str = field(default="", repr=False)


class _Log:
    """Prints what a run's newest log gains. A restarted job writes another file, to which ``logs/latest`` then leads."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "logs" / "latest" / "rank_0.log"
        self.now: Path | None = None
        self.file: IO[str] | None = None

    def show(self) -> None:
        target = self.path.resolve()
        if self.now != target and target.is_file():
            self._drain()
            self.now, self.file = target, target.open(encoding="utf-8", errors="replace")
        self._drain()

    def _drain(self) -> None:
        if self.file is not None and (text := self.file.read()):
            sys.stderr.write(text)
            sys.stderr.flush()


def follow(tasks: Sequence[Task], poll_seconds: float, changed: Changed | None = None) -> list[int]:
    """Wait until the newest submission of every task has ended; the exit code of each. The output of a single run is shown.

    Raises:
        Stopped: Ctrl-C; the jobs go on, and the message says so (only with ``changed``; else KeyboardInterrupt is answered with 130).
    """
    watched = [_Watched(task, read_submissions(task.run_dir)[-1], _Log(task.run_dir) if len(tasks) == 1 else None) for task in tasks]
    try:
        while not all(one.code is not None for one in watched):
            states = _states([one for one in watched if one.code is None])
            for index, one in enumerate(watched):
                if one.code is None:
                    _look(one, states, index, changed)
            if not all(one.code is not None for one in watched):
                time.sleep(poll_seconds)
    except KeyboardInterrupt:
        ids = ", ".join(job.id for one in watched if one.code is None for job in one.submission.jobs)
        print(f"specforge: not waiting any more; jobs {ids} go on. Stop them with: specforge stop <run folder>", file=sys.stderr)
        if changed is not None:
            raise Stopped(2) from None
        return [130]
    return [one.code or 0 for one in watched]


def _states(waiting: Sequence[_Watched]) -> dict[str, JobState] | None:
    """States of all their jobs, ``None`` while SLURM does not answer; a controller that restarts is no end of a run."""
    try:
        return slurm_queue.job_states(job.id for one in waiting for job in one.submission.jobs)
    except SlurmError:
        return None


def _look(one: _Watched, states: dict[str, JobState] | None, index: int, changed: Changed | None) -> None:
    if one.log is not None:
        one.log.show()
    if states is None:
        return
    leader = one.submission.leader
    state = states.get(leader.id)
    name = state.state if state is not None else "gone"
    if state is not None and state.state == "RUNNING" and not one.started:
        one.started = True
        if changed is not None:
            changed(index, "running", None, f"job {leader.id}")
    if name != one.state and one.log is not None:
        reason = f" ({state.reason})" if state is not None and state.reason and state.state == "PENDING" else ""
        print(f"specforge: job {leader.id} is {name.lower()}{reason}", file=sys.stderr, flush=True)
    one.state = name
    code = exit_code(one.task.run_dir, leader.id, state)
    if code is None and (state is None or not state.active):
        one.gone_since = one.gone_since or time.monotonic()
        if time.monotonic() - one.gone_since > PATIENCE_SECONDS:
            code = 1
    if code is None:
        return
    one.code = code
    if one.log is not None:
        one.log.show()
    if changed is not None:
        changed(index, "done" if code == 0 else "interrupted" if code > 128 else "failed", code, f"job {leader.id}")


def exit_code(run_dir: Path, identifier: str, state: JobState | None) -> int | None:
    """The run's exit code once its job has ended for good; ``None`` while it may go on or its last word is not there yet."""
    if state is not None and state.active:
        return None
    ended = read_ended(run_dir)
    if ended is not None and ended.job == identifier and not ended.requeued:
        return ended.exit_code
    if state is None:
        return None
    # It was killed before it could say anything: by the memory limit, a failed node, scancel.
    if state.state.startswith("CANCELLED"):
        return 143
    return None if state.state == "COMPLETED" else 1
