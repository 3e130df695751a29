"""Where a number lies on an axis, and the round numbers that the axis shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps ``low … high`` to ``start … end`` of the drawing, linearly or by the logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        share = 0.5 if high == low else (at - low) / (high - low)
        return self.start + share * (self.end - self.start)


def linear(
    values: Sequence[float], start: float, end: float, *, zero: bool = False, whole: bool = False, tight: bool = False
) -> tuple[Scale, list[float]]:
    """A scale that holds ``values``, its ends on round numbers, and those numbers.

    ``zero`` makes it begin at 0 (bars, shares); ``whole`` keeps steps between ticks at whole numbers (optimizer steps); ``tight`` ends the
    scale at the last value in place of the next round number.
    """
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high == low:  # one value: room on both sides of it
        margin = abs(high) * 0.1 or 1.0
        low, high = (0.0 if zero else low - margin), high + margin
    step = nice_step((high - low) / 5)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(n * step, 12) for n in range(first, last + 1)]
    if tight:
        return Scale(low, high, start, end), [tick for tick in ticks if low <= tick <= high]
    return Scale(ticks[0], ticks[-1], start, end), ticks


def logarithmic(values: Sequence[float], start: float, end: float) -> tuple[Scale, list[float]]:
    """As :func:`linear` with powers of ten, and 2 and 5 between them where there is room; all ``values`` are positive."""
    low, high = min(values), max(values)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    parts = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [part * 10.0**power for power in range(first, last + 1) for part in parts]
    below = max((t for t in ticks if t <= low * (1 + 1e-9)), default=10.0**first)
    above = min((t for t in ticks if t >= high * (1 - 1e-9)), default=10.0**last)
    if below == above:
        below, above = below / 2, above * 2
    return Scale(below, above, start, end, log=True), [t for t in ticks if below <= t <= above]


def nice_step(rough: float) -> float:
    """The round step (1, 2, 2.5 or 5 times a power of ten) that is at least ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(part * power for part in (1, 2, 2.5, 5, 10) if part * power >= rough * (1 - 1e-9))


def tick_label(value: float) -> str:
    """As short as it can be read: 1.5, 20k, 3M, 2e-4."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    if size and size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.6g}"
