"""``specforge status``: which runs and sweeps there are under a folder, and how each stands.

A run folder says itself whether it is finished; SLURM is asked about submitted ones that are not. Exit code 0; 2 for a folder that is none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specforge.errors import ConfigError, SpecForgeError
from specforge.launch import outcome, slurm_queue
from specforge.launch.job_record import Submission, read_ended, read_submissions
from specforge.launch.slurm_queue import JobState, SlurmError

CONFIG_FILE, SWEEP_FILE = "config.yaml", "sweep.json"
STYLES = {"done": "green", "running": "cyan", "failed": "red", "cancelled": "yellow", "stopped": "yellow", "pending": "blue"}


@dataclass(frozen=True)
class RunStatus:
    """How one run stands. ``jobs`` are ids with SLURM's states; ``step`` and ``total`` are null before the first row of metrics."""

    run_dir: str
    state: str
    step: int | None
    detail: str
    jobs: tuple[str, ...]
    sweep: str | None = None


def main(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` (without the command word), print the table, return the exit code."""
    parser = argparse.ArgumentParser(prog="specforge status", description="How runs and sweeps stand, here and in SLURM.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="runs, sweeps or folders of them (default: outputs)")
    parser.add_argument("--all", action="store_true", help="also the runs that ended more than 20 runs ago")
    parser.add_argument("--json", action="store_true", help="print plain JSON")
    options = parser.parse_args(list(arguments))
    folders = options.folders or [Path("outputs")]
    runs = find_runs(folders, given=bool(options.folders))
    if not options.all and not options.folders:
        runs = runs[-20:]
    found, note = statuses(runs)
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        _print(found, note)
    return 0


def find_runs(folders: Sequence[Path], given: bool = True) -> list[tuple[Path, Path | None]]:
    """Run folders at or under the given ones, each with the sweep it was found through, oldest first.

    Raises:
        ConfigError: a folder is not there, or has no run in it.
    """
    found: dict[Path, Path | None] = {}
    for folder in folders:
        if not folder.is_dir():
            if not given:
                return []  # outputs/ before the first run
            raise ConfigError(f"{folder}: is not there. Name a run folder, a sweep folder or a folder of them.")
        here = _under(folder)
        if not here and given:
            raise ConfigError(f"{folder}: holds no run. A run folder has {CONFIG_FILE}, a sweep folder {SWEEP_FILE}.")
        for run_dir, sweep in here.items():
            found[run_dir] = found.get(run_dir) or sweep
    return sorted(found.items(), key=lambda item: item[0].name)


def _under(folder: Path) -> dict[Path, Path | None]:
    found: dict[Path, Path | None] = {path.parent.resolve(): None for path in _shallow(folder, CONFIG_FILE)}
    for path in _shallow(folder, SWEEP_FILE):
        try:
            points = json.loads(path.read_text(encoding="utf-8"))["points"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being written, or of another release; its runs are found where they are
        for point in points:
            if point.get("run_dir") and Path(point["run_dir"]).is_dir():
                found[Path(point["run_dir"]).resolve()] = path.parent
    return found


def _shallow(folder: Path, name: str) -> list[Path]:
    """Files of this name in a folder and four levels below: outputs/sweeps/<name>/<hash>. Deeper there are only a run's own files."""
    return [path for depth in range(5) for path in folder.glob("/".join([*["*"] * depth, name])) if path.is_file()]


def statuses(runs: Sequence[tuple[Path, Path | None]]) -> tuple[list[RunStatus], str]:
    """The status of each run, and what SLURM said if it could not be asked. One question to SLURM for all of them."""
    submissions = {run_dir: newest for run_dir, _ in runs if (newest := _newest(run_dir)) is not None}
    states: dict[str, JobState] = {}
    note = ""
    open_jobs = [job.id for run_dir, one in submissions.items() if not outcome.succeeded(run_dir) for job in one.jobs]
    if open_jobs:
        try:
            states = slurm_queue.job_states(open_jobs)
        except SlurmError as error:
            note = f"SLURM could not be asked: {error}"
    return [_status(run_dir, sweep, submissions.get(run_dir), states) for run_dir, sweep in runs], note


def _newest(run_dir: Path) -> Submission | None:
    try:
        return next(iter(reversed(read_submissions(run_dir))), None)
    except SpecForgeError:
        return None


def _status(run_dir: Path, sweep: Path | None, submission: Submission | None, states: dict[str, JobState]) -> RunStatus:
    state: str = outcome.state(run_dir)
    detail, jobs = "", ()
    if submission is not None:
        known = {job.id: states[job.id].state if job.id in states else "" for job in submission.jobs}
        jobs = tuple(f"{job.name} {job.id}{f' {known[job.id]}' if known[job.id] else ''}" for job in submission.jobs)
        if state != "done":
            state, detail = _of_job(run_dir, submission.leader.id, states.get(submission.leader.id), state)
    if state == "stopped":
        detail = detail or "goes on with: specforge run=<folder>"
    return RunStatus(str(run_dir), state, last_step(run_dir), detail, jobs, None if sweep is None else str(sweep))


def _of_job(run_dir: Path, identifier: str, state: JobState | None, local: str) -> tuple[str, str]:
    """A submitted run that is not finished: what its job does, else what its last word was."""
    ended = read_ended(run_dir)
    if state is not None and state.active:
        if state.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
            again = ", starts again from its checkpoint" if ended is not None and ended.job == identifier and ended.requeued else ""
            return "pending", f"{state.reason or 'waits'}{again}"
        return "running" if state.state == "RUNNING" else state.state.lower(), f"on {state.nodes}" if state.nodes else ""
    if ended is not None and ended.job == identifier and not ended.requeued:
        return ("stopped", "") if ended.exit_code > 128 else ("failed", f"exit code {ended.exit_code}, see logs/latest/rank_0.log")
    if state is not None:
        word = state.state.split()[0].lower()
        return word, "see logs/latest and jobs/"
    return local, "SLURM does not know its job any more" if local != "running" else ""


def last_step(run_dir: Path) -> int | None:
    """The newest step in the run's metrics."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            row: Any = json.loads(line)
        except ValueError:
            continue  # the first, cut line, or one that is being written
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return int(row["step"])
    return None


def _print(found: Sequence[RunStatus], note: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = 200
    if not found:
        console.print("no runs yet; start one with: specforge", markup=False)
        return
    table = Table()
    for column in ("run", "state", "step", "jobs", "detail"):
        table.add_column(column, overflow="fold")
    shown_sweep: str | None = None
    for one in sorted(found, key=lambda status: (status.sweep or "", status.run_dir)):
        if one.sweep is not None and one.sweep != shown_sweep:
            counts = [other.state for other in found if other.sweep == one.sweep]
            summary = ", ".join(f"{counts.count(state)} {state}" for state in dict.fromkeys(counts))
            table.add_row(Text(f"sweep {_short(one.sweep)}", style="bold"), Text(summary), "", "", "")
        shown_sweep = one.sweep
        name = f"  {_short(one.run_dir)}" if one.sweep else _short(one.run_dir)
        state = Text(one.state, style=STYLES.get(one.state, ""))
        table.add_row(Text(name), state, "-" if one.step is None else str(one.step), Text(", ".join(one.jobs) or "-"), Text(one.detail))
    console.print(table)
    if note:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _short(path: str) -> str:
    given = Path(path)
    return str(given.relative_to(Path.cwd())) if given.is_relative_to(Path.cwd()) else path
