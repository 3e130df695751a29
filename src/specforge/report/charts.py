"""From runs to charts: which number of which row is drawn where, and what is said when there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specforge.report.plots import BarChart, LineChart, Point, Series
from specforge.report.run_data import Row, RunData, number

# Names of the rates that online topologies log beside the usual ones.
_ONLINE = re.compile(r"^(produc|train_|wait)")
STEP = "optimizer step"


@dataclass(frozen=True)
class Panel:
    """A chart, what it shows in a sentence, and what to do when it is empty."""

    chart: LineChart | BarChart
    about: str
    missing: str


@dataclass(frozen=True)
class Group:
    """Panels under one heading."""

    title: str
    panels: list[Panel]


def groups(runs: Sequence[RunData]) -> list[Group]:
    """Every chart of the page, in reading order."""
    return [
        Group("Acceptance", _acceptance(runs)),
        Group("Accuracy by position", _positions(runs)),
        Group("Training", _training(runs)),
        Group("Speed", _speed(runs)),
    ]


def _acceptance(runs: Sequence[RunData]) -> list[Panel]:
    not_evaluated = "No run was evaluated while training. Set data.eval_path; trainer.eval_every says how often."
    walk = "What verification would accept along held-out replies, the target's own token included. The best checkpoint is chosen by it."
    simulated = "a1 + a1·a2 + … of held-out accuracy: the number other projects print. Without the target's own token."
    return [
        _held_out(runs, "walk_accept_length", "walk_accept_length", "tokens a verify step", walk, not_evaluated),
        Panel(
            LineChart("Decoded accept_length", STEP, "tokens a verify step", [_decoded(run, i) for i, run in enumerate(runs)]),
            "Measured by real speculative decoding, with 95 % intervals. The untrained draft stands at step 0.",
            "No run was decoded. specforge evaluate run=<folder> measures it.",
        ),
        _held_out(runs, "simulated_acc_len", "simulated_acc_len", "tokens", simulated, not_evaluated),
        _histogram(runs),
    ]


def _held_out(runs: Sequence[RunData], name: str, title: str, unit: str, about: str, missing: str) -> Panel:
    lines = [_line(run, i, run.evals, lambda row: number(row.get(name))) for i, run in enumerate(runs)]
    return Panel(LineChart(f"{title} (held out)", STEP, unit, lines), about, missing)


def _decoded(run: RunData, index: int) -> Series:
    newest = {e.step: e for e in run.evaluations if e.step is not None and e.accept_length is not None}
    steps = sorted(newest)
    return Series(index, run.label, [(step, newest[step].accept_length) for step in steps], [newest[step].interval for step in steps])


def _histogram(runs: Sequence[RunData]) -> Panel:
    chosen = [(i, run, run.decoded) for i, run in enumerate(runs)]
    counted = [(i, run, e.histogram) for i, run, e in chosen if e is not None and sum(e.histogram)]
    longest = max((len(counts) for _, _, counts in counted), default=1)
    chart = BarChart(
        "Acceptance histogram",
        "drafted tokens accepted by a verify step",
        "share of verify steps",
        [str(k) for k in range(longest)],
        [i for i, _, _ in counted],
        [run.label for _, run, _ in counted],
        [[count / sum(counts) for count in counts] + [None] * (longest - len(counts)) for _, _, counts in counted],
        [[f"{count} of {sum(counts)} steps ({count / sum(counts):.1%})" for count in counts] for _, _, counts in counted],
    )
    return Panel(chart, "The newest decoding of each run. Further to the right is better.", "No run was decoded.")


def _positions(runs: Sequence[RunData]) -> list[Panel]:
    """One panel a position, so that runs stay lines with one colour each."""
    count = max((len(row["per_position_accuracy"]) for run in runs for row in run.evals if _list(row)), default=0)
    drawn = [[_line(run, i, run.evals, lambda row, k=k: _entry(row, k)) for i, run in enumerate(runs)] for k in range(count)]  # type: ignore[misc]
    highest = max((y for lines in drawn for line in lines for _, y in line.known), default=1.0)
    panels = []
    for k, lines in enumerate(drawn):
        about = (
            "Share of right guesses for the first drafted token." if k == 0 else "The same, whether or not the tokens before it were right."
        )
        chart = LineChart(f"Position {k + 1} (held out)", STEP, "accuracy", lines, zero=True, reach=[highest])
        panels.append(Panel(chart, about, ""))
    if not panels:
        empty = LineChart("Per-position accuracy (held out)", STEP, "accuracy", [])
        panels.append(Panel(empty, "", "No run was evaluated while training."))
    return panels


def _training(runs: Sequence[RunData]) -> list[Panel]:
    def of(name: str, title: str, unit: str, about: str, log: bool = False) -> Panel:
        lines = [_line(run, i, run.train, lambda row: number(row.get(name))) for i, run in enumerate(runs)]
        return Panel(LineChart(title, STEP, unit, lines, log=log), about, f"No run logged {name}.")

    vocabulary = "Drafts of other strategies or vocabularies do not compare by loss."
    return [
        of("loss", "Loss (training batches)", "loss", f"The weighted loss that is minimised. {vocabulary}", log=True),
        of("gradient_norm", "Gradient norm", "norm", "Of the whole gradient before clipping.", log=True),
        of("lr", "Learning rate", "learning rate", "As the schedule laid it out."),
    ]


def _speed(runs: Sequence[RunData]) -> list[Panel]:
    names = {"tokens_per_second": ("Throughput", "tokens a second"), "steps_per_second": ("Optimizer steps", "steps a second")}
    online = dict.fromkeys(key for run in runs for row in run.train for key in row if _ONLINE.match(key) and number(row[key]) is not None)
    names |= {key: (key, "seconds" if key.endswith("seconds") else "a second" if key.endswith("per_second") else key) for key in online}
    panels = []
    for name, (title, unit) in names.items():
        lines = [_line(run, i, run.train, lambda row, name=name: number(row.get(name))) for i, run in enumerate(runs)]  # type: ignore[misc]
        panels.append(Panel(LineChart(title, STEP, unit, lines, zero=True), "Between two logged rows.", f"No run logged {name}."))
    return panels


def _line(run: RunData, index: int, rows: Iterable[Row], value: Callable[[Row], float | None]) -> Series:
    points: list[Point] = [(row["step"], value(row)) for row in rows]
    return Series(index, run.label, points)


def _list(row: Row) -> bool:
    return isinstance(row.get("per_position_accuracy"), list)


def _entry(row: Row, k: int) -> float | None:
    values = row.get("per_position_accuracy")
    return number(values[k]) if isinstance(values, list) and k < len(values) else None
