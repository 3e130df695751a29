"""Sweeps with a launcher of the test: what is checked, skipped, continued, recorded and shown; no process is started."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from specforge import cli
from specforge.config import freeze
from specforge.config.multirun import Multirun, read_multirun
from specforge.errors import ConfigError, RunError
from specforge.launch import sweep, sweep_points, sweep_run
from specforge.launch.base import Changed, Launcher, Stopped, Task
from specforge.launch.frontend import Ready, make_ready
from specforge.launch.outcome import clear_success, mark_success, state, succeeded
from specforge.launch.sweep_points import label_of
from specforge.launch.sweep_record import open_sweep, point_id, read_record, sweep_folder, sweep_name

SIGINT = 2


@dataclass
class Fake(Launcher):
    """Runs nothing: ``codes`` maps a word of the label to the exit code (default 0), ``values`` to a walk_accept_length."""

    codes: dict[str, int] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    stop_at: str = ""
    submits: bool = False
    calls: list[list[Task]] = field(default_factory=list)

    @property
    def ran(self) -> list[str]:
        return [task.label for call in self.calls for task in call]

    def submit_many(self, tasks: Sequence[Task], changed: Changed, folder: Path) -> list[int | None]:
        assert (folder / "sweep.json").is_file(), "the record is there before anything starts"
        self.calls.append(list(tasks))
        codes: list[int | None] = []
        for index, task in enumerate(tasks):
            if self.submits:
                changed(index, "submitted", None, f"job 7_{index}")
                codes.append(None)
                continue
            changed(index, "running", None, "")
            written = read_record(folder).points
            assert next(p for p in written.values() if p.label == task.label).status == "running"
            code = self._work(task)
            stopped = bool(self.stop_at) and self.stop_at in task.label
            changed(index, "interrupted" if stopped else "done" if code == 0 else "failed", 130 if stopped else code, "")
            if stopped:
                raise Stopped(SIGINT)
            codes.append(code)
        return codes

    def _work(self, task: Task) -> int:
        config = freeze.read_config_file(task.config_file, task.run_dir)
        code = next((code for word, code in self.codes.items() if word in task.label.split()), 0)
        value = next((value for word, value in self.values.items() if word in task.label), 1.25)
        rows = [{"step": 5 * k, "kind": "eval", "walk_accept_length": value - 0.1 * k, "simulated_acc_len": 0.3} for k in (1, 2)]
        if config["command"] == "train":
            (task.run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if code == 0 and not (self.stop_at and self.stop_at in task.label) and task.config_file.parent == task.run_dir:
            mark_success(task.run_dir)
        return code

    def start(self, task: Task) -> int:
        raise AssertionError("a sweep starts many")


@dataclass
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    launcher = Fake()
    monkeypatch.setattr(sweep_run, "open_launcher", lambda config: launcher)
    return launcher


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target folder that holds no model."""
    folder = tmp_path_factory.mktemp("target")
    facts = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 12, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 40, "rope_theta": 10000.0}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(facts))
    header = json.dumps({"w": {"dtype": "F32", "shape": [40, 16], "data_offsets": [0, 2560]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2560))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def run_checked(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """``run_checked(*words)`` is ``specforge -m`` in ``tmp_path``, every point composed and checked for real."""
    monkeypatch.setenv("SPECFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    base = ["target=hf", f"target.path={target}", "strategy.draft_vocab_size=null", "device=cpu", "name=t"]

    def call(*words: str, command: str = "train") -> Said:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main([command, "-m", *base, *words])
        return Said(code, out.getvalue(), err.getvalue())

    return call


@pytest.fixture(scope="module")
def composed() -> dict[str, Ready]:
    return {}


@pytest.fixture
def run(run_checked, composed: dict[str, Ready], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """The same with points that are made from one composed configuration, which takes no time: a value of at least 1 checks."""

    def quick(command: str, arguments: Sequence[str]) -> Ready | None:
        words = dict(word.split("=", 1) for word in arguments if "=" in word)
        if command not in composed:
            composed[command] = make_ready(
                command, [word for word in arguments if word.split(".")[0] not in ("seed", "trainer", "optimizer", "launcher")]
            )
        ready = copy.deepcopy(composed[command])
        if "run" in words:
            ready.run_dir, ready.config["run"] = Path(words["run"]), words["run"]
        for key, value in words.items():
            *parents, last = key.split(".")
            node = ready.config
            for parent in parents:
                node = node[parent]
            if key.startswith("trainer.") and int(value) < 1:
                raise ConfigError(f"{key}: {value} — is less than 1")
            if parents or key in ("seed", "num_threads", "name"):
                node[last] = yaml.safe_load(value)
        return ready

    def read(command: str, arguments: Sequence[str]) -> Multirun:
        plain = not any("hydra" in word or word.startswith("--") for word in arguments)
        return Multirun("basic", list(arguments), None, {}, {}, []) if plain else read_multirun(command, arguments)

    monkeypatch.setattr(sweep, "read_multirun", read)
    monkeypatch.setattr(sweep_points, "make_ready", quick)
    monkeypatch.setattr(freeze, "environment", lambda device: {})
    return run_checked


def record_of(folder: Path) -> Any:
    [path] = folder.glob("outputs/sweeps/*/*/sweep.json")
    return read_record(path.parent)


def by_label(folder: Path) -> dict[str, Any]:
    return {point.label: point for point in record_of(folder).points.values()}


# -- the first start --------------------------------------------------------------------------------------------------------------


def test_every_point_gets_its_folder_with_its_frozen_configuration_and_one_line_of_the_table(
    run_checked, fake: Fake, tmp_path: Path
) -> None:
    fake.values = {"seed=2": 1.75}
    said = run_checked("seed=1,2", "optimizer.lr=1e-3,2e-3")
    assert said.code == 0 and len(fake.calls) == 1, "all at once, so that a launcher can run them side by side"
    points = by_label(tmp_path)
    assert list(points) == fake.ran == [f"seed={s} optimizer.lr={lr}" for s in (1, 2) for lr in ("0.001", "0.002")]
    for label, point in points.items():
        config = freeze.read_config(point.folder)
        assert label == f"seed={config['seed']} optimizer.lr={config['optimizer']['lr']}" and point.status == "done"
        assert point.folder.parent == tmp_path / "outputs" / "t" and point.exit_code == 0
    assert record_of(tmp_path).keys == ["seed", "optimizer.lr"] and record_of(tmp_path).line.startswith("specforge -m target=hf")
    [row] = [line for line in said.out.splitlines() if "seed=2 optimizer.lr=0.001" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:4] == ["done", "0.300", "1.650"] and cells[-1].startswith("outputs/t/"), "the best of its evaluations, not the last"


def test_nothing_starts_when_one_point_does_not_check(run_checked, fake: Fake, tmp_path: Path) -> None:
    said = run_checked("optimizer.lr=-1,x", "trainer.epochs=1,2")
    assert said.code == 2 and fake.calls == [] and not (tmp_path / "outputs").exists()
    assert "2 problems" in said.err
    assert "optimizer.lr=-1 trainer.epochs=1 and 1 more: optimizer.lr: -1" in said.err


def test_a_key_that_does_not_exist_is_named_once_with_the_nearest_one(run_checked, fake: Fake) -> None:
    said = run_checked("optimzer.lr=1e-4,2e-4")
    assert said.code == 2 and fake.calls == []
    assert said.err.count("optimzer.lr: no such key. Did you mean 'optimizer.lr'?") == 1
    said = run_checked("drft=llama", "strategy=eagle3,eagel3")
    assert "drft: no such key. Did you mean 'draft'?" in said.err
    assert "strategy=eagel3: strategy=eagel3: no such option. Did you mean 'strategy=eagle3'?" in said.err


def test_a_missing_file_of_a_point_is_a_problem_of_that_point(run_checked, fake: Fake) -> None:
    said = run_checked("data=jsonl", "data.train_path=nowhere.jsonl,neither.jsonl")
    assert said.code == 2 and fake.calls == []
    assert "data.train_path=nowhere.jsonl: " in said.err and "data.train_path=neither.jsonl: " in said.err


def test_looking_ends_after_twenty_failures(run, fake: Fake) -> None:
    said = run("trainer.epochs=range(-30,0)")
    assert said.code == 2 and "only 20 of 30 points were looked at" in said.err


def test_a_failing_point_stops_nothing(run, fake: Fake, tmp_path: Path) -> None:
    fake.codes = {"seed=1": 3}
    said = run("seed=0,1,2")
    assert said.code == 1 and fake.ran == ["seed=0", "seed=1", "seed=2"]
    assert [point.status for point in record_of(tmp_path).points.values()] == ["done", "failed", "done"]
    assert "failed (exit code 3)" in said.out


def test_the_same_run_twice_is_run_once_but_names_tell_points_apart(run, fake: Fake) -> None:
    said = run("optimizer.lr=0.5,5e-1,0.25")
    assert fake.ran == ["optimizer.lr=0.5", "optimizer.lr=0.25"] and said.code == 0
    said = run("num_threads=1,2")
    assert fake.ran[2:] == ["num_threads=1", "num_threads=2"], "the run's signature leaves threads out; a sweep over them does not"


def test_batches_of_the_basic_sweeper(run, fake: Fake, tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    text = "# @package _global_\nhydra:\n  sweeper:\n    max_batch_size: 2\n    params:\n      seed: range(0,3)\n"
    (folder / "three.yaml").write_text(text)
    assert run("--config-dir", str(folder.parent), "experiment=three").code == 0
    assert [len(call) for call in fake.calls] == [2, 1]


# -- the same sweep again ---------------------------------------------------------------------------------------------------------


def test_finished_points_are_skipped_and_failed_and_interrupted_ones_go_on_in_their_folder(run, fake: Fake, tmp_path: Path) -> None:
    fake.codes, fake.stop_at = {"seed=1": 1}, "seed=2"
    said = run("seed=0,1,2,3")
    assert said.code == 130 and "Start the same command again" in said.err
    before = by_label(tmp_path)
    assert [point.status for point in before.values()] == ["done", "failed", "interrupted", "not started"]
    fake.codes, fake.stop_at, fake.calls = {}, "", []
    said = run("seed=0,1,2,3")
    assert said.code == 0 and fake.ran == ["seed=1", "seed=2", "seed=3"]
    assert "done before, skipped" in said.out and "1 of 4 points are finished already" in said.err and "goes on in" in said.err
    after = by_label(tmp_path)
    assert [point.run_dir for point in after.values()] == [point.run_dir for point in before.values()]
    fake.calls = []
    assert run("seed=0,1,2,3").code == 0 and fake.calls == []
    assert len(list((tmp_path / "outputs" / "t").iterdir())) == 4


def test_one_value_more_is_the_same_sweep_and_another_fixed_value_is_another(run, fake: Fake, tmp_path: Path) -> None:
    run("seed=0,1")
    run("seed=0,1,2")
    assert fake.ran == ["seed=0", "seed=1", "seed=2"] and len(record_of(tmp_path).points) == 3
    run("seed=0,1", "launcher.grace_seconds=3", "num_threads=1")
    assert len(fake.ran) == 3, "where and how it runs is not what it computes"
    run("seed=0,1", "optimizer.lr=1e-3")
    assert len(fake.ran) == 5 and len(list(tmp_path.glob("outputs/sweeps/t/*/sweep.json"))) == 2


def test_a_point_that_goes_on_runs_where_the_new_line_says(run, fake: Fake, tmp_path: Path) -> None:
    fake.stop_at = "seed=0"
    run("seed=0,1", "launcher.grace_seconds=3")
    folder = by_label(tmp_path)["seed=0"].folder
    assert freeze.read_config(folder)["launcher"]["grace_seconds"] == 3
    fake.stop_at = ""
    assert run("seed=0,1", "launcher.grace_seconds=4").code == 0
    assert freeze.read_config(folder)["launcher"]["grace_seconds"] == 4 and by_label(tmp_path)["seed=0"].folder == folder
    assert freeze.load_yaml(folder / "config.1.yaml")["launcher"]["grace_seconds"] == 3, "the one before is kept"


def test_a_point_that_finished_after_its_sweep_was_killed_is_found_finished(run, fake: Fake, tmp_path: Path) -> None:
    fake.stop_at = "seed=0"
    run("seed=0,1")
    record = record_of(tmp_path)
    points = list(record.points.values())
    points[0].status = "running"  # as a killed process leaves it
    record.save()
    mark_success(points[0].folder)
    fake.stop_at, fake.calls = "", []
    assert run("seed=0,1").code == 0 and fake.ran == ["seed=1"]


def test_a_finished_run_folder_that_was_deleted_is_made_again(run, fake: Fake, tmp_path: Path) -> None:
    import shutil

    run("seed=0,1")
    shutil.rmtree(by_label(tmp_path)["seed=1"].folder)
    fake.calls = []
    assert run("seed=0,1").code == 0 and fake.ran == ["seed=1"] and by_label(tmp_path)["seed=1"].folder.is_dir()


def test_a_run_that_goes_on_has_its_marker_taken_away(tmp_path: Path) -> None:
    mark_success(tmp_path, step=3)
    assert succeeded(tmp_path) and state(tmp_path) == "done" and json.loads((tmp_path / "_SUCCESS").read_text())["step"] == 3
    clear_success(tmp_path)
    assert state(tmp_path) == "new"
    (tmp_path / "metrics.jsonl").write_text("")
    assert state(tmp_path) == "stopped"
    with freeze.lock(tmp_path):
        assert state(tmp_path) == "running"
    assert state(tmp_path) == "stopped"


def test_a_damaged_record_says_what_to_do(run, fake: Fake, tmp_path: Path) -> None:
    run("seed=0,1")
    path = record_of(tmp_path).folder / "sweep.json"
    for text, says in (("{", "is not readable"), ('{"format_version": 9}', "format_version 9"), ('{"format_version": 1}', "is damaged")):
        path.write_text(text)
        said = run("seed=0,1")
        assert said.code == 2 and says in said.err and "ove" in said.err


# -- others at work ---------------------------------------------------------------------------------------------------------------


def test_the_same_sweep_at_work_in_another_process_is_refused(run, fake: Fake, tmp_path: Path) -> None:
    run("seed=0,1")
    folder = record_of(tmp_path).folder
    hold = "import sys, time; from pathlib import Path; from specforge.config.freeze import lock\n" + (
        "with lock(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    )
    source = str(Path(cli.__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    child = subprocess.Popen([sys.executable, "-c", hold, str(folder)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        said = run("seed=0,1,2")
        assert said.code == 1 and f"the same sweep is at work in process {child.pid}" in said.err and len(fake.ran) == 2
        assert run("seed=0,1", "optimizer.lr=1e-3,2e-3").code == 0, "another sweep of the same name is not disturbed"
    finally:
        child.kill()
        child.wait()


def test_a_run_folder_in_use_is_left_alone(run, fake: Fake, tmp_path: Path) -> None:
    fake.stop_at = "seed=0"
    run("seed=0,1")
    fake.stop_at, fake.calls = "", []
    with freeze.lock(by_label(tmp_path)["seed=0"].folder):
        said = run("seed=0,1")
    assert said.code == 1 and fake.ran == ["seed=1"] and "seed=0: another process is at work in its folder" in said.out


def test_two_sweeps_in_one_second_have_folders_of_their_own(run, fake: Fake, tmp_path: Path) -> None:
    run("seed=0,1", "optimizer.lr=1e-3")
    run("seed=0,1", "optimizer.lr=2e-3")
    run("optimizer.lr=1e-3,2e-3", "seed=0")
    folders = [
        point.run_dir for path in tmp_path.glob("outputs/sweeps/t/*/sweep.json") for point in read_record(path.parent).points.values()
    ]
    assert len(folders) == len(set(folders)) == 6


def test_submitted_points_are_not_submitted_twice_while_they_wait(run, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.submits = True
    said = run("seed=0,1,2")
    assert said.code == 0 and [point.status for point in by_label(tmp_path).values()] == ["submitted"] * 3 and "job 7_1" in said.out
    points = by_label(tmp_path)
    waits, ended = points["seed=0"].folder, points["seed=1"].folder
    mark_success(ended)
    monkeypatch.setattr(sweep_run, "jobs_at_work", lambda folders: {f: "job 7_0 PENDING" for f in folders if f == waits})
    fake.calls = []
    said = run("seed=0,1,2")
    assert fake.ran == ["seed=2"], "one waits, one is finished, one is gone from the queue without having finished"
    assert [point.status for point in by_label(tmp_path).values()] == ["submitted", "done", "submitted"]
    assert "1 of 3 points are in the queue already" in said.err


def test_jobs_at_work_asks_for_the_newest_submission_of_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = pytest.importorskip("specforge.launch.job_record")
    queue = pytest.importorskip("specforge.launch.slurm_queue")
    folders = [tmp_path / name for name in "abc"]
    for number, folder in enumerate(folders[:2]):
        folder.mkdir()
        for job in (f"{number}1", f"{number}2"):
            jobs.add_submission(folder, "c", [jobs.JobEntry(job, "trainer", True, 1, 1, "log")])
    asked: list[str] = []

    def states(ids: Any) -> dict[str, Any]:
        asked.extend(sorted(ids))
        return {"02": queue.JobState("RUNNING"), "12": queue.JobState("CANCELLED")}

    monkeypatch.setattr(queue, "job_states", states)
    monkeypatch.setattr(queue, "have_slurm", lambda: True)
    assert sweep_run.jobs_at_work(folders) == {folders[0]: "job 02 RUNNING"} and asked == ["02", "12"]
    assert sweep_run.jobs_at_work(folders[2:]) == {} and len(asked) == 2, "without submissions SLURM is not asked"


# -- other commands ---------------------------------------------------------------------------------------------------------------


def test_a_sweep_of_prepare_is_skipped_when_repeated(run, fake: Fake, tmp_path: Path) -> None:
    assert run("seed=1,2", command="prepare").code == 0 and run("seed=1,2", command="prepare").code == 0
    assert fake.ran == ["seed=1", "seed=2"] and record_of(tmp_path).command == "prepare"
    assert record_of(tmp_path).line.startswith("specforge prepare -m ")


def test_a_run_is_continued_by_one_point_only(run, fake: Fake, tmp_path: Path) -> None:
    run("seed=1,2")
    first, second = (point.run_dir for point in by_label(tmp_path).values())
    fake.calls = []
    said = cli.main(["-m", f"run={first}", "trainer.epochs=4,8"])
    assert said == 2 and fake.calls == []
    assert cli.main(["-m", f"run={first},{second}", "trainer.epochs=4"]) == 0
    assert len(fake.ran) == 2, "their own marker says that they were finished before, not that this point is"
    assert cli.main(["-m", f"run={first},{second}", "trainer.epochs=4"]) == 0 and len(fake.ran) == 2


def test_what_does_not_go_with_a_sweep(run, fake: Fake) -> None:
    assert "remove one of the two" in run("seed=1,2", "--cfg", "job").err.lower()
    assert "only prints" in run("seed=1,2", command="show-sample").err
    assert fake.calls == []


# -- a sampler --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def optuna() -> list[str]:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="hydra-optuna-sweeper is not installed (extra: optuna)")
    return ["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1"]


def test_a_sampler_is_told_the_best_value_of_each_run(run, fake: Fake, optuna: list[str], tmp_path: Path) -> None:
    fake.values = {"seed=1 ": 1.2, "seed=2 ": 1.9, "seed=3 ": 1.4}
    said = run(*optuna, "seed=1,2,3", "trainer.epochs=range(1,50)", "hydra.sweeper.n_trials=6")
    assert said.code == 0
    points = by_label(tmp_path)
    best = max(points.values(), key=lambda p: p.value)
    assert best.value == pytest.approx(fake.values[f"{best.label.split()[0]} "] - 0.1), "the better of its two evaluations"
    assert f"best of 6 proposals: {best.label}" in said.out
    results = (record_of(tmp_path).folder / "optimization_results.yaml").read_text()
    assert f"best_value: {best.value}" in results
    fake.calls = []
    assert run(*optuna, "seed=1,2,3", "trainer.epochs=range(1,50)", "hydra.sweeper.n_trials=6").code == 0
    assert fake.calls == [], "the same seed proposes the same points, and they are finished"


def test_a_proposal_that_fails_or_does_not_check_is_a_failed_trial(run, fake: Fake, optuna: list[str], tmp_path: Path) -> None:
    fake.codes = {"seed=1": 1}
    said = run(*optuna, "seed=1,2", "trainer.epochs=1,-1", "hydra.sweeper.n_trials=12")
    assert said.code == 0
    points = by_label(tmp_path)
    assert {"done", "failed", "refused"} == {point.status for point in points.values()}
    assert all((point.value is None) == (point.status != "done") for point in points.values())
    assert "does not check and counts as failed: trainer.epochs: -1" in said.err


def test_a_sampler_with_nothing_but_failures_ends_with_its_table(run, fake: Fake, optuna: list[str]) -> None:
    fake.codes = {"seed=1": 1, "seed=2": 1}
    said = run(*optuna, "seed=1,2", "hydra.sweeper.n_trials=2")
    assert said.code == 1 and "no point measured walk_accept_length" in said.out and "failed (exit code 1)" in said.out


def test_a_signal_ends_a_search(run, fake: Fake, optuna: list[str]) -> None:
    fake.stop_at = "seed="
    said = run(*optuna, "seed=1,2", "hydra.sweeper.n_trials=5")
    assert said.code == 130 and len(fake.ran) == 1 and "interrupted" in said.out


@pytest.mark.parametrize(
    ("words", "command", "says"),
    [
        (["seed=1"], "train", "no key to search over"),
        (["seed=1,2"], "prepare", "optimises training runs"),
        (["seed=1,2", "data.eval_path=null"], "train", "needs held-out conversations"),
        (["optimizer.lr=interval(1"], "train", "not a valid override"),
    ],
)
def test_a_search_that_cannot_work_is_refused(run, fake: Fake, optuna: list[str], words: list[str], command: str, says: str) -> None:
    said = run(*optuna, *words, command=command)
    assert said.code == 2 and says in said.err and fake.calls == []


def test_a_launcher_that_does_not_wait_is_refused_with_the_reason(run, fake: Fake, optuna: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "launcher"
    folder.mkdir(parents=True)
    keys = (Path(cli.__file__).resolve().parents[2] / "conf" / "launcher" / "local.yaml").read_text()
    (folder / "queue.yaml").write_text(keys)
    words = ["--config-dir", str(folder.parent), *optuna, "seed=1,2", "launcher=queue", "hydra.sweeper.n_trials=1"]
    said = run(*words)
    assert said.code == 2 and "launcher.wait=true" in said.err and "depends on the values of the ones before" in said.err


# -- small parts ------------------------------------------------------------------------------------------------------------------


def test_what_a_point_is_depends_on_what_it_computes() -> None:
    config = {"seed": 1, "name": "a", "output_dir": "o", "launcher": {"processes": 1}, "run": None}
    same = point_id("train", config, [])
    assert point_id("train", {**config, "output_dir": "p", "launcher": None}, ["seed=1"]) == same
    for other in (point_id("train", {**config, "seed": 2}, []), point_id("capture", config, []), point_id("train", config, ["name=a"]),
                  point_id("train", {**config, "run": "r"}, [])):  # fmt: skip
        assert other != same


def test_the_code_version_is_part_of_what_a_point_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from specforge.launch import sweep_record

    before = point_id("train", {"seed": 1}, [])
    monkeypatch.setattr(sweep_record, "__version__", "99")
    assert point_id("train", {"seed": 1}, []) != before
    monkeypatch.undo()
    monkeypatch.setattr(freeze, "FORMAT_VERSION", 99)
    assert point_id("train", {"seed": 1}, []) != before


def test_names_and_folders_of_sweeps(tmp_path: Path) -> None:
    assert sweep_name(["a", "a"], ["seed"]) == "a"
    assert sweep_name(["a", "b"], ["strategy.ttt_length", "optimizer.lr"]) == "ttt_length-lr"
    one = sweep_folder(str(tmp_path), "a", "train", ["x=1", "launcher=local"], ["seed", "lr"])
    assert one == sweep_folder(str(tmp_path), "a", "train", ["launcher=slurm", "x=1"], ["lr", "seed"])
    assert one != sweep_folder(str(tmp_path), "a", "train", ["x=2"], ["seed", "lr"]) and one.parent == tmp_path / "sweeps" / "a"


def test_numbers_that_a_sampler_drew_are_short_in_labels() -> None:
    assert label_of(["a.lr=0.0004024066464714613", "s=eagle3_1_long", "n=12"]) == "a.lr=0.000402407 s=eagle3_1_long n=12"
    assert label_of([]) == "the only point"


def test_a_record_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="output_dir"), open_sweep(tmp_path / "file" / "x", "train", [], []):
        pass
    with pytest.raises(ConfigError, match="is not a sweep folder"):
        read_record(tmp_path)
