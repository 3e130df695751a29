"""Scales, ticks and the marks of a drawing, against numbers worked out by hand."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from specforge.report.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, BarChart, LineChart, Series, bar_svg, line_svg, thin
from specforge.report.scale import linear, logarithmic, nice_step, tick_label


@pytest.mark.parametrize(("rough", "step"), [(0.3, 0.5), (1.0, 1.0), (1.1, 2.0), (22, 25), (26, 50), (0.0009, 0.001), (7e5, 1e6)])
def test_steps_between_ticks_are_round(rough: float, step: float) -> None:
    assert nice_step(rough) == pytest.approx(step)


def test_a_linear_scale_ends_on_round_numbers() -> None:
    scale, ticks = linear([1.03, 3.31], 200, 0)
    assert ticks == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5] and (scale(1.0), scale(3.5), scale(2.25)) == (200, 0, 100)
    scale, ticks = linear([0.2, 0.9], 0, 1, zero=True)
    assert ticks[0] == 0 and ticks[-1] == 1.0
    scale, ticks = linear([0, 600], 0, 100, whole=True, tight=True)
    assert scale(600) == 100 and all(float(tick).is_integer() for tick in ticks)
    assert linear([1, 3], 0, 1, whole=True)[1] == [1, 2, 3]


def test_one_value_has_room_around_it() -> None:
    scale, ticks = linear([2.0, 2.0], 100, 0)
    assert 0 < scale(2.0) < 100 and len(ticks) >= 2
    scale, ticks = linear([0.0], 100, 0)
    assert len(ticks) >= 2 and 0 < scale(0.0) < 100


def test_a_logarithmic_scale() -> None:
    scale, ticks = logarithmic([1.9, 48.0], 0, 100)
    assert ticks == [1, 2, 5, 10, 20, 50] and scale(1) == 0 and scale(50) == pytest.approx(100)
    assert scale(10) - scale(1) == pytest.approx(scale(20) - scale(2))
    assert logarithmic([1e-6, 1e3], 0, 1)[1] == pytest.approx([10.0**k for k in range(-6, 4)])


@pytest.mark.parametrize(
    ("value", "label"),
    [(0, "0"), (1.5, "1.5"), (20000, "20k"), (3e6, "3M"), (2e-4, "2e-4"), (2.5e-5, "2.5e-5"), (0.001, "0.001"), (-5, "-5")],
)
def test_labels_of_ticks(value: float, label: str) -> None:
    assert tick_label(value) == label


def test_a_line_is_drawn_where_its_numbers_lie_and_breaks_where_one_is_missing() -> None:
    chart = LineChart("t", "step", "y", [Series(1, "a <b>", [(0, 0.0), (50, 1.0), (75, None), (100, 2.0)])])
    svg = ElementTree.fromstring(line_svg(chart))
    [line] = [e for e in svg.iter() if "line" in e.get("class", "").split() and e.tag == "path"]
    assert line.get("class") == "mark line c1 d0" and line.get("data-run") == "1"
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    middle_x, middle_y = (LEFT + right) / 2, (TOP + bottom) / 2
    assert line.get("d") == f"M{LEFT:.1f} {bottom:.1f}L{middle_x:.1f} {middle_y:.1f}M{right:.1f} {TOP:.1f}"
    dots = list(svg.iter("circle"))
    assert len(dots) == 3 and dots[1].get("cx") == f"{middle_x:.1f}" and "a <b>: 1 at 50" in "".join(dots[1].itertext())
    assert svg.get("data-x0") == "0" and svg.get("data-x1") == "100"
    assert {"step", "y", "0", "100", "2"} <= {"".join(e.itertext()) for e in svg.iter("text")}


def test_error_bars_are_part_of_the_axis() -> None:
    chart = LineChart("t", "step", "y", [Series(0, "a", [(0, 1.0), (10, 2.0)], [None, (1.5, 3.9)])])
    svg = line_svg(chart)
    [bar] = re.findall(r'<path class="mark spread[^>]*d="M([\d.]+) ([\d.]+)V([\d.]+)', svg)
    x, low, high = map(float, bar)
    assert x == WIDTH - RIGHT and TOP <= high < low
    assert ">4<" in svg, "the axis reaches above the end of the bar"


def test_a_logarithm_is_taken_only_where_numbers_allow_it() -> None:
    wide = LineChart("t", "s", "loss", [Series(0, "a", [(1, 50.0), (2, 2.0)])], log=True)
    assert "loss (log scale)" in line_svg(wide)
    for points in ([(1, 50.0), (2, 20.0)], [(1, 50.0), (2, 0.0)], [(1, 50.0), (2, -1.0)]):
        assert "log scale" not in line_svg(LineChart("t", "s", "loss", [Series(0, "a", points)], log=True))


def test_charts_share_an_axis_that_reaches_further_than_their_numbers() -> None:
    alone = LineChart("t", "s", "y", [Series(0, "a", [(0, 0.1), (1, 0.2)])], zero=True)
    assert ">0.9<" not in line_svg(alone)
    svg = line_svg(LineChart("t", "s", "y", [Series(0, "a", [(0, 0.1), (1, 0.2)])], zero=True, reach=[0.9]))
    assert ">0.8<" in svg or ">1<" in svg


def test_bars_stand_side_by_side_and_their_heights_are_shares() -> None:
    chart = BarChart("t", "x", "y", ["0", "1"], [0, 3], ["a", "b"], [[0.5, 1.0], [0.25, None]], [["5 of 10", "10 of 10"], ["1 of 4", ""]])
    svg = ElementTree.fromstring(bar_svg(chart))
    bars = list(svg.iter("rect"))
    heights = [float(e.get("height")) for e in bars]
    assert len(bars) == 3 and heights[0] == pytest.approx(heights[1] / 2, abs=0.1) == pytest.approx(2 * heights[2], abs=0.2)
    assert float(bars[2].get("x")) == pytest.approx(float(bars[0].get("x")) + float(bars[0].get("width")) + 1.5, abs=0.2)
    assert ["".join(e.itertext()) for e in bars] == ["a: 5 of 10", "a: 10 of 10", "b: 1 of 4"]
    assert bars[2].get("class") == "mark bar c3 d0"


def test_more_runs_than_colours_are_dashed() -> None:
    many = [Series(i, str(i), [(0, i), (1, i + 1)]) for i in range(20)]
    classes = re.findall(r'class="mark line (c\d d\d)"', line_svg(LineChart("t", "s", "y", many)))
    assert len(classes) == len(set(classes)) == 20


def test_thinning_keeps_ends_and_peaks() -> None:
    points = [(i, float(i % 7)) for i in range(10_000)]
    points[4321] = (4321, 99.0)
    points[7654] = (7654, -99.0)
    kept = thin(points, 500)
    assert len(kept) <= 500 and kept[0] == points[0] and kept[-1] == points[-1]
    assert points[4321] in kept and points[7654] in kept and kept == sorted(kept)
    assert thin(points[:500], 500) == points[:500]


def test_titles_and_labels_cannot_leave_the_drawing() -> None:
    svg = line_svg(LineChart('<a" b>', "<s>", "<y>", [Series(0, "<script>", [(0, 1), (1, 2)])]))
    assert "<script" not in svg and "<s>" not in svg and ElementTree.fromstring(svg).get("aria-label") == '<a" b>'
