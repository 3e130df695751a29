"""``specforge stop RUN…``: cancel the jobs of runs or sweeps, by the ids that were stored when they were submitted.

A job that runs is told to save first; SLURM ends it after its own waiting time (KillWait) if it has not ended by then. Exit code 0; 1 when
nothing was there to stop, 2 for a folder that is no run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from specforge.commands.status import find_runs
from specforge.errors import RunError
from specforge.launch import outcome, slurm_queue
from specforge.launch.job_record import read_submissions


def main(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` (without the command word), cancel, say what was cancelled."""
    parser = argparse.ArgumentParser(prog="specforge stop", description="Cancel the SLURM jobs of runs or of a sweep.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN", help="run folders or a sweep folder")
    options = parser.parse_args(list(arguments))
    runs = [run_dir for run_dir, _ in find_runs(options.folders)]
    stored = {run_dir: [job.id for one in read_submissions(run_dir) for job in one.jobs] for run_dir in runs}
    if not any(stored.values()):
        busy = [run_dir for run_dir in runs if outcome.in_use(run_dir)]
        where = f" {busy[0]} is at work in {owner(busy[0])}: end it there with Ctrl-C; it saves first." if busy else ""
        raise RunError(f"{options.folders[0]}: was not submitted to SLURM, so there is no job to stop.{where}")
    states = slurm_queue.job_states(identifier for ids in stored.values() for identifier in ids)
    stopped = {run_dir: [i for i in ids if i in states and states[i].active] for run_dir, ids in stored.items()}
    active = [identifier for ids in stopped.values() for identifier in ids]
    if not active:
        raise RunError(f"{options.folders[0]}: none of its jobs ({', '.join(i for ids in stored.values() for i in ids)}) runs or waits.")
    slurm_queue.cancel(active)
    for run_dir, ids in stopped.items():
        if ids:
            print(f"specforge: cancelled job {', '.join(ids)}; go on later with: specforge run={run_dir}", file=sys.stderr)
    return 0


def owner(run_dir: Path) -> str:
    """Who holds the run folder, as its lock says."""
    try:
        return (run_dir / ".lock").read_text().strip() or "another process"
    except OSError:
        return "another process"
