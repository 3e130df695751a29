"""What a person wants to know first: which run is better, and whether it is still improving. Plain rules, stated where they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specforge.report.run_data import RunData, number

MEASURE = "walk_accept_length"
RISING, FALLING = 0.005, 0.01
RULE = (
    f"Trend: {MEASURE} of the last evaluation beside that of three quarters of the run. “still improving” is a new best with at least "
    f"{100 * RISING:g} % more than then; “past its best” lies {100 * FALLING:g} % or more below the best; everything else is “level”."
)
Trend = Literal["still improving", "level", "past its best", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """``trend`` of one run with the numbers behind it in ``why``."""

    trend: Trend
    why: str


def trend_of(run: RunData) -> Verdict:
    """Whether longer training looks worth it, from the held-out evaluations alone."""
    points = [(row["step"], value) for row in run.evals if (value := number(row.get(MEASURE))) is not None]
    if len(points) < 3:
        return Verdict("unknown", "fewer than three evaluations")
    last_step, last = points[-1]
    best_step, best = max(points, key=lambda point: (point[1], -point[0]))
    earlier = [value for step, value in points if step <= 0.75 * last_step] or [points[0][1]]
    gain = last - earlier[-1]
    if last <= best * (1 - FALLING):
        return Verdict("past its best", f"{last:.3f} now, {best:.3f} at step {best_step}")
    if last >= best and gain >= RISING * abs(earlier[-1]):
        return Verdict("still improving", f"+{gain:.3f} in the last quarter of its {last_step} steps")
    return Verdict("level", f"{gain:+.3f} in the last quarter of its {last_step} steps")


@dataclass(frozen=True)
class Ranking:
    """``order`` are indices of runs, best first, by ``measure``; runs without the measure come last. ``notes`` say what limits it."""

    measure: str
    order: list[int]
    values: list[float | None]
    notes: list[str]


def rank(runs: Sequence[RunData]) -> Ranking:
    """By decoded accept_length where every run has one of the same settings and prompts, else by the best walk_accept_length."""
    notes: list[str] = []
    decoded = [run.decoded for run in runs]
    kinds = {(evaluation.settings, evaluation.context) for evaluation in decoded if evaluation is not None}
    if len(kinds) > 1:
        notes.append("decoded accept_lengths were measured with different settings or prompts and do not compare with each other")
    if len(kinds) == 1 and all(decoded):
        values = [evaluation.accept_length if evaluation else None for evaluation in decoded]
        measure = "accept_length"
        notes += _overlap(runs, values)
    else:
        best = [run.best(MEASURE) for run in runs]
        values, measure = [pair[0] if pair else None for pair in best], MEASURE
        notes += _other_walks(runs)
    order = sorted(range(len(runs)), key=lambda i: (values[i] is None, -(values[i] or 0.0), i))
    return Ranking(measure, order, values, notes)


def _overlap(runs: Sequence[RunData], values: Sequence[float | None]) -> list[str]:
    order = sorted(range(len(runs)), key=lambda i: -(values[i] or 0.0))
    if len(order) < 2:
        return []
    first, second = (runs[i].decoded for i in order[:2])
    if first is None or second is None or first.interval is None or second.interval is None:
        return []
    if second.interval[1] < first.interval[0]:
        return []
    return ["the 95 % intervals of the first two overlap: more prompts (evaluator.num_requests=null) tell them apart"]


def _other_walks(runs: Sequence[RunData]) -> list[str]:
    notes = []
    lengths = {row.get("num_draft_tokens") for run in runs for row in run.evals if row.get("num_draft_tokens") is not None}
    if len(lengths) > 1:
        notes.append(f"runs were evaluated with different evaluator.num_draft_tokens ({', '.join(map(str, sorted(lengths)))})")
    held_out = {str((run.config.get("data") or {}).get("eval_path")) for run in runs if run.evals}
    if len(held_out) > 1:
        notes.append("runs were evaluated on different held-out conversations (data.eval_path)")
    return notes
