"""The page: one HTML file that needs nothing else, neither a network nor a script to be read."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from importlib import resources

from specforge.report.charts import Group, Panel, groups
from specforge.report.plots import BarChart, bar_svg, line_svg, thin
from specforge.report.run_data import RunData
from specforge.report.tables import differences, hardware, numbers, summary, swatch, table, text
from specforge.report.verdict import MEASURE, RULE, Ranking, rank, trend_of


def render(runs: Sequence[RunData], title: str, notes: Sequence[str] = ()) -> str:
    """The HTML of a report on ``runs``, whose labels are unique. ``notes`` are about the choice of runs.

    Runs are shown best first everywhere, so that the best ones have the colours that are told apart most easily.
    """
    runs = [runs[i] for i in rank(runs).order]
    ranking = rank(runs)
    data: dict[str, list[dict[str, object]]] = {}
    sections = [_section(group, data) for group in groups(runs)]
    body = [
        _header(title, runs),
        _headline(runs, ranking),
        summary(runs, ranking),
        f'<p class="soft">{text(RULE)}</p>',
        _legend(runs),
        *sections,
        f"<h2>Configuration differences</h2>{differences(runs)}",
        f"<h2>Hardware and versions</h2>{hardware(runs)}",
        f"<h2>Command lines</h2>{_command_lines(runs)}",
        f"<h2>Evaluations</h2>{_evaluations(runs)}",
        f"<h2>Missing and left out</h2>{_notes(runs, notes)}",
    ]
    files = resources.files("specforge.report")
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{text(title)}</title><style>\n{style}</style></head>\n<body><main>\n'
        + "\n".join(body)
        + f'\n</main>\n<script type="application/json" id="charts">{_json(data)}</script>\n<script>\n{script}</script></body></html>\n'
    )


def _header(title: str, runs: Sequence[RunData]) -> str:
    count = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    made = time.strftime("%Y-%m-%d %H:%M")
    return (
        f'<header><div><h1>{text(title)}</h1><p class="soft">{count} · written {made} by specforge report</p></div>'
        '<button id="theme" type="button">light / dark</button></header>'
    )


def _headline(runs: Sequence[RunData], ranking: Ranking) -> str:
    """Which run is better and whether it still improves, in one sentence, with what limits it below."""
    first = runs[ranking.order[0]]
    value = ranking.values[ranking.order[0]]
    limits = "".join(f'<p class="soft">Note: {text(note)}.</p>' for note in ranking.notes) if len(runs) > 1 else ""
    if value is None:
        return f'<div class="headline"><p>No held-out number and no decoded accept_length yet.</p>{limits}</div>'
    who = f"Best of {len(runs)}: <b>{text(first.label)}</b>, " if len(runs) > 1 else ""
    said = f"{who}{ranking.measure} <b>{value:.3f}</b>{_evidence(first, ranking.measure)}."
    if len(runs) > 1 and (second := ranking.values[ranking.order[1]]) is not None:
        said += f" Next: {text(runs[ranking.order[1]].label)}, {second:.3f}."
    verdict = trend_of(first)
    if verdict.trend != "unknown":
        said += f" By {MEASURE} it is {verdict.trend}: {text(verdict.why)}."
    return f'<div class="headline"><p>{said}</p>{_measured_how(first, ranking.measure)}{limits}</div>'


def _evidence(run: RunData, measure: str) -> str:
    if measure == MEASURE:
        best = run.best(MEASURE)
        return f" at step {best[1]} of {run.steps}" if best else ""
    measured = run.decoded
    return f" (95 % interval {measured.interval[0]:.3f} – {measured.interval[1]:.3f})" if measured and measured.interval else ""


def _measured_how(run: RunData, measure: str) -> str:
    measured = run.decoded
    if measure == MEASURE or measured is None:
        return '<p class="soft">From held-out features while training; specforge evaluate measures it by decoding.</p>'
    steps = measured.decoding.get("num_verify_steps")
    return f'<p class="soft">Decoded: {text(measured.draft)}{f", {steps} verify steps" if steps else ""}, {text(measured.settings)}.</p>'


def _legend(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        return ""
    buttons = "".join(
        f'<button type="button" data-run="{i}" aria-pressed="true" title="hide or show; with shift only this one">{swatch(i)}{text(run.label)}</button>'
        for i, run in enumerate(runs)
    )
    return f'<nav class="legend" aria-label="runs">{buttons}</nav>'


def _section(group: Group, data: dict[str, list[dict[str, object]]]) -> str:
    return f'<h2>{text(group.title)}</h2><div class="cards">{"".join(_card(panel, data) for panel in group.panels)}</div>'


def _card(panel: Panel, data: dict[str, list[dict[str, object]]]) -> str:
    """A panel with its drawing and its numbers, or with what to do to have some."""
    chart = panel.chart
    head = f'<h3>{text(chart.title)}</h3><p class="about">{text(panel.about)}</p>'
    if chart.empty:
        return f'<section class="card" data-empty="true">{head}<div class="empty">no data. {text(panel.missing)}</div></section>'
    if isinstance(chart, BarChart):
        return f'<section class="card">{head}{bar_svg(chart)}{numbers(chart)}</section>'
    name = f"chart{len(data)}"
    data[name] = [
        {"run": line.run, "label": line.label, "points": [[x, float(f"{y:.6g}")] for x, y in thin(line.known) if y is not None]}
        for line in chart.series
        if line.known
    ]
    svg = line_svg(chart).replace("<svg ", f'<svg data-chart="{name}" ', 1)
    return f'<section class="card">{head}{svg}{numbers(chart)}</section>'


def _command_lines(runs: Sequence[RunData]) -> str:
    parts = []
    for i, run in enumerate(runs):
        line = shlex.join(["specforge", *run.overrides])
        parts.append(f'<div class="card">{swatch(i)} {text(run.label)}<p class="soft">{text(run.folder)}</p><pre>{text(line)}</pre></div>')
    return f'<div class="cards">{"".join(parts)}</div>'


def _evaluations(runs: Sequence[RunData]) -> str:
    rows = []
    for run in runs:
        for e in run.evaluations:
            interval = "–" if e.interval is None else f"{e.interval[0]:.3f} – {e.interval[1]:.3f}"
            value = "–" if e.accept_length is None else f"{e.accept_length:.3f}"
            verified = e.decoding.get("num_verify_steps", "–")
            rows.append([*map(text, (run.label, e.file, e.draft, value, interval, verified, e.settings, " · ".join(e.context) or "–"))])
    if not rows:
        return '<p class="soft">No run was decoded. specforge evaluate run=&lt;folder&gt; measures accept_length.</p>'
    return table(["run", "file", "draft", "accept_length", "95 % interval", "verify steps", "settings", "prompts, template"], rows)


def _notes(runs: Sequence[RunData], notes: Sequence[str]) -> str:
    items = [f"<li>{text(note)}</li>" for note in notes]
    items += [f"<li>{text(run.label)}: {text(note)}</li>" for run in runs for note in run.notes]
    return f"<ul>{''.join(items)}</ul>" if items else '<p class="soft">Nothing.</p>'


def _json(data: object) -> str:
    # A label may hold "</script>"; escaped like this it is still the same JSON.
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")
