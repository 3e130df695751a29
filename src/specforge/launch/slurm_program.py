"""What runs in each task of a job: one rank of one role, or a whole command. submitit carries it there and calls it.

It knows only where the run folder is. So a job that starts again, for whatever reason (preempted, out of time, a node that failed, an
administrator's ``scontrol requeue``), does the same as the first time: it goes on from the newest complete checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specforge.config.freeze import lock, write_atomic
from specforge.errors import RunError, SpecForgeError
from specforge.launch import slurm_queue
from specforge.launch.env import RankFacts, Segment, segment_facts
from specforge.launch.job_record import Ended, write_ended
from specforge.launch.plan import log_name

# Exit codes of a run that was asked to stop and saved.
SAVED = {128 + signal.SIGTERM, 128 + signal.SIGUSR2}
LOG_LINK = "latest"


@dataclass
class JobProgram:
    """``segments`` say who works on which nodes; empty for a command that is no training run and takes one task."""

    config_file: str
    run_dir: str
    segments: tuple[Segment, ...]
    leads: bool
    requeue: bool

    def checkpoint(self) -> Any:
        """submitit asks for this when the job has to stop, and submits what it gets: the same again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def __call__(self) -> int:
        """Run this task; returns 0 or leaves with the run's exit code, so that SLURM shows a failed run as failed."""
        found = segment_facts(os.environ, self.segments) if self.segments else (None, None)
        if found is None:
            return 0  # this node needs fewer tasks than SLURM started on it
        segment, facts = found
        run_dir = Path(self.run_dir)
        with _output_in(run_dir, segment, facts, self.leads):
            code = self._guarded(run_dir, segment, facts)
        if code in SAVED:
            return self._stopped(run_dir, segment, facts, code)
        return self._leave(run_dir, facts, code)

    def _guarded(self, run_dir: Path, segment: Segment | None, facts: RankFacts | None) -> int:
        """The exit code of the work; an error of the user is one line, another one keeps its traceback."""
        try:
            return self._work(run_dir, segment, facts)
        except SpecForgeError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except Exception:
            traceback.print_exc()
            return 1

    def _work(self, run_dir: Path, segment: Segment | None, facts: RankFacts | None) -> int:
        if segment is None or facts is None:
            from specforge.launch.frontend import run_here

            return run_here(Path(self.config_file), run_dir)
        from specforge.launch.worker import run_role

        leads = self.leads and segment is self.segments[0]
        with lock(run_dir) if leads and facts.is_main else contextlib.nullcontext():
            return run_role(run_dir, segment.role, facts, segment.instance)

    def _stopped(self, run_dir: Path, segment: Segment | None, facts: RankFacts | None, code: int) -> int:
        """All ranks have saved. The job's first task has the job start again, unless it is being cancelled; the others just leave."""
        if os.environ.get("SLURM_PROCID", "0") != "0":
            # A task that fails ends the others, and the first one has still to talk to SLURM.
            time.sleep(1.0)
            return 0
        why_not = "launcher.requeue=false" if not self.requeue else why_no_requeue(os.environ)
        if why_not is None:
            self._say(run_dir, code, requeued=True)
            try:
                if not slurm_queue.will_restart(job_id(), os.environ):
                    _requeue_through_submitit()
                return 0
            except RunError as error:
                why_not = str(error)
        print(f"stopped and saved; not queued again: {why_not}. Go on with: specforge run={run_dir}", file=sys.stderr, flush=True)
        return self._leave(run_dir, facts, code)

    def _leave(self, run_dir: Path, facts: RankFacts | None, code: int) -> int:
        if facts is None or (facts.is_main and os.environ.get("SLURM_PROCID", "0") == "0"):
            self._say(run_dir, code, requeued=False)
        # What is over cannot be stopped: a signal that comes while Python shuts down would make a success look like a failure.
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if code:
            sys.exit(code)
        return 0

    def _say(self, run_dir: Path, code: int, *, requeued: bool) -> None:
        if self.leads:
            write_ended(run_dir, Ended(job_id(), code, requeued, int(os.environ.get("SLURM_RESTART_COUNT") or 0)))


def job_id() -> str:
    """This job's id as squeue writes it: ``17``, or ``17_3`` in an array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def why_no_requeue(environ: Any) -> str | None:
    """Why a job that was told to stop must not start again; ``None`` when it may.

    SLURM sends the same SIGTERM for a cancelled job and for a preempted one, and would obediently start a cancelled one again. The
    difference: while a cancelled job (or one past its time limit) ends, its state is COMPLETING already.
    """
    try:
        facts = slurm_queue.job_facts(job_id())
    except RunError as error:
        return str(error)
    if facts.get("Requeue") == "0":
        return "this cluster (JobRequeue in slurm.conf) or this job's options forbid it"
    over = facts.get("JobState") in ("COMPLETING", "CANCELLED")
    if over and facts.get("Reason") != "TimeLimit" and not int(facts.get("Restarts") or 0) > int(environ.get("SLURM_RESTART_COUNT") or 0):
        return "the job was cancelled"
    return None


def _requeue_through_submitit() -> None:
    """submitit's own handler writes the program anew and asks SLURM to start the job again; it ends the process when it could.

    Raises:
        RunError: it could not: too many time limits, or SLURM refuses, in its own words.
    """
    import subprocess

    from submitit.core.utils import UncompletedJobError

    handler = signal.getsignal(signal.SIGUSR2)
    if not callable(handler):
        raise RunError("submitit's handler of SIGUSR2 is gone; something in this process replaced it")
    try:
        handler(signal.SIGUSR2, None)
    except UncompletedJobError as error:
        raise RunError(str(error).rstrip(".")) from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise RunError(f"SLURM refused to queue the job again ({error})") from None


@contextlib.contextmanager
def _output_in(run_dir: Path, segment: Segment | None, facts: RankFacts | None, leads: bool) -> Iterator[None]:
    """Everything that this process and its children print goes to the run folder, for the files of SLURM hold all tasks of all runs."""
    if not run_dir.is_dir():
        raise RunError(f"{run_dir} cannot be seen from node {os.environ.get('SLURMD_NODENAME', '?')}. Put output_dir on a shared disk.")
    name = f"{job_id()}.{os.environ.get('SLURM_RESTART_COUNT') or 0}"
    folder = run_dir / "logs" / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("rank_0.log" if segment is None or facts is None else log_name(segment.role, segment.instance, facts.rank))
    if leads and (facts is None or facts.is_main):
        _point_to(run_dir / "logs", name)
    print(f"output of this task: {path}", flush=True)
    kept = os.dup(1), os.dup(2)
    with path.open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)


def _point_to(logs: Path, name: str) -> None:
    """``logs/latest`` leads to this attempt's folder, also on a disk without links."""
    link = logs / f".tmp-latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(name)
        os.replace(link, logs / LOG_LINK)
    except OSError:
        write_atomic(logs / f"{LOG_LINK}.txt", name + "\n")
