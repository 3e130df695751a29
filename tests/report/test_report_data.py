"""What is read from run folders, and what is said of them: nothing is invented, everything left out is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specforge.errors import ConfigError
from specforge.report.run_data import number, read_run, unique_labels
from specforge.report.verdict import rank, trend_of


def test_a_whole_run(make_run) -> None:
    run = read_run(make_run(accept=1.7, walks=(1.1, 1.4, 1.3)))
    assert (run.label, run.state, run.steps, run.seconds) == ("r", "done", 30, 15.0)
    assert run.best("walk_accept_length") == (1.4, 20) and run.best("simulated_acc_len") == (pytest.approx(0.4), 20)
    assert run.decoded is not None and run.decoded.step == 30 and run.decoded.interval == (pytest.approx(1.6), pytest.approx(1.8))
    assert run.decoded.histogram == [50, 30, 20]
    assert run.decoded.settings == "2 drafted tokens, greedy, temperature 0.0, at most 64 new tokens"
    assert [e.step for e in run.evaluations] == [0, 30] and run.notes == [] and run.overrides[0] == "name=r"


def test_of_equal_values_the_earlier_step_is_the_best(make_run) -> None:
    assert read_run(make_run(walks=(1.1, 1.4, 1.4))).best("walk_accept_length") == (1.4, 20)


@pytest.mark.parametrize(
    ("tail", "note"),
    [('{"step": 40, "kind": "tr', "last line is half written"), ('{"step": 40}\n{"step": 45, "kind": "x"}\n', "1 lines are not readable")],
)
def test_torn_metrics(make_run, tail: str, note: str) -> None:
    folder = make_run(accept=1.5)
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(tail)
    run = read_run(folder)
    assert len(run.train) == 6 and len(run.evals) == 3 and len(run.notes) == 1 and note in run.notes[0]


def test_rows_written_twice_count_once_the_later_one(make_run) -> None:
    folder = make_run(walks=(1.1,))
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 10, "kind": "eval", "walk_accept_length": 1.9}\n')
    assert [row["walk_accept_length"] for row in read_run(folder).evals] == [1.9]


def test_what_is_missing_is_named(make_run) -> None:
    folder = make_run(walks=(None, None), finished=False)
    run = read_run(folder)
    assert run.state == "stopped" and run.best("walk_accept_length") is None and run.decoded is None
    assert any("no evaluation while training" in note for note in run.notes) and any("specforge evaluate" in note for note in run.notes)
    for name in ("metrics.jsonl", "env.json", "plan.json", "overrides.yaml"):
        (folder / name).unlink()
    run = read_run(folder)
    assert run.state == "new" and run.steps is None and run.seconds is None and run.env == {}
    assert {"no env.json", "no plan.json", "no overrides.yaml"} <= set(run.notes)


def test_damaged_reports_and_notes_are_left_out(make_run) -> None:
    folder = make_run(accept=1.5)
    for name, text in (("a.json", "{"), ("b.json", '{"drafts": []}'), ("c.json", '{"drafts": {"x": 3}}')):
        (folder / "evaluate" / name).write_text(text)
    (folder / "env.json").write_text("{")
    run = read_run(folder)
    assert len(run.evaluations) == 2 and sorted(note.split(":")[0] for note in run.notes) == [
        "env.json", "evaluate/a.json", "evaluate/b.json", "evaluate/c.json"]  # fmt: skip


def test_only_a_run_folder_is_one(make_run, tmp_path: Path) -> None:
    make_run()
    with pytest.raises(ConfigError, match=r"is not a run folder.*Runs in it: r"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("value", "result"), [(1, 1.0), (True, None), ("1", None), (float("nan"), None), (None, None), (float("inf"), None)]
)
def test_what_counts_as_a_number(value: Any, result: float | None) -> None:
    assert number(value) == result


def test_runs_of_one_name_are_told_apart(make_run, tmp_path: Path) -> None:
    folders = [make_run("a", folder="x"), make_run("a", folder="y"), make_run("b", folder="z")]
    runs = [read_run(folder) for folder in folders]
    unique_labels(runs)
    assert [run.label for run in runs] == ["a (x)", "a (y)", "b"]
    twins = [read_run(folders[0]), read_run(folders[0])]
    unique_labels(twins)
    assert twins[0].label == str(folders[0])


@pytest.mark.parametrize(
    ("walks", "trend"),
    [
        ((1.1, 1.2), "unknown"),
        ((1.1, 1.2, 1.3, 1.4), "still improving"),
        ((1.1, 1.4, 1.4, 1.4), "level"),
        ((1.1, 1.4, 1.399, 1.4005), "level"),  # a new best, but by less than 0.5 %
        ((1.1, 1.5, 1.4, 1.42), "past its best"),
        ((1.1, 1.43, 1.40, 1.42), "level"),
    ],
)
def test_whether_a_run_still_improves(make_run, walks: tuple[float, ...], trend: str) -> None:
    assert trend_of(read_run(make_run(walks=walks))).trend == trend


def test_the_gain_is_over_the_last_quarter(make_run) -> None:
    verdict = trend_of(read_run(make_run(walks=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7))))
    assert verdict.why == "+0.200 in the last quarter of its 80 steps"


def test_ranking_by_decoding_when_all_compare(make_run) -> None:
    runs = [
        read_run(make_run("a", (1.9,), accept=1.5)),
        read_run(make_run("b", (1.2,), accept=1.9)),
        read_run(make_run("c", (1.1,), accept=1.4)),
    ]
    found = rank(runs)
    assert (found.measure, found.order, found.values) == ("accept_length", [1, 0, 2], [1.5, 1.9, 1.4]) and found.notes == []
    close = [runs[1], read_run(make_run("d", (1.2,), accept=1.8))]
    assert "intervals of the first two overlap" in rank(close).notes[0]


def test_ranking_by_walk_when_decodings_do_not_compare(make_run, evaluate) -> None:
    runs = [read_run(make_run("a", (1.9,), accept=1.5)), read_run(make_run("b", (1.2,)))]
    assert (rank(runs).measure, rank(runs).order) == ("walk_accept_length", [0, 1])
    other = make_run("c", (1.95,))
    evaluate(other, 1.2, 10, mode="rejection", temperature=1.0)
    found = rank([runs[0], read_run(other)])
    assert (found.measure, found.order) == ("walk_accept_length", [1, 0]) and "do not compare" in found.notes[0]


def test_runs_that_were_held_out_differently_are_noted(make_run) -> None:
    runs = [read_run(make_run("a")), read_run(make_run("b", data={"eval_path": "other.jsonl"})), read_run(make_run("c", (None,)))]
    found = rank(runs)
    assert found.order[-1] == 2 and found.values[2] is None and any("data.eval_path" in note for note in found.notes)
