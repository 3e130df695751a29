"""Commands that are killed, interrupted or started twice, in real processes: nothing is lost, and what goes on ends the same."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specforge.runtime.data_plane.feature_files import open_shard

pytestmark = pytest.mark.slow

# Epochs of three steps: a checkpoint falls into an epoch and between two rows, an evaluation between two checkpoints.
PACE = ["trainer.epochs=4", "trainer.global_batch_size=5", "trainer.save_every=5", "trainer.eval_every=4", "trainer.log_every=2"]
TIMES = ("seconds", "steps_per_second", "tokens_per_second")

AT_STEP = """
import specforge.training.trainer as trainer
original = trainer.train_step
def train_step(**arguments):
    if arguments["context"].step == {step}:
        os.kill(os.getpid(), signal.{signal})
    return original(**arguments)
trainer.train_step = train_step
"""
BEFORE_RENAME = """
import specforge.training.checkpoint as checkpoint
original = os.rename
def rename(source, target):
    if str(target).endswith("step_0000010"):
        os.kill(os.getpid(), signal.SIGKILL)
    original(source, target)
checkpoint.os.rename = rename
"""
BEFORE_MARKER = """
import specforge.training.checkpoint as checkpoint
original = checkpoint.write_atomic
def write_atomic(path, text):
    if path.name == "_SUCCESS" and path.parent.name == "step_0000010":
        os.kill(os.getpid(), signal.SIGKILL)
    original(path, text)
checkpoint.write_atomic = write_atomic
"""
WHILE_ROTATING = """
import shutil
import specforge.training.checkpoint as checkpoint
original = shutil.rmtree
def rmtree(path, **options):
    if "step_" in str(path) and ".tmp" not in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
    original(path, **options)
checkpoint.shutil.rmtree = rmtree
"""


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Every row without what depends on the clock; a line that is no JSON fails."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def final_weights(run_dir: Path) -> bytes:
    return (run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip() / "model.safetensors").read_bytes()


def wait_for_rows(run_dir: Callable[[], Path | None], count: int, process: Any) -> Path:
    deadline = time.monotonic() + 90
    while True:
        folder = run_dir()
        if folder is not None and (folder / "metrics.jsonl").exists() and len((folder / "metrics.jsonl").read_text().splitlines()) >= count:
            return folder
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def command(tiny_work) -> list[str]:
    return [*tiny_work.base, *PACE]


@pytest.fixture(scope="module")
def uninterrupted(tiny_work, run_cli) -> Path:
    outcome = run_cli(*tiny_work.base, *PACE, "output_dir=whole", cwd=tiny_work.folder)
    assert outcome.code == 0, outcome.err
    return tiny_work.folder / outcome.run_dir


@pytest.fixture
def goes_on(run_cli, uninterrupted: Path, tmp_path: Path) -> Callable[..., None]:
    """``goes_on(run_dir)`` continues a run and compares it with the one that was never stopped.

    ``saved_early``: the run saved itself where the other did not, which adds a row and a checkpoint.
    """

    def check(run_dir: Path, saved_early: bool = False) -> None:
        outcome = run_cli(f"run={run_dir}", cwd=tmp_path)
        assert outcome.code == 0, outcome.err
        assert final_weights(run_dir) == final_weights(uninterrupted)
        rows, expected = ([(row["kind"], row["step"]) for row in rows_of(folder)] for folder in (run_dir, uninterrupted))
        assert len(rows) == len(set(rows)) and set(rows) >= set(expected)
        if saved_early:
            return
        assert rows_of(run_dir) == rows_of(uninterrupted)
        left = {path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir()}
        assert left == {path.name for path in (uninterrupted / "checkpoints").iterdir() if path.is_dir()}
        assert (run_dir / "checkpoints" / "best").read_text() == (uninterrupted / "checkpoints" / "best").read_text()

    return check


def test_the_pace_of_these_tests_is_what_they_need(uninterrupted: Path) -> None:
    rows = rows_of(uninterrupted)
    assert [row["step"] for row in rows if row["kind"] == "train"] == [2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [4, 8, 12]
    assert (uninterrupted / "checkpoints" / "step_0000010").is_dir(), "10 is inside an epoch of three steps"


# -- training -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "newest"),
    [
        (AT_STEP.format(step=1, signal="SIGKILL"), None),
        (AT_STEP.format(step=7, signal="SIGKILL"), "step_0000005"),
        (BEFORE_RENAME, "step_0000005"),
        (BEFORE_MARKER, "step_0000005"),
        (WHILE_ROTATING, "step_0000012"),
    ],
    ids=["first_epoch", "mid_epoch", "before_rename", "before_marker", "while_rotating"],
)
def test_a_killed_run_goes_on_bit_for_bit(before, newest, start_cli, command, goes_on, tmp_path) -> None:
    killed = start_cli(*command, cwd=tmp_path, before=before)
    assert killed.code == -signal.SIGKILL, killed.err
    run_dir = tmp_path / killed.run_dir
    complete = sorted(path.parent.name for path in run_dir.glob("checkpoints/step_*/_SUCCESS"))
    assert (complete[-1] if complete else None) == newest
    goes_on(run_dir)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_polite_signal_saves_first_and_says_how_to_go_on(name, code, start_cli, command, goes_on, tmp_path) -> None:
    stopped = start_cli(*command, cwd=tmp_path, before=AT_STEP.format(step=7, signal=name))
    run_dir = tmp_path / stopped.run_dir
    assert stopped.code == code and "Traceback" not in stopped.err, stopped.err
    # It came while the eighth step was at work, and is heard before the ninth ends.
    assert "stopped by a signal at step 9 of 12" in stopped.err and "step_0000009. Continue with: " in stopped.err
    assert f"specforge run={stopped.run_dir}" in stopped.err
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_0000009\n"
    goes_on(run_dir, saved_early=True)


def test_ctrl_c_before_the_first_step(start_cli, command, goes_on, tmp_path) -> None:
    before = """
