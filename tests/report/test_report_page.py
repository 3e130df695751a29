"""The page and the command: self-contained, every number where it belongs, and a message for what cannot be reported."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specforge import cli
from specforge.commands import diff
from specforge.config import freeze
from specforge.launch.sweep_record import SweepRecord

VOID = {"meta", "link", "br", "input", "line", "circle", "path", "rect"}


class Page(HTMLParser):
    """Collects what the tests ask for, and complains about tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if name in (attrs.get("class") or "").split()]


def reported(*arguments: str | Path) -> int:
    return cli.main(["report", *map(str, arguments)])


@pytest.fixture
def page_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def make(*folders: Path, **_: Any) -> Page:
        path = tmp_path / "page.html"
        assert reported(*folders, "--output", path) == 0, capsys.readouterr().err
        return Page(path.read_text(encoding="utf-8"))

    return make


TITLES = ["walk_accept_length (held out)", "Decoded accept_length", "simulated_acc_len (held out)", "Acceptance histogram", "Position 1 (held out)",
          "Position 2 (held out)", "Loss (training batches)", "Gradient norm", "Learning rate", "Throughput", "Optimizer steps"]  # fmt: skip


def test_the_page_has_every_plot_with_a_mark_for_every_run(make_run, page_of) -> None:
    runs = [make_run("a", accept=1.5), make_run("b", (1.2, 1.6, 1.9), accept=1.9, lr=2e-3)]
    page = page_of(*runs)
    plots = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg" and "plot" in (attrs.get("class") or "")]
    assert plots == TITLES
    lines = page.of_class("line")
    assert {attrs.get("data-run") for attrs in lines} >= {"0", "1"}
    # 11 charts of which the histogram has bars; the swatches of the table, legend and command lines are lines too, without a run.
    assert sum(attrs.get("data-run") == "0" for attrs in lines) == sum(attrs.get("data-run") == "1" for attrs in lines) == 10
    assert len(page.of_class("bar")) == 6


def test_the_page_needs_nothing_else(make_run, tmp_path: Path, page_of) -> None:
    page_of(make_run("a", accept=1.5))
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', text) and "@import" not in text and "url(" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert len(text) < 200_000


def test_the_headline_says_which_run_is_better_and_whether_it_improves(make_run, page_of) -> None:
    page = page_of(make_run("a", accept=1.5), make_run("b", (1.2, 1.6, 1.7, 1.8), accept=1.9))
    assert "Best of 2: b, accept_length 1.900 (95 % interval 1.800 – 2.000)." in page.words
    assert "Next: a, 1.500." in page.words and "By walk_accept_length it is still improving" in page.words
    assert "100 verify steps, 2 drafted tokens, greedy" in page.words


def test_the_best_of_each_column_is_marked(make_run, page_of) -> None:
    folders = [make_run("a", (1.5, 1.9), accept=1.5), make_run("b", (1.2, 1.6), accept=1.9)]
    assert len(page_of(*folders).of_class("best")) == 3
    assert page_of(folders[0]).of_class("best") == [], "a single run is not the best of anything"


def test_the_best_run_comes_first_and_has_the_first_colour(make_run, page_of) -> None:
    page = page_of(make_run("a", (1.1,)), make_run("b", (1.5,)), make_run("c", (None,)))
    assert [word for word in page.text if word in ("a", "b", "c")][1:4] == ["b", "a", "c"], "the first is in the headline"


def test_numbers_below_a_chart_are_those_of_the_run(make_run, page_of) -> None:
    page = page_of(make_run("a", (1.1, 1.25)), make_run("b", (1.3,)))
    assert re.search(r"optimizer step b a 10 1\.3 1\.1 20 – 1\.25", " ".join(w.strip() for w in page.text if w.strip()))


def test_differences_hardware_and_command_lines(make_run, page_of) -> None:
    page = page_of(make_run("a", lr=1e-3), make_run("b", (1.1, 1.2), lr=2e-3))
    assert "optimizer.lr 0.001 0.002" in " ".join(w.strip() for w in page.text if w.strip())
    assert "2 × H200" in page.words and "2 × trainer on cuda" in page.words and f"{'a' * 12} with changes" in page.words
    assert "specforge name=a 'data.train_path=a b.jsonl'" in page.words
    assert "The configurations compute the same" in page_of(make_run("c"), make_run("d")).words


def test_missing_numbers_are_said_and_never_drawn(make_run, page_of) -> None:
    page = page_of(make_run("a", (None, None), finished=False), make_run("b", (1.2, 1.3, 1.4)))
    empty = [attrs for tag, attrs in page.tags if attrs.get("data-empty")]
    assert len(empty) == 2, "no run was decoded: the accept_length and the histogram"
    assert "No run was decoded. specforge evaluate" in page.words and "a: no evaluation while training" in page.words
    alone = page_of(make_run("c", (None,)))
    assert "No held-out number and no decoded accept_length yet." in alone.words
    assert len([attrs for tag, attrs in alone.tags if attrs.get("data-empty")]) == 5


def test_rates_of_an_online_run_get_charts_of_their_own(make_run, page_of) -> None:
    rates = {"produce_tokens_per_second": 900.0, "train_tokens_per_second": 1500.0, "wait_seconds": 0.25}
    page = page_of(make_run("a"), make_run("b", extra=rates))
    plots = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg" and "plot" in (attrs.get("class") or "")]
    assert plots[-3:] == ["produce_tokens_per_second", "train_tokens_per_second", "wait_seconds"]


