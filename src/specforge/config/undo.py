"""Bad input costs nothing, also when it is found after freezing: the files that freezing wrote are taken back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from specforge.config.freeze import CONFIG_FILE
from specforge.errors import ConfigError, SpecForgeError

_FROZEN = re.compile(rf"{re.escape(CONFIG_FILE)}|config\.\d+\.yaml|overrides\.yaml|env\.json|plan\.json")


class Undo:
    """What freezing wrote, and what was there before. ``continued`` is the existing run folder that a command works on, if any."""

    def __init__(self, continued: Path | None) -> None:
        self.continued = continued
        self.before = {} if continued is None else {path: path.read_bytes() for path in _frozen_files(continued)}
        self.made: tuple[Path, Path] | None = None  # the run folder and the configuration file

    def put_back(self) -> bool:
        """An existing run gets its files back; a new folder goes (then True) if nothing but frozen files came into it."""
        if self.made is None:
            return False
        run_dir, path = self.made
        if self.continued is None:
            return _remove_unused(run_dir)
        for new in set(_frozen_files(run_dir)) - self.before.keys():
            new.unlink()
        for old, content in self.before.items():
            if old.read_bytes() != content:
                old.write_bytes(content)
        if path.parent != run_dir:  # a command on a run keeps its configuration in a subfolder
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds earlier results
                path.parent.rmdir()
        return False


def _frozen_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _FROZEN.fullmatch(path.name)]


def _remove_unused(run_dir: Path) -> bool:
    written = list(run_dir.iterdir())
    if any(not _FROZEN.fullmatch(path.name) and path.name != ".lock" for path in written):
        return False
    for path in written:
        path.unlink()
    run_dir.rmdir()
    with contextlib.suppress(OSError):  # other runs of this name are in it
        run_dir.parent.rmdir()
    return True


@contextlib.contextmanager
def undone_when_refused(continued: Path | None, report: Callable[[str], None]) -> Iterator[Undo]:
    """Put back what freezing wrote when an error of bad input ends the block; set ``made`` once there is something.

    ``report`` is told when the run folder that it was shown is gone.
    """
    undo = Undo(continued)
    try:
        yield undo
    except SpecForgeError as error:
        if error.exit_code == ConfigError.exit_code and undo.put_back():
            report("run folder removed again, since nothing came into it")
        raise
