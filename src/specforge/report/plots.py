"""Charts as inline SVG text: lines over steps, bars over groups. No library, no script: the drawing is complete without one.

Colours are classes (``c0`` … ``c7``, dashes ``d0`` …) which the page's style sheet fills for light and dark. Every mark has the class
``mark`` and its run's number, so that a script can hide it and a test can count it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specforge.report.scale import Scale, linear, logarithmic, tick_label

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 44
NUM_COLORS = 8
MAX_POINTS = 500
DOTS_UP_TO = 40

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """One line. ``points`` ascend in x; a null y breaks the line. ``spread`` gives (low, high) of a point for an error bar."""

    run: int
    label: str
    points: Sequence[Point]
    spread: Sequence[tuple[float, float] | None] = ()

    @property
    def known(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if y is not None]


@dataclass(frozen=True)
class LineChart:
    """Lines of several runs over one axis. ``log`` asks for a logarithmic y axis where the numbers allow one."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log: bool = False
    zero: bool = False
    reach: Sequence[float] = ()  # values that the y axis must hold as well, so that charts beside each other share one

    @property
    def empty(self) -> bool:
        return not any(line.known for line in self.series)


@dataclass(frozen=True)
class BarChart:
    """``values[run][group]``, side by side within each group; null draws nothing."""

    title: str
    x_label: str
    y_label: str
    groups: Sequence[str]
    runs: Sequence[int]
    labels: Sequence[str]
    values: Sequence[Sequence[float | None]]
    hints: Sequence[Sequence[str]] = field(default_factory=tuple)

    @property
    def empty(self) -> bool:
        return not any(value is not None for row in self.values for value in row)


def line_svg(chart: LineChart) -> str:
    """The drawing of a line chart that is not empty."""
    known = [point for line in chart.series for point in line.known]
    heights = [y for _, y in known] + [edge for line in chart.series for ends in line.spread if ends for edge in ends]
    log = chart.log and min(heights) > 0 and max(heights) / min(heights) >= 10
    steps = [x for x, _ in known]
    if 0 < min(steps) < 0.2 * max(steps):  # a line that begins near 0 is read from there
        steps.append(0)
    x, x_ticks = linear(steps, LEFT, WIDTH - RIGHT, whole=all(float(x).is_integer() for x in steps), tight=True)
    heights += chart.reach
    y, y_ticks = logarithmic(heights, HEIGHT - BOTTOM, TOP) if log else linear(heights, HEIGHT - BOTTOM, TOP, zero=chart.zero)
    y_label = f"{chart.y_label} (log scale)" if log else chart.y_label
    parts = [_axes(x, y, [(tick, tick_label(tick)) for tick in x_ticks], y_ticks, chart.x_label, y_label)]
    parts += [_line(line, x, y) for line in chart.series if line.known]
    geometry = f'data-x0="{x.low}" data-x1="{x.high}" data-left="{LEFT}" data-right="{WIDTH - RIGHT}" data-top="{TOP}" data-bottom="{HEIGHT - BOTTOM}"'
    return _svg("".join(parts), chart.title, "lines", geometry)


def bar_svg(chart: BarChart) -> str:
    """The drawing of a bar chart that is not empty."""
    known = [value for row in chart.values for value in row if value is not None]
    y, y_ticks = linear([*known, 0.0], HEIGHT - BOTTOM, TOP, zero=True)
    room = (WIDTH - RIGHT - LEFT) / len(chart.groups)
    width = min(26.0, 0.78 * room / len(chart.runs))
    x = Scale(0, len(chart.groups), LEFT, WIDTH - RIGHT)
    bars = []
    for place, (run, row) in enumerate(zip(chart.runs, chart.values, strict=True)):
        for group, value in enumerate(row):
            if value is None:
                continue
            left = LEFT + room * (group + 0.5) + width * (place - len(chart.runs) / 2)
            top = y(value)
            hint = chart.hints[place][group] if chart.hints else f"{value:.4g}"
            bars.append(
                f'<rect class="mark bar {_style(run)}" data-run="{run}" x="{left:.1f}" y="{top:.1f}" width="{max(width - 1.5, 1):.1f}" '
                f'height="{max(y(0.0) - top, 0.6):.1f}" rx="1.5"><title>{html.escape(chart.labels[place])}: {html.escape(hint)}</title></rect>'
            )
    ticks = [(group + 0.5, name) for group, name in enumerate(chart.groups)]
    return _svg(_axes(x, y, ticks, y_ticks, chart.x_label, chart.y_label, grid=False) + "".join(bars), chart.title, "bars", "")


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most ``limit`` points that keep the outline: of each stretch of the line its lowest and its highest point."""
    if len(points) <= limit:
        return list(points)
    kept: list[Point] = [points[0]]
    size = 2 * (len(points) - 2) / (limit - 2)
    for number in range((limit - 2) // 2):
        stretch = points[1 + int(number * size) : 1 + int((number + 1) * size)]
        known = [(y, i) for i, (_, y) in enumerate(stretch) if y is not None]
        if known:
            kept += [stretch[i] for i in sorted({min(known)[1], max(known)[1]})]
    return [*kept, points[-1]]


def _line(line: Series, x: Scale, y: Scale) -> str:
    points = thin(line.points)
    path, pen_down = [], False
    for at, value in points:
        if value is None:
            pen_down = False
            continue
        path.append(f"{'L' if pen_down else 'M'}{x(at):.1f} {y(value):.1f}")
        pen_down = True
    style, run = _style(line.run), f'data-run="{line.run}"'
    parts = [f'<path class="mark line {style}" {run} d="{"".join(path)}"/>'] if len(path) > 1 else []
    for (at, _), ends in zip(line.points, line.spread, strict=False):
        if ends:
            low, high, middle = y(ends[0]), y(ends[1]), x(at)
            parts.append(
                f'<path class="mark spread {style}" {run} d="M{middle:.1f} {low:.1f}V{high:.1f}M{middle - 4:.1f} {low:.1f}h8M{middle - 4:.1f} {high:.1f}h8"/>'
            )
    if len(line.known) <= DOTS_UP_TO:
        parts += [
            f'<circle class="mark dot {style}" {run} cx="{x(at):.1f}" cy="{y(value):.1f}" r="2.8"><title>{html.escape(line.label)}: '
            f"{value:.5g} at {tick_label(at)}</title></circle>"
            for at, value in line.known
        ]
    return "".join(parts)


def _axes(
    x: Scale, y: Scale, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[float], x_label: str, y_label: str, grid: bool = True
) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick_label(tick)}</text>')
    every = max(1, math.ceil(len(x_ticks) / 10))
    for place, (tick, label) in enumerate(x_ticks):
        if grid:
            parts.append(f'<line class="grid faint" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{bottom}"/>')
        if place % every == 0:
            parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{bottom + 17}" text-anchor="middle">{html.escape(label)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="name" x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 7}" text-anchor="middle">{html.escape(x_label)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text class="name" transform="translate(13 {middle:.0f}) rotate(-90)" text-anchor="middle">{html.escape(y_label)}</text>'
    )
    return "".join(parts)


def _style(run: int) -> str:
    """Eight colours, then the same ones dashed, then dotted."""
    return f"c{run % NUM_COLORS} d{run // NUM_COLORS % 3}"


def _svg(inside: str, title: str, kind: str, geometry: str) -> str:
    return (
        f'<svg class="plot {kind}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title, quote=True)}" '
        f'preserveAspectRatio="xMidYMid meet" {geometry}>{inside}</svg>'
    )
