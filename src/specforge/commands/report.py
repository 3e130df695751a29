"""``specforge report RUN… [--output file.html]``: one self-contained HTML page on any number of runs or on a sweep."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from specforge.errors import ConfigError, RunError
from specforge.report.choose import choose
from specforge.report.run_data import RunData, read_run, unique_labels

DEFAULT_NAME = "report.html"


def main(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` (without the command word), write the page and say where; returns the exit code."""
    from specforge.report.page import render

    options = _parser().parse_args(list(arguments))
    notes: list[str] = []
    chosen = choose(options.runs, notes)
    runs: list[RunData] = []
    problems: list[str] = []
    for one in chosen:
        try:
            runs.append(read_run(one.folder, one.label))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    unique_labels(runs)
    path = output_path(options.output, options.runs, runs)
    title = options.title or (f"{runs[0].label}" if len(runs) == 1 else f"Comparison of {len(runs)} runs")
    _write(path, render(runs, title, notes))
    for note in [*notes, *_shared(runs)]:
        print(f"note: {note}")
    print(f"written: {path} ({path.stat().st_size / 1e6:.2f} MB); open it in a browser")
    return 0


def output_path(output: str | None, texts: Sequence[str], runs: Sequence[RunData]) -> Path:
    """Where the page goes: ``--output``, else into the one run or sweep folder that was named, else here."""
    if output is not None:
        path = Path(output).expanduser()
        return path / DEFAULT_NAME if path.is_dir() else path
    return Path(texts[0]).expanduser() / DEFAULT_NAME if len(texts) == 1 else Path(DEFAULT_NAME)


def _shared(runs: Sequence[RunData]) -> list[str]:
    """The notes of all runs, each once with the runs that it is about."""
    about: dict[str, list[str]] = {}
    for run in runs:
        for note in run.notes:
            about.setdefault(note, []).append(run.label)
    return [f"{labels[0] if len(labels) == 1 else f'{len(labels)} of {len(runs)} runs'}: {note}" for note, labels in about.items()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specforge report", description="Write one self-contained HTML page that compares runs.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders, or a sweep folder (outputs/sweeps/<name>/<hash>)")
    where = f"file to write (default: {DEFAULT_NAME} in the one folder that is named, else in the current folder)"
    parser.add_argument("--output", "-o", metavar="FILE", help=where)
    parser.add_argument("--title", metavar="TEXT", help="heading of the page")
    return parser


def _write(path: Path, page: str) -> None:
    import os

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"--output {path}: cannot be written ({error.strerror}). Name another file.") from error