def test_names_cannot_leave_their_place(make_run, page_of, tmp_path: Path) -> None:
    evil = '</script><script>alert("x")</script>&'
    folder = make_run("a", accept=1.5)
    config = freeze.load_yaml(folder / "config.yaml")
    import yaml

    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "name": evil}))
    (folder / "overrides.yaml").write_text(yaml.safe_dump([f"name={evil}"]))
    page = page_of(folder, make_run("b"))
    assert [tag for tag, _ in page.tags].count("script") == 2 and evil in page.words
    text = (tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'id="charts">(.*?)</script>', text)[1])  # type: ignore[index]
    assert evil in [line["label"] for line in data["chart0"]]


def test_many_runs_and_many_rows_stay_small(make_run, page_of, tmp_path: Path) -> None:
    folders = [make_run(f"r{i}", [1 + 0.001 * k for k in range(40)], folder=f"f{i}") for i in range(30)]
    with (folders[0] / "metrics.jsonl").open("w") as stream:
        for step in range(20_000):
            stream.write(json.dumps({"step": step, "kind": "train", "loss": 9.0 / (1 + step), "seconds": 1.0}) + "\n")
    page = page_of(*folders)
    assert (tmp_path / "page.html").stat().st_size < 4_000_000
    assert "rows; metrics.jsonl has all" in page.words and len(page.of_class("legend")) == 1


def test_where_the_page_goes(make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = make_run("a"), make_run("b")
    assert reported(one) == 0 and (one / "report.html").is_file()
    assert reported(one, two) == 0 and (tmp_path / "report.html").is_file()
    (tmp_path / "there").mkdir()
    assert reported(one, "-o", "there", "--title", "My <title>") == 0
    assert "<h1>My &lt;title&gt;</h1>" in (tmp_path / "there" / "report.html").read_text()
    assert "written: " in capsys.readouterr().out and not list(tmp_path.rglob(".report*"))
    assert reported(one, "--output", tmp_path / "no" / "where.html") == 1
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_everything_that_is_no_run_is_named_at_once(make_run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert reported(make_run("a"), tmp_path / "nowhere", tmp_path / "neither") == 2
    said = capsys.readouterr().err
    assert "2 problems" in said and "nowhere: no such folder" in said and "neither: no such folder" in said
    assert reported(tmp_path / "empty") == 2 and "is not a run folder" in capsys.readouterr().err
    assert reported() == 2 and "RUN" in capsys.readouterr().err


def test_runs_of_one_name_and_a_run_named_twice(make_run, page_of, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run("a", folder="x"), make_run("a", folder="y")
    page = page_of(one, two, one)
    assert "2 runs" in page.words and "a (x)" in page.words and "a (y)" in page.words


# -- sweeps -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def swept(make_run, tmp_path: Path) -> Path:
    folder = tmp_path / "sweep"
    folder.mkdir()
    record = SweepRecord(folder, "train", ["optimizer.lr", "seed"], "specforge -m ...")
    for number, (lr, seed) in enumerate([(1e-3, 0), (1e-3, 1), (2e-3, 0)]):
        point = record.point(f"id{number}", f"optimizer.lr={lr} seed={seed}", [])
        point.run_dir = str(make_run("s", folder=f"p{number}", lr=lr, seed=seed))
    record.point("id9", "optimizer.lr=0.004 seed=0", [])
    record.save()
    return folder


def test_a_sweep_is_reported_by_its_points(swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reported(swept) == 0
    page = Page((swept / "report.html").read_text())
    assert "3 runs" in page.words and "optimizer.lr=0.002 seed=0" in page.words
    note = "1 of 4 points have no run folder yet: optimizer.lr=0.004 seed=0"
    assert note in page.words and note in capsys.readouterr().out


def test_a_sweep_that_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = SweepRecord(tmp_path, "train", ["seed"], "line")
    record.point("i", "seed=1", [])
    record.save()
    assert reported(tmp_path) == 2 and "no point of this sweep has a run folder yet" in capsys.readouterr().err


def test_diff_of_a_sweep_is_a_matrix(swept: Path, make_run, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff.main([str(swept)]) == 1
    printed = capsys.readouterr().out
    assert "[2] optimizer.lr=0.001 seed=1" in printed and "values that differ (2)" in printed and "note: " in printed
    [row] = [line for line in printed.splitlines() if "optimizer.lr " in line and "│" in line]
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == ["optimizer.lr", "0.001", "0.001", "0.002"]
    assert diff.main([str(swept), str(make_run("b", lr=1e-3, seed=0, more=3)), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["values"] == {"seed": [0, 1, 0, 0], "optimizer.lr": [1e-3, 1e-3, 2e-3, 1e-3], "more": [None, None, None, 3]}
    assert len(found["runs"]) == 4 and found["choices"] == {}
    assert diff.main([str(swept), "--ignore", "optimizer,seed"]) == 0 and "no difference" in capsys.readouterr().out


def test_diff_needs_two_sides(make_run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", str(make_run("a"))]) == 2 and "is one side" in capsys.readouterr().err
    assert cli.main(["diff", str(tmp_path / "no"), "nor this"]) == 2 and "2 problems" in capsys.readouterr().err