import specforge.commands.train as train
original = train.load_data
def load_data(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return original(*arguments)
train.load_data = load_data
"""
    stopped = start_cli(*command, cwd=tmp_path, before=before)
    assert stopped.code == 130 and "Traceback" not in stopped.err, stopped.err
    assert f"Kept: {stopped.run_dir} (no checkpoint yet). Go on with: specforge run={stopped.run_dir}" in stopped.err
    goes_on(tmp_path / stopped.run_dir)


def test_a_second_run_in_the_same_folder_is_refused(start_cli, run_cli, command, uninterrupted, tmp_path) -> None:
    process = start_cli(*command, cwd=tmp_path, before=AT_STEP.format(step=7, signal="SIGSTOP"), wait=False)
    try:
        run_dir = wait_for_rows(lambda: next(iter(tmp_path.glob("outputs/t/*")), None), 4, process)
        before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.suffix in (".yaml", ".json", ".jsonl")}
        second = run_cli(f"run={run_dir}", "trainer.epochs=9", cwd=tmp_path)
        assert second.code == 1 and f"is in use by process {process.pid}" in second.err and "Traceback" not in second.err
        assert {path: path.read_bytes() for path in before} == before and not list(run_dir.glob("config.*.yaml"))
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    finally:
        process.kill()
        process.wait()
    assert final_weights(run_dir) == final_weights(uninterrupted) and rows_of(run_dir) == rows_of(uninterrupted)


def ranks_of(run_dir: Path) -> Iterator[tuple[int, int]]:
    """(rank, process id) of the workers of a run."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"specforge.launch.worker" in line and str(run_dir).encode() in line:
                rank = next(value for value in environment if value.startswith(b"RANK="))
                yield int(rank.removeprefix(b"RANK=")), int(entry.name)


def test_a_killed_rank_ends_the_run_which_then_goes_on_alone(start_cli, run_cli, command, tmp_path) -> None:
    more = ["trainer.epochs=60", "trainer.eval_every=1000"]
    process = start_cli(*command, *more, "launcher.processes=2", "launcher.grace_seconds=2", cwd=tmp_path, wait=False)
    run_dir = wait_for_rows(lambda: next(iter(tmp_path.glob("outputs/t/*")), None), 6, process)
    os.kill(dict(ranks_of(run_dir))[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "trainer rank 1 was killed by SIGKILL" in err and "specforge: " in err, err
    assert not list(ranks_of(run_dir))
    alone = run_cli(f"run={run_dir}", "launcher.processes=1", "trainer.save_every=1000", cwd=tmp_path)
    assert alone.code == 0 and "resumed from" in alone.err, alone.err
    steps = [row["step"] for row in rows_of(run_dir) if row["kind"] == "train"]
    assert steps == list(range(2, 181, 2))
    whole = run_cli(*command, *more, "output_dir=whole", "trainer.save_every=1000", cwd=tmp_path)
    newest = [max((folder / "checkpoints").glob("step_*")) for folder in (run_dir, tmp_path / whole.run_dir)]
    here, there = (load_file(folder / "model.safetensors") for folder in newest)
    for name, tensor in there.items():
        torch.testing.assert_close(here[name].float(), tensor.float(), rtol=0, atol=5e-3)


# -- capture, regenerate, evaluate ----------------------------------------------------------------------------------------------

SMALL_SHARDS = """
import specforge.runtime.data_plane.feature_files as files
files.FeatureFileWriter.__init__.__kwdefaults__["shard_bytes"] = 60000
"""
AFTER_NINE = """
original = files.FeatureFileWriter.add
def add(self, features):
    original(self, features)
    if len(self.finished) == 9:
        os.kill(os.getpid(), signal.{signal})
files.FeatureFileWriter.add = add
"""
BEFORE_MANIFEST = """
original = files._write_atomic
def write_atomic(path, *rest):
    if path.name.endswith("000002.jsonl"):
        os.kill(os.getpid(), signal.SIGKILL)
    original(path, *rest)
files._write_atomic = write_atomic
"""


def features_in(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every sample of a feature folder by id; a sample that is there twice fails."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for manifest in sorted(folder.glob("shard-*.jsonl")):
        shard = open_shard(manifest.with_suffix(".safetensors"))
        for line in map(json.loads, manifest.read_text().splitlines()):
            assert line["sample_id"] not in found
            found[line["sample_id"]] = {name: tensor[line["row"] : line["row"] + line["num_tokens"]] for name, tensor in shard.items()}
    return found


@pytest.fixture(scope="module")
def whole_features(tiny_work, run_cli) -> dict[str, dict[str, torch.Tensor]]:
    assert run_cli("capture", *tiny_work.base, "output=whole-features", cwd=tiny_work.folder).code == 0
    return features_in(tiny_work.folder / "whole-features")


@pytest.mark.parametrize(
    ("before", "code"),
    [(AFTER_NINE.format(signal="SIGKILL"), -signal.SIGKILL), (BEFORE_MANIFEST, -signal.SIGKILL), (AFTER_NINE.format(signal="SIGINT"), 130)],
    ids=["killed", "killed_before_manifest", "interrupted"],
)
def test_a_stopped_capture_goes_on_and_is_complete(before, code, start_cli, run_cli, whole_features, tiny_work, tmp_path) -> None:
    command = ["capture", *tiny_work.base, "output=features"]
    stopped = start_cli(*command, cwd=tmp_path, before=SMALL_SHARDS + before)
    assert stopped.code == code and "Traceback" not in stopped.err, stopped.err
    kept = len(features_in(tmp_path / "features"))
    assert 0 < kept < 15
    if code == 130:
        assert "Start the same command again" in stopped.err and kept == 9, "what was captured is written before leaving"
    again = run_cli(*command, cwd=tmp_path)
    assert again.code == 0 and f"{15 - kept} samples captured, {kept} were there already" in again.out, again.err
    found = features_in(tmp_path / "features")
    assert found.keys() == whole_features.keys()
    assert all(torch.equal(found[i][name], tensor) for i, tensors in whole_features.items() for name, tensor in tensors.items())
    shards = {path.stem for path in (tmp_path / "features").glob("shard-*.safetensors")}
    expected = {"header.json", *(f"{shard}.{kind}" for shard in shards for kind in ("jsonl", "safetensors"))}
    assert {path.name for path in (tmp_path / "features").iterdir()} == expected


def test_a_killed_regenerate_goes_on_and_is_complete(start_cli, run_cli, tiny_work, tmp_path) -> None:
    before = """
import specforge.commands.regenerate as regenerate
original, calls = regenerate._append, []
def append(path, rows):
    calls.append(rows)
    if len(calls) == 2:
        with path.open("ab") as file:
            file.write(b'{"id": "train-5", "messa')
        os.kill(os.getpid(), signal.SIGKILL)
    original(path, rows)
regenerate._append = append
"""
    command = ["regenerate", "target=hf", f"target.path={tiny_work.target}", f"input={tiny_work.folder / 'train-prompts.jsonl'}",
               "output=answers.jsonl", "max_new_tokens=25", "batch_size=5", "device=cpu", "num_threads=1"]  # fmt: skip
    killed = start_cli(*command, cwd=tmp_path, before=before)
    assert killed.code == -signal.SIGKILL and (tmp_path / "answers.jsonl").read_text().count("\n") == 5
    again = run_cli(*command, cwd=tmp_path)
    assert again.code == 0 and "7 conversations written" in again.out, again.err
    assert (tmp_path / "answers.jsonl").read_bytes() == (tiny_work.folder / "train.jsonl").read_bytes()
    assert "0 conversations written" in run_cli(*command, cwd=tmp_path).out


def test_ctrl_c_while_evaluating_leaves_the_run_as_it_was(run_cli, uninterrupted, tmp_path, monkeypatch) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specforge.evaluation.evaluator.decode_speculative", interrupt)
    stopped = run_cli("evaluate", f"run={uninterrupted}", cwd=tmp_path)
    assert stopped.code == 130 and "Start the same command again" in stopped.err and "Traceback" not in stopped.err
    assert not list(uninterrupted.glob("evaluate/*.json"))
