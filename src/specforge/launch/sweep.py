"""Multirun: check every point first, then run them one after the other, each in a process of its own.

A point that fails stops nothing; the table at the end says which folder and which status belong to which point. Run as a module it is
the child: ``python -m specforge.launch.sweep CONFIG_FILE RUN_DIR``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specforge.config.from_run import config_dirs, split_flags
from specforge.config.points import expand
from specforge.errors import ConfigError
from specforge.launch.frontend import EPHEMERAL, Ready, freeze_ready, make_ready, report, shown


@dataclass
class Point:
    """One run of a sweep. ``label`` holds only the overrides that differ between points."""

    label: str
    ready: Ready
    run_dir: Path | None = None
    status: str = "not started"


def sweep(command: str, arguments: Sequence[str]) -> int:
    """Expand, check all, run all; 0 if every point succeeded, 1 if any failed, 130 after Ctrl-C.

    Raises:
        ConfigError: a point does not check; nothing has been started then.
    """
    if command in EPHEMERAL:
        raise ConfigError(f"-m: {command.replace('_', '-')} only prints; run it once for each value.")
    points = prepare(command, arguments)
    report(f"{len(points)} points checked; running one after the other")
    code = 0
    try:
        for number, point in enumerate(points, 1):
            for warning in point.ready.warnings:
                report(f"warning ({point.label}): {warning}")
            point.run_dir, path = freeze_ready(point.ready)
            report(f"point {number} of {len(points)}: {point.label}, run folder {shown(point.run_dir)}")
            point.status = "running"
            returned = _run_child(path, point.run_dir)
            point.status = "done" if returned == 0 else f"failed (exit code {returned})"
            code = code or int(returned != 0)
    except KeyboardInterrupt:
        for point in points:
            point.status = "interrupted" if point.status == "running" else point.status
        code = 130
    _print_table(points)
    return code


def prepare(command: str, arguments: Sequence[str]) -> list[Point]:
    """Every point composed and checked; one error that names each point that does not check."""
    flags, overrides = split_flags(arguments)
    printing = [f for f in flags if f in ("--cfg", "-c", "--info", "-i", "--help", "-h")]
    if printing:
        raise ConfigError(f"{printing[0]}: prints one configuration and does not go with -m. Remove one of the two.")
    lines = expand(overrides, config_dirs(flags))
    points: list[Point] = []
    problems: list[str] = []
    for line in lines:
        differing = [o for i, o in enumerate(line) if any(other[i] != o for other in lines)]
        label = " ".join(differing) or "the only point"
        try:
            ready = make_ready(command, [*flags, *line])
        except ConfigError as error:
            problems += [f"{label}: {problem}" for problem in error.problems]
            continue
        assert ready is not None
        points.append(Point(label, ready))
    if problems:
        raise ConfigError(problems)
    return points


def _run_child(path: Path, run_dir: Path) -> int:
    # The child finds the same packages as this process, also when the path was set up by a test or a notebook.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    child = subprocess.Popen([sys.executable, "-m", "specforge.launch.sweep", str(path), str(run_dir)], env=environment)
    try:
        return child.wait()
    except KeyboardInterrupt:
        # The terminal signalled the child as well; it says what it kept. A second Ctrl-C ends it.
        try:
            child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGTERM)
            child.wait()
        raise


def _print_table(points: Sequence[Point]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{len(points)} points", title_justify="left")
    for column in ("point", "run folder", "status"):
        table.add_column(column, overflow="fold")
    for point in points:
        style = "green" if point.status == "done" else "red" if point.status.startswith("failed") else "yellow"
        table.add_row(Text(point.label), Text(shown(point.run_dir) if point.run_dir else "-"), Text(point.status, style=style))
    Console().print(table)


if __name__ == "__main__":
    from specforge.cli import guarded
    from specforge.launch.frontend import run_frozen

    sys.exit(guarded(lambda: run_frozen(Path(sys.argv[1]), Path(sys.argv[2]))))
