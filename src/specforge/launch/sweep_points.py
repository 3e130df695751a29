"""The points of a sweep, composed and checked before any of them starts; one error names everything that does not check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specforge.errors import ConfigError, SpecForgeError
from specforge.launch.frontend import Ready, make_ready, report
from specforge.launch.sweep_record import key_of, point_id

# Each failing composition costs time, and nobody reads more at once.
MAX_FAILURES = 20
SHOW_PROGRESS_FROM = 30


@dataclass
class Point:
    """A checked point. ``label`` holds only the overrides that are swept, ``id`` says what it computes."""

    label: str
    words: list[str]
    ready: Ready
    id: str


def check_points(command: str, shared: Sequence[str], lines: Sequence[Sequence[str]], keys: Sequence[str]) -> list[Point]:
    """Compose and check every line of overrides; ``shared`` are the flags of all, ``keys`` those that are swept.

    Raises:
        ConfigError: what does not check, each problem once with the points that have it; nothing has been started then.
    """
    points: dict[str, Point] = {}
    problems: dict[str, list[str]] = {}
    failures = 0
    for number, line in enumerate(lines, 1):
        if len(lines) >= SHOW_PROGRESS_FROM and number % SHOW_PROGRESS_FROM == 0:
            report(f"checked {number} of {len(lines)} points")
        swept = [word for word in line if key_of(word) in keys]
        label = label_of(swept)
        try:
            point = check_point(command, shared, line, swept, label)
        except SpecForgeError as error:
            if error.exit_code != ConfigError.exit_code:
                raise
            failures += 1
            for problem in getattr(error, "problems", [str(error)]):
                problems.setdefault(problem, []).append(label)
            if failures == MAX_FAILURES and number < len(lines):
                raise ConfigError([*_named(problems, number), f"only {number} of {len(lines)} points were looked at"]) from None
            continue
        if point.id in points:
            report(f"{label} is the same run as {points[point.id].label}, which runs once")
        points.setdefault(point.id, point)
    if problems:
        raise ConfigError(_named(problems, len(lines)))
    _refuse_shared_runs(command, list(points.values()))
    return list(points.values())


def check_point(command: str, shared: Sequence[str], line: Sequence[str], swept: Sequence[str], label: str) -> Point:
    """Compose and check one point."""
    ready = make_ready(command, [*shared, *line])
    assert ready is not None  # the flags that print were refused before
    return Point(label, list(line), ready, point_id(command, ready.config, swept))


def label_of(swept: Sequence[str]) -> str:
    """The swept words for people: the digits of a number that a sampler drew are cut to six."""
    words = []
    for word in swept:
        key, _, value = word.partition("=")
        try:
            short = f"{float(value):.6g}" if len(value) > 8 else value
        except ValueError:
            short = value
        words.append(f"{key}={short}")
    return " ".join(words) or "the only point"


def _named(problems: dict[str, list[str]], num_points: int) -> list[str]:
    """A problem of every point is said as it is, another with the points that have it."""
    named = []
    for problem, labels in problems.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        named.append(problem if len(labels) == num_points else f"{labels[0]}{more}: {problem}")
    return named


def _refuse_shared_runs(command: str, points: Sequence[Point]) -> None:
    """A run goes on in one way: two points in one run folder would overwrite each other."""
    if command != "train":
        return
    owners: dict[str, str] = {}
    for point in points:
        folder = str(point.ready.run_dir) if point.ready.run_dir is not None else ""
        if folder and folder in owners:
            raise ConfigError(
                f"run={folder}: two points ({owners[folder]}, {point.label}) would continue one run in its folder. "
                "Sweep over run= itself, or start new runs without it."
            )
        owners[folder] = point.label
