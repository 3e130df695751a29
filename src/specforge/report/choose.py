"""Which runs a command line means: run folders as they are, a sweep folder as its points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specforge.errors import ConfigError
from specforge.launch.sweep_record import is_sweep, read_record


@dataclass(frozen=True)
class Chosen:
    """A run folder; ``label`` is that of the point when it comes from a sweep."""

    folder: Path
    label: str | None


def choose(texts: Sequence[str], notes: list[str]) -> list[Chosen]:
    """The folders behind ``texts`` in their order, each once. Points without a run folder are told in ``notes``.

    Raises:
        ConfigError: folders that are not there, and a sweep none of whose points has begun; all of them at once.
    """
    found: dict[Path, Chosen] = {}
    problems: list[str] = []
    for text in texts:
        folder = Path(text).expanduser()
        if not folder.is_dir():
            problems.append(f"{text}: no such folder. Give run folders (outputs/<name>/<time>-<hash>) or a sweep folder.")
        elif is_sweep(folder):
            for one in _points(folder, notes, problems):
                found[one.folder.resolve()] = one  # in the place of a folder named before: it has the better label
        else:
            found.setdefault(folder.resolve(), Chosen(folder, None))
    if problems:
        raise ConfigError(problems)
    return list(found.values())


def _points(folder: Path, notes: list[str], problems: list[str]) -> list[Chosen]:
    points = read_record(folder).points.values()
    begun = [Chosen(point.folder, point.label) for point in points if point.folder is not None and point.folder.is_dir()]
    missing = [point.label for point in points if point.folder is None or not point.folder.is_dir()]
    if missing:
        notes.append(
            f"{folder}: {len(missing)} of {len(points)} points have no run folder yet: {'; '.join(missing[:5])}" + " …" * (len(missing) > 5)
        )
    if not begun:
        problems.append(f"{folder}: no point of this sweep has a run folder yet. Start it, or name run folders.")
    return begun
