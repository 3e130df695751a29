"""The tables of the page: runs at a glance, the numbers under a chart, configuration differences, hardware."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from typing import Any

from specforge.config.diff import ABSENT, DEFAULT_IGNORE, Side, compare_all
from specforge.launch.sweep_record import shown_seconds
from specforge.report.plots import NUM_COLORS, BarChart, LineChart
from specforge.report.run_data import RunData, number
from specforge.report.verdict import MEASURE, Ranking, Trend, trend_of

MAX_ROWS = 250
# What a configuration says of the place where it ran; the table of hardware says it better.
_ELSEWHERE = (*DEFAULT_IGNORE, "num_threads")
_TREND_CLASS: dict[Trend, str] = {"still improving": "rising", "past its best": "falling"}


def text(value: Any) -> str:
    """Escaped for HTML, in text and in attributes."""
    return html.escape(str(value), quote=True)


def swatch(index: int) -> str:
    """The little line that stands for a run."""
    style = f"c{index % NUM_COLORS} d{index // NUM_COLORS % 3}"
    return f'<svg class="swatch" viewBox="0 0 24 10" aria-hidden="true"><path class="line {style}" d="M1 5H23"/></svg>'


def summary(runs: Sequence[RunData], ranking: Ranking) -> str:
    """One row a run, best first; the best of each column is marked when there are several runs."""
    columns: list[tuple[str, list[str], int | None]] = [
        ("decoded accept_length", *_with_best([_decoded(run) for run in runs])),
        (f"best {MEASURE}", *_with_best([_best(run, MEASURE) for run in runs])),
        ("trend", [_trend(run) for run in runs], None),
        ("best simulated_acc_len", *_with_best([_best(run, "simulated_acc_len") for run in runs])),
        ("last loss", [_or_dash(number(run.train[-1].get("loss")) if run.train else None, ".4g") for run in runs], None),
        ("steps", [_or_dash(run.steps, "d") for run in runs], None),
        ("training time", ["–" if run.seconds is None else shown_seconds(run.seconds) for run in runs], None),
        ("tokens/s (median)", [_or_dash(_median(run, "tokens_per_second"), ",.0f") for run in runs], None),
        ("state", [_state(run) for run in runs], None),
    ]
    head = "".join(f"<th>{text(name)}</th>" for name in ("run", *(name for name, _, _ in columns)))
    body = []
    for i in ranking.order:
        cells = "".join(
            f'<td class="{"best" if best == i and len(runs) > 1 else "wide" if name == "trend" else ""}">{cells[i]}</td>'
            for name, cells, best in columns
        )
        folder = "" if runs[i].folder.name in runs[i].label else f"<small>{text(runs[i].folder.name)}</small>"
        body.append(f"<tr><td>{swatch(i)} {text(runs[i].label)}{folder}</td>{cells}</tr>")
    return f'<div class="scroll"><table class="summary"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def numbers(chart: LineChart | BarChart) -> str:
    """The numbers of a chart, folded away below it; long ones are thinned evenly, and say so."""
    if isinstance(chart, BarChart):
        rows = [
            [name, *("–" if row[i] is None else chart.hints[r][i] for r, row in enumerate(chart.values))]
            for i, name in enumerate(chart.groups)
        ]
        return _folded(chart.x_label, chart.labels, rows, "")
    known = [(line, dict(line.known)) for line in chart.series if line.known]
    steps = sorted({x for _, points in known for x in points})
    every = -(-len(steps) // MAX_ROWS)
    shown = [step for place, step in enumerate(steps) if place % every == 0 or place == len(steps) - 1]
    note = f"every {every}th of {len(steps)} rows; metrics.jsonl has all" if every > 1 else ""
    rows = [[f"{step:g}", *(_or_dash(points.get(step), ".5g") for _, points in known)] for step in shown]
    return _folded(chart.x_label, [line.label for line, _ in known], rows, note)


def _folded(first: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
    head = "".join(f"<th>{text(name)}</th>" for name in (first, *columns))
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    said = f'<p class="soft">{text(note)}</p>' if note else ""
    return f'<details><summary>numbers</summary>{said}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'


def differences(runs: Sequence[RunData]) -> str:
    """The matrix of what differs between the configurations; for one run what its command line set."""
    from specforge.config.compose import flatten

    if len(runs) == 1:
        return '<p class="soft">One run: nothing to compare. Its whole configuration is in config.yaml of the run folder.</p>'
    sides = [Side(run.label, run.choices, flatten(run.config)) for run in runs]
    matrix = compare_all(sides, _ELSEWHERE)
    if not matrix:
        return '<p class="soft">The configurations compute the same; names, paths, launcher and tracker are left out.</p>'
    rows = [(f"{key} (option)", values) for key, values in matrix.choices.items()]
    rows += [(key, values) for key, values in matrix.values.items()]
    return table(["key", *matrix.labels], [[key, *(_value(value) for value in values)] for key, values in rows])


def hardware(runs: Sequence[RunData]) -> str:
    """Facts of ``env.json`` and ``plan.json``, a row each, a column a run."""
    facts = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for one in facts for name in one))
    shared = {name for name in names if len({one.get(name) for one in facts}) == 1}
    if len(runs) == 1 or len(shared) == len(names):
        return table(["", "all runs" if len(runs) > 1 else runs[0].label], [[text(name), text(facts[0][name])] for name in names])
    own = table(
        ["", *(run.label for run in runs)], [[text(n), *(text(one.get(n, "–")) for one in facts)] for n in names if n not in shared]
    )
    return own + table(["", "the same in all runs"], [[text(name), text(facts[0][name])] for name in names if name in shared])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of words. Cells are HTML already, headings are not."""
    top = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="card scroll"><table class="text"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(run: RunData) -> dict[str, str]:
    env = run.env
    git, packages = env.get("git") or {}, env.get("packages") or {}
    devices = env.get("accelerators") or []
    roles = ", ".join(
        f"{r.get('processes')} × {r.get('role')} on {r.get('device')}" for r in run.plan.get("roles") or [] if isinstance(r, dict)
    )
    commit = f"{str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}" if git.get("commit") else None
    found = {
        "accelerators": ", ".join(f"{devices.count(name)} × {name}" for name in dict.fromkeys(devices)) or ("none seen" if env else None),
        "device": env.get("device"),
        "CPU cores": env.get("cpu_count"),
        "host": env.get("host"),
        "platform": env.get("platform"),
        "processes": roles or None,
        "started": env.get("time"),
        "specforge": env.get("specforge"),
        "commit": commit,
        "python": env.get("python"),
        **{str(name): version for name, version in packages.items()},
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def _value(value: Any) -> str:
    if value is ABSENT:
        return '<span class="absent">–</span>'
    return text("null" if value is None else str(value).lower() if isinstance(value, bool) else value)


def _state(run: RunData) -> str:
    return {"done": "finished", "running": "at work", "stopped": "stopped before its end", "new": "not begun"}[run.state]


def _trend(run: RunData) -> str:
    verdict = trend_of(run)
    return f'<span class="{_TREND_CLASS.get(verdict.trend, "soft")}">{verdict.trend}</span><small>{text(verdict.why)}</small>'


def _best(run: RunData, name: str) -> tuple[float, str] | None:
    pair = run.best(name)
    return None if pair is None else (pair[0], f"{pair[0]:.3f}<small>at step {pair[1]}</small>")


def _decoded(run: RunData) -> tuple[float, str] | None:
    measured = run.decoded
    if measured is None or measured.accept_length is None:
        return None
    interval = f"95 % {measured.interval[0]:.3f} – {measured.interval[1]:.3f}" if measured.interval else "no interval stored"
    return measured.accept_length, f"{measured.accept_length:.3f}<small>{interval}</small>"


def _with_best(cells: Sequence[tuple[float, str] | None]) -> tuple[list[str], int | None]:
    known = [(cell[0], -i) for i, cell in enumerate(cells) if cell is not None]
    return ["–" if cell is None else cell[1] for cell in cells], (-max(known)[1] if known else None)


def _median(run: RunData, name: str) -> float | None:
    values = [value for row in run.train if (value := number(row.get(name))) is not None]
    return statistics.median(values) if values else None


def _or_dash(value: float | None, style: str) -> str:
    return "–" if value is None else format(value, style)
