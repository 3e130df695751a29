"""The table at the end of a sweep: every point, how it ended and what it reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specforge.errors import SpecForgeError
from specforge.launch.sweep_record import PointRecord, shown_seconds

STYLES = {
    "done": "green",
    "failed": "red",
    "refused": "red",
    "interrupted": "yellow",
    "running": "cyan",
    "submitted": "cyan",
    "in use": "cyan",
}


@dataclass(frozen=True)
class Result:
    """What a point's run folder says. Held-out numbers are the best of the run, ``accept_length`` the newest decoded one."""

    simulated_acc_len: float | None = None
    walk_accept_length: float | None = None
    accept_length: float | None = None
    seconds: float | None = None


def result_of(point: PointRecord) -> Result:
    """Read the point's run folder; nothing is known of one that is not there or not readable."""
    from specforge.report.run_data import read_run

    if point.folder is None:
        return Result(seconds=point.seconds or None)
    try:
        run = read_run(point.folder)
    except (SpecForgeError, OSError):
        return Result(seconds=point.seconds or None)
    simulated, walk, decoded = run.best("simulated_acc_len"), run.best("walk_accept_length"), run.decoded
    return Result(
        simulated[0] if simulated else None,
        walk[0] if walk else None,
        decoded.accept_length if decoded else None,
        point.seconds or run.seconds,
    )


def print_table(points: Sequence[PointRecord], skipped: Sequence[str], folder: str) -> None:
    """``skipped`` are the ids of points that an earlier start finished; ``folder`` is the sweep's, as it can be typed."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from specforge.launch.frontend import shown

    results = [result_of(point) for point in points]
    scores = [result.walk_accept_length for result in results]
    best = max((score for score in scores if score is not None), default=None)
    decoded = any(result.accept_length is not None for result in results)
    table = Table(title=f"{len(points)} points", title_justify="left", caption=f"sweep folder {folder}", caption_justify="left")
    for column in ("point", "status"):
        table.add_column(column, overflow="fold")
    for column in ("best simulated_acc_len", "best walk_accept_length", *(["accept_length"] if decoded else []), "time"):
        table.add_column(column, justify="right")
    table.add_column("run folder", overflow="fold")
    for point, result in zip(points, results, strict=True):
        walk = Text(_shown(result.walk_accept_length), style="bold" if best is not None and result.walk_accept_length == best else "")
        table.add_row(
            Text(point.label),
            Text(_status(point, point.id in skipped), style=STYLES.get(point.status, "dim")),
            _shown(result.simulated_acc_len),
            walk,
            *([_shown(result.accept_length)] if decoded else []),
            "-" if result.seconds is None else shown_seconds(result.seconds),
            Text(shown(point.folder) if point.folder else "-"),
        )
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width; folded paths could not be copied from it
        console.width = 200
    console.print(table)
    for point in points:
        if point.note:
            console.print(f"{point.label}: {point.note}", markup=False, highlight=False, soft_wrap=True)


def _status(point: PointRecord, skipped: bool) -> str:
    if point.status == "done" and skipped:
        return "done before, skipped"
    if point.status == "failed":
        return f"failed (exit code {point.exit_code})" if point.exit_code is not None else "failed"
    return point.status


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
