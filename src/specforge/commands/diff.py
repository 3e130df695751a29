"""``specforge diff A B``: what differs between two runs, YAML files or quoted override lists.

Exit code 1 when something differs, 0 when nothing does, 2 when a side cannot be read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from specforge.config.diff import DEFAULT_IGNORE, Difference, compare, read_side


def main(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` (without the command word), print the table, return the exit code."""
    options = _parser().parse_args(list(arguments))
    directories = [options.config_dir] if options.config_dir else []
    first = read_side(options.first, extra_dirs=directories)
    second = read_side(options.second, extra_dirs=directories)
    ignore = DEFAULT_IGNORE if options.ignore is None else [key for part in options.ignore for key in part.split(",") if key]
    difference = compare(first, second, ignore)
    if options.json:
        print(json.dumps(vars(difference), indent=2, default=str))
    else:
        _print(difference, first.label, second.label, ignore)
    return 1 if difference else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specforge diff", description="Compare two configurations: changed options first, then keys. Exit code 1 when they differ."
    )
    parser.add_argument("first", metavar="A", help='run folder, YAML file, or overrides in quotes: "draft=llama optimizer.lr=1e-4"')
    parser.add_argument("second", metavar="B", help='as A; "" is the default configuration')
    left_out = f"dotted prefixes to leave out, separated by commas (default {','.join(DEFAULT_IGNORE)}; --ignore= compares all)"
    parser.add_argument("--ignore", action="append", metavar="KEYS", help=left_out)
    parser.add_argument("--config-dir", metavar="DIR", help="your own options, for override lists")
    parser.add_argument("--json", action="store_true", help="print plain JSON")
    return parser


def _print(difference: Difference, first: str, second: str, ignore: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not difference:
        left_out = f" (ignored: {', '.join(ignore)})" if ignore else ""
        console.print(f"no difference{left_out}", soft_wrap=True, markup=False, highlight=False)
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


def _sections(difference: Difference) -> list[tuple[str, list[tuple[str, str, str]]]]:
    return [
        ("changed options", [(k, _show(a), _show(b)) for k, (a, b) in difference.choices.items()]),
        ("changed values", [(k, _show(a), _show(b)) for k, (a, b) in difference.changed.items()]),
        ("only in the first", [(k, _show(v), "") for k, v in difference.removed.items()]),
        ("only in the second", [(k, "", _show(v)) for k, v in difference.added.items()]),
    ]


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
