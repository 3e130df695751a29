"""The part of a sweep that works: which points still have to run, in which folder, and what is written down about each."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specforge.config import freeze
from specforge.config.freeze import CONFIG_FILE
from specforge.errors import RunError, SpecForgeError
from specforge.launch import outcome
from specforge.launch.base import Launcher, Stopped, Task, open_launcher
from specforge.launch.frontend import Ready, freeze_ready, make_plan, report, shown
from specforge.launch.sweep_points import Point
from specforge.launch.sweep_record import PointRecord, SweepRecord, shown_seconds
from specforge.launch.sweep_table import print_table


@dataclass
class SweepRun:
    """One start of a sweep. ``order`` are the points of this start, in the line's order; the record may hold more from earlier ones."""

    record: SweepRecord
    known: bool = True  # whether all points are known before the first starts
    order: list[PointRecord] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    resumed: set[str] = field(default_factory=set)
    stopped_by: int = 0

    def add(self, points: Sequence[Point]) -> None:
        """Enter points into the record and find those that an earlier start finished or that wait in a queue."""
        for point in points:
            record = self.record.point(point.id, point.label, point.words)
            if record not in self.order:
                self.order.append(record)
            if self._finished(point, record):
                record.status = "done"
                self.skipped.append(point.id)
            elif record.status == "done":
                record.status = "not started"  # its folder is gone
        self._leave_to_queue(points)
        self.record.save()
        if self.skipped and self.known:
            report(f"{len(self.skipped)} of {len(self.order)} points are finished already and are skipped")

    def _leave_to_queue(self, points: Sequence[Point]) -> None:
        """Points of an earlier start that still wait or run as jobs are not submitted twice."""
        folders = {}
        for point in points:
            continued = point.ready.run_dir if point.ready.command == "train" else None
            if point.id not in self.skipped and (folder := continued or self.record.points[point.id].folder) is not None:
                folders[point.id] = folder
        waiting = jobs_at_work(list(folders.values()))
        for identifier, folder in folders.items():
            if folder in waiting:
                record = self.record.points[identifier]
                record.status, record.note = "submitted", waiting[folder]
                self.waiting.append(record.id)
        if waiting:
            report(f"{len(waiting)} of {len(self.order)} points are in the queue already and are left there")

    def _finished(self, point: Point, record: PointRecord) -> bool:
        if record.folder is None or not record.folder.is_dir():
            return False
        if point.ready.run_dir is None:
            return outcome.succeeded(record.folder)
        # A command on an existing run: that run's own marker says nothing of this point.
        return record.status == "done" and (point.ready.command != "train" or outcome.succeeded(record.folder))

    def work(self, points: Sequence[Point]) -> None:
        """Give what is not finished to the launcher of its configuration; points whose launchers differ go one launcher after the other."""
        by_launcher: dict[str, list[tuple[Point, Task]]] = {}
        for point in points:
            if point.id in self.skipped or point.id in self.waiting:
                continue
            for warning in point.ready.warnings:
                report(f"warning ({point.label}): {warning}")
            task = self._prepare(point)
            if task is not None:
                by_launcher.setdefault(json.dumps(point.ready.config["launcher"], sort_keys=True, default=str), []).append((point, task))
        for together in by_launcher.values():
            if not self.stopped_by:
                self._launch(open_launcher(together[0][0].ready.config), together)

    def _prepare(self, point: Point) -> Task | None:
        """The frozen point, in its folder of an earlier start or in a new one. Null, and noted, when it cannot be or another process has it."""
        record, ready = self.record.points[point.id], point.ready
        earlier = record.folder
        try:
            if ready.run_dir is None and earlier is not None and (earlier / CONFIG_FILE).is_file():
                busy, run_dir, path = outcome.in_use(earlier), earlier, earlier / CONFIG_FILE
                self.resumed.add(record.id)
                if not busy:
                    _freeze_again(ready, earlier)
            else:
                busy = ready.command == "train" and ready.run_dir is not None and outcome.in_use(ready.run_dir)
                run_dir, path = freeze_ready(ready) if not busy else (Path(), Path())
        except SpecForgeError as error:
            self._note(record, "failed", error.exit_code, str(error))
            report(f"{point.label}: {error}")
            return None
        if busy:
            self._note(record, "in use", None, "another process is at work in its folder")
            report(f"{point.label}: {record.note}")
            return None
        record.run_dir = str(run_dir)
        self._note(record, "not started", None)
        return Task(path, run_dir, point.label)

    def _launch(self, launcher: Launcher, together: Sequence[tuple[Point, Task]]) -> None:
        records = [self.record.points[point.id] for point, _ in together]
        began: dict[int, float] = {}

        def changed(index: int, state: str, exit_code: int | None, note: str) -> None:
            record = records[index]
            place = f"point {self.order.index(record) + 1}{f' of {len(self.order)}' if self.known else ''}: {record.label}"
            if state == "running":
                began[index] = time.monotonic()
            elif index in began and state != "submitted":
                record.seconds = round(record.seconds + time.monotonic() - began.pop(index), 3)
            self._note(record, state, exit_code, note)
            after = f" after {shown_seconds(record.seconds)}" if exit_code is not None and record.seconds else ""
            verb = "goes on in" if record.id in self.resumed else "run folder"
            where = f", {verb} {shown(together[index][1].run_dir)}" if state in ("running", "submitted") else ""
            report(f"{place}: {state}{after}{where}{f' ({note})' if note else ''}")

        try:
            codes = launcher.submit_many([task for _, task in together], changed, self.record.folder)
        except Stopped as stop:
            self.stopped_by = stop.signum
            return
        except RunError as error:  # nothing could be submitted; the table still tells of the others
            for record in records:
                self._note(record, "failed", error.exit_code, str(error))
            report(str(error))
            return
        for record, code in zip(records, codes, strict=True):
            if code is not None and record.status not in ("done", "failed", "interrupted"):
                self._note(record, "done" if code == 0 else "failed", code)

    def _note(self, record: PointRecord, status: str, code: int | None, note: str = "") -> None:
        record.status, record.exit_code, record.note = status, code, note  # type: ignore[assignment]
        self.record.save()

    def end(self) -> int:
        """Print the table and return the exit code of the sweep."""
        print_table(self.order, self.skipped, shown(self.record.folder))
        if self.stopped_by:
            report("stopped. Start the same command again: finished points are skipped, the interrupted one goes on in its folder")
            return 128 + self.stopped_by
        return int(any(point.status in ("failed", "interrupted", "in use", "refused") for point in self.order))


def _freeze_again(ready: Ready, run_dir: Path) -> None:
    """The point computes what it did, but may run elsewhere now: launcher, tracker and threads are those of the new line."""
    freeze.freeze(run_dir, ready.config, command=ready.command, choices=ready.choices, overrides=ready.overrides)
    if ready.command == "train":
        freeze.write_plan(run_dir, make_plan(ready.config).to_json())


def jobs_at_work(folders: Sequence[Path]) -> dict[Path, str]:
    """Run folders whose newest submission SLURM still knows as waiting or running, with the job's id and state.

    Raises:
        RunError: there are submissions, and SLURM is here but does not answer.
    """
    from specforge.launch.job_record import read_submissions

    newest = {folder: submissions[-1].leader.id for folder in folders if (submissions := read_submissions(folder))}
    if not newest:
        return {}
    from specforge.launch import slurm_queue

    states = slurm_queue.job_states(newest.values()) if slurm_queue.have_slurm() else {}
    return {folder: f"job {job} {states[job].state}" for folder, job in newest.items() if job in states and states[job].active}
