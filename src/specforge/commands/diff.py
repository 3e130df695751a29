"""``specforge diff A B [C ...]``: what differs between runs, the points of a sweep, YAML files or quoted override lists.

Two sides give one table a kind of difference; more, or a sweep folder, give a matrix: a row for each key that differs, a column a run. Exit
code 1 when something differs, 0 when nothing does, 2 when a side cannot be read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specforge.config.diff import ABSENT, DEFAULT_IGNORE, Difference, Matrix, Side, compare, compare_all, read_side
from specforge.errors import ConfigError


def main(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` (without the command word), print the table, return the exit code."""
    options = _parser().parse_args(list(arguments))
    directories = [options.config_dir] if options.config_dir else []
    ignore = DEFAULT_IGNORE if options.ignore is None else [key for part in options.ignore for key in part.split(",") if key]
    sides, notes = read_sides(options.sides, directories)
    if len(sides) < 2:
        raise ConfigError(f"diff: {', '.join(options.sides) or 'nothing'} — is one side. Name two or more, or a sweep with several runs.")
    if len(sides) == 2:
        difference = compare(sides[0], sides[1], ignore)
        _print_json(vars(difference)) if options.json else _print(difference, sides[0].label, sides[1].label, ignore)
        return 1 if difference else 0
    matrix = compare_all(sides, ignore)
    if options.json:
        absent_as_null = {name: {key: [None if v is ABSENT else v for v in row] for key, row in table.items()} for name, table in
                          (("choices", matrix.choices), ("values", matrix.values))}  # fmt: skip
        _print_json({"runs": matrix.labels, **absent_as_null})
    else:
        _print_matrix(matrix, ignore, notes)
    return 1 if matrix else 0


def read_sides(texts: Sequence[str], directories: Sequence[str] = ()) -> tuple[list[Side], list[str]]:
    """Every side of a comparison, a sweep folder as the runs of its points; and notes on points that have none.

    Raises:
        ConfigError: what cannot be read, all of it at once.
    """
    from specforge.launch.sweep_record import is_sweep
    from specforge.report.choose import choose

    sides: list[Side] = []
    notes: list[str] = []
    problems: list[str] = []
    for text in texts:
        try:
            if text.strip() and is_sweep(Path(text).expanduser()):
                for chosen in choose([text], notes):
                    side = read_side(str(chosen.folder), extra_dirs=directories)
                    side.label = chosen.label or side.label
                    sides.append(side)
            else:
                sides.append(read_side(text, extra_dirs=directories))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return sides, notes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specforge diff", description="Compare configurations: changed options first, then keys. Exit code 1 when they differ."
    )
    what = 'run folder, sweep folder, YAML file, or overrides in quotes: "draft=llama optimizer.lr=1e-4"; "" is the default configuration'
    parser.add_argument("sides", metavar="A", nargs="+", help=what)
    left_out = f"dotted prefixes to leave out, separated by commas (default {','.join(DEFAULT_IGNORE)}; --ignore= compares all)"
    parser.add_argument("--ignore", action="append", metavar="KEYS", help=left_out)
    parser.add_argument("--config-dir", metavar="DIR", help="your own options, for override lists")
    parser.add_argument("--json", action="store_true", help="print plain JSON")
    return parser


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2, default=str))


def _print(difference: Difference, first: str, second: str, ignore: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not difference:
        _print_none(console, ignore)
        return
    for title, rows in _sections(difference):
        if not rows:
            continue
        table = Table(title=f"{title} ({len(rows)})", title_justify="left", title_style="bold")
        table.add_column("key", style="cyan", overflow="fold")
        table.add_column(Text(first), style="red", overflow="fold")
        table.add_column(Text(second), style="green", overflow="fold")
        for key, a, b in rows:
            table.add_row(Text(key), Text(a), Text(b))
        console.print(table)


def _print_matrix(matrix: Matrix, ignore: Sequence[str], notes: Sequence[str]) -> None:
    """Columns are numbers, since the names of many runs side by side leave no room for values; a list says which is which."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 60 + 14 * len(matrix.labels))
    for number, label in enumerate(matrix.labels, 1):
        console.print(f"[{number}] {label}", markup=False, highlight=False, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    if not matrix:
        _print_none(console, ignore)
        return
    for title, rows in (("options that differ", matrix.choices), ("values that differ", matrix.values)):
        if not rows:
            continue
        table = Table(title=f"{title} ({len(rows)})", title_justify="left", title_style="bold")
        table.add_column("key", style="cyan", overflow="fold")
        for number in range(1, len(matrix.labels) + 1):
            table.add_column(f"[{number}]".replace("[", r"\["), overflow="fold")
        for key, values in rows.items():
            table.add_row(Text(key), *(Text(show(value), style="dim" if value is ABSENT else "") for value in values))
        console.print(table)


def _print_none(console: Any, ignore: Sequence[str]) -> None:
    left_out = f" (ignored: {', '.join(ignore)})" if ignore else ""
    console.print(f"no difference{left_out}", soft_wrap=True, markup=False, highlight=False)


def _sections(difference: Difference) -> list[tuple[str, list[tuple[str, str, str]]]]:
    return [
        ("changed options", [(k, show(a), show(b)) for k, (a, b) in difference.choices.items()]),
        ("changed values", [(k, show(a), show(b)) for k, (a, b) in difference.changed.items()]),
        ("only in the first", [(k, show(v), "") for k, v in difference.removed.items()]),
        ("only in the second", [(k, "", show(v)) for k, v in difference.added.items()]),
    ]


def show(value: Any) -> str:
    """A value as YAML would write it; a dash for a key that is not there."""
    if value is ABSENT:
        return "-"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
