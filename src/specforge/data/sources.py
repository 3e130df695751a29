"""Reads chat files line by line: where a dataset lies, which rows are usable, and why the others are not."""

from __future__ import annotations

import difflib
import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from specforge.data.conversation import Conversation, RowFormat, RowProblem, parse_row
from specforge.data.report import DataReport
from specforge.errors import DataError

_PACKAGE = "package://"


def resolve_path(path: str, key: str) -> Path:
    """The file behind ``path``: a file, ``package://<package>/<file>`` inside an installed package, or either with ``.gz`` added.

    Raises :class:`DataError` naming ``key``, the path and close matches of the same folder.
    """
    file = _package_file(path, key) if path.startswith(_PACKAGE) else Path(path).expanduser()
    for candidate in (file, Path(f"{file}.gz")):
        if candidate.is_file():
            return candidate
    if file.is_dir():
        names = sorted(f.name for f in file.iterdir() if ".json" in f.name)
        raise DataError(f"{key}={path} is a folder; give one file. It holds: {', '.join(names[:8]) or 'no .jsonl file'}.")
    raise DataError(f"{key}={path}: no such file. {_suggestion(file)} Give a .jsonl or .jsonl.gz file, for example {key}=data/train.jsonl")


def _package_file(path: str, key: str) -> Path:
    package, _, inner = path[len(_PACKAGE) :].partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"{key}={path}: the package '{package}' is not installed; use the form package://<package>/<file> or a file path.")
    return Path(next(iter(spec.submodule_search_locations))) / inner


def _suggestion(file: Path) -> str:
    folder = file.parent
    if not folder.is_dir():
        return f"The folder {folder} does not exist either."
    names = sorted(f.name for f in folder.iterdir() if f.is_file())
    close = difflib.get_close_matches(file.name, names, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {', '.join(close)} in {folder}?"
    data_files = [name for name in names if ".json" in name]
    return f"{folder} holds: {', '.join(data_files[:8])}." if data_files else f"{folder} holds no .jsonl file."


def read_conversations(
    path: Path, row_format: RowFormat, report: DataReport, *, max_samples: int | None = None, prompts_only: bool = False
) -> Iterator[Conversation]:
    """Usable rows in file order, at most ``max_samples``; every other row goes to ``report`` with file, line and reason.

    Blank lines are no rows. Raises :class:`DataError` when the file itself cannot be read.
    """
    kept = 0
    for number, line in _lines(path):
        if max_samples is not None and kept >= max_samples:
            return
        if not line.strip():
            continue
        report.rows += 1
        where = f"{path.name}:{number}"
        try:
            conversation = parse_row(_decode(line), row_format, prompts_only=prompts_only, where=where, line=number)
        except RowProblem as problem:
            report.skip(where, str(problem))
            continue
        kept += 1
        yield conversation


def _decode(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowProblem(f"not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise RowProblem(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RowProblem("not usable JSON: nested too deeply") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                # A byte order mark is written by some editors and is no part of the first row.
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Check the file, or write it again.") from None
