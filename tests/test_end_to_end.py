"""A draft's life through the command line with a tiny target: regenerate, train, evaluate, export, and the cuts that change nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
# What conventions §7 asks of a stored accept_length, in the words of the report.
REQUIRED = {
    "accept_length", "accept_length_interval_95", "acceptance_histogram", "num_verify_steps", "num_requests", "harness", "num_draft_tokens",
    "temperature", "mode", "max_new_tokens",
}  # fmt: skip


def rows_of(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in rows_of(run_dir)]


def final_checkpoint(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()


def weight_bytes(run_dir: Path) -> bytes:
    return (final_checkpoint(run_dir) / "model.safetensors").read_bytes()


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(final_checkpoint(run_dir) / "model.safetensors")


def report_of(folder: Path) -> dict[str, Any]:
    """The newest report; JSON has no word for NaN, so one fails."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in a report")

    newest = max(folder.glob("evaluate/*.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(newest.read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def cli(tiny_work, run_cli) -> Callable[..., Any]:
    """The command line in the folder of the conversations; a failure shows what it printed."""

    def call(*arguments: str) -> Any:
        outcome = run_cli(*arguments, cwd=tiny_work.folder)
        assert outcome.code == 0, outcome.out + outcome.err
        return outcome

    return call


@pytest.fixture(scope="module")
def train(cli, tiny_work) -> Callable[..., Path]:
    """``train(*overrides)`` runs a short training and gives its run folder, absolute."""
    return lambda *overrides: tiny_work.folder / cli(*tiny_work.short, *overrides).run_dir


@pytest.fixture(scope="module")
def reference(train) -> Path:
    """Three epochs of three steps, one process, packed, colocated."""
    return train()


@pytest.fixture(scope="module")
def learned(train, tiny_work) -> Path:
    """A draft that has learnt its conversations, held out on the same ones, so that its accept_length says something."""
    return train(
        "trainer.epochs=60",
        "trainer.log_every=30",
        "trainer.eval_every=90",
        "trainer.save_every=1000",
        f"data.eval_path={tiny_work.folder / 'train.jsonl'}",
    )


@pytest.fixture(scope="module")
def evaluated(cli, learned) -> dict[str, Any]:
    cli("evaluate", f"run={learned}")
    return report_of(learned)


def measured(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(value for key, value in report["drafts"].items() if key.startswith(name))


# -- the life of a draft --------------------------------------------------------------------------------------------------------


def test_answers_are_the_targets_own(tiny_work) -> None:
    rows = [json.loads(line) for line in (tiny_work.folder / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and {row["id"] for row in rows} == {f"train-{i}" for i in range(12)}
    for row in rows:
        # An answer that was cut ends the conversation.
        assert row["messages"][-1]["role"] == "assistant" and row["finish"] in ("stop", "length")
        assert len(row["response_ids"]) == sum(m["role"] == "assistant" for m in row["messages"])
        assert row["sampling"]["temperature"] == 0.0 and row["target"]["name"] == tiny_work.target.name


def test_a_trained_draft_beats_the_untrained_one_and_changes_no_output(evaluated, tiny_work) -> None:
    before, after = measured(evaluated, "untrained")["decoding"], measured(evaluated, "trained")["decoding"]
    assert after["accept_length"] > 1.5 > before["accept_length"]
    assert after["lossless_requests"] == after["compared_requests"] == after["num_requests"] == 12
    low, high = after["accept_length_interval_95"]
    assert low <= after["accept_length"] <= high and low > before["accept_length"]
    assert sum(after["acceptance_histogram"]) == after["num_verify_steps"] > 0
    accepted = sum(k * n for k, n in enumerate(after["acceptance_histogram"]))
    assert after["accept_length"] == pytest.approx(1 + accepted / after["num_verify_steps"])


def test_a_stored_accept_length_carries_what_the_conventions_ask(evaluated, tiny_work) -> None:
    assert measured(evaluated, "trained")["decoding"].keys() >= REQUIRED
    assert evaluated["prompts"] == str(tiny_work.folder / "train.jsonl") and evaluated["template"]
    assert evaluated["target"]["tokenizer_digest"] and "template_arguments" in evaluated


def test_walk_accept_length_of_the_run_is_the_evaluated_one(evaluated, learned) -> None:
    walked = measured(evaluated, "trained")["held_out_features"]["walk_accept_length"]
    best = max(rows_of(learned, "eval"), key=lambda row: row["walk_accept_length"])
    assert walked == pytest.approx(best["walk_accept_length"], abs=1e-12) and walked > 1.5


@pytest.mark.parametrize("mode", ["target_only", "rejection"])
def test_sampled_decoding_is_measured_and_not_called_a_difference(mode, cli, learned) -> None:
    printed = cli("evaluate", f"run={learned}", "evaluator.temperature=0.7", f"evaluator.mode={mode}", "evaluator.num_requests=3")
    decoding = measured(report_of(learned), "trained")["decoding"]
    assert decoding["mode"] == mode and decoding["lossless_requests"] is None and decoding["temperature"] == 0.7
    assert 1.0 <= decoding["accept_length"] <= 4.0 and "warning" not in printed.out and "None of" not in printed.out


@pytest.mark.parametrize("export_format", ["sglang", "hf"])
def test_an_exported_draft_decodes_like_the_run_it_came_from(export_format, cli, learned, evaluated, tiny_work) -> None:
    printed = cli("export", f"run={learned}", f"format={export_format}")
    folder = learned / "export" / export_format
    assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file() == (export_format == "hf")
    assert "checked: every tensor" in printed.out
    outcome = cli("evaluate", *tiny_work.base, f"draft_folder={folder}", f"data.eval_path={tiny_work.folder / 'train.jsonl'}")
    again = measured(report_of(tiny_work.folder / outcome.run_dir), export_format)["decoding"]
    first = measured(evaluated, "trained")["decoding"]
    for name in ("accept_length", "acceptance_histogram", "num_verify_steps", "lossless_requests", "accept_length_interval_95"):
        assert again[name] == first[name], name


def test_training_starts_from_an_exported_draft(cli, learned, evaluated, reference, train, tiny_work) -> None:
    cli("export", f"run={learned}", "output=warm")
    warm = train("draft.init_from=warm", f"data.eval_path={tiny_work.folder / 'train.jsonl'}")
    assert losses(warm)[0] < 0.7 * losses(reference)[0]
    cli("evaluate", f"run={warm}", "evaluator.num_untrained_requests=12")
    # What that run calls untrained is the draft it started from.
    start, exported = (measured(report, name)["decoding"] for report, name in ((report_of(warm), "untrained"), (evaluated, "trained")))
    assert start["acceptance_histogram"] == exported["acceptance_histogram"]


# -- cuts that change nothing ---------------------------------------------------------------------------------------------------


def test_offline_is_colocated_bit_for_bit(cli, train, reference, tiny_work) -> None:
    printed = cli("capture", *tiny_work.base, "output=features")
    assert "15 samples captured" in printed.out  # one conversation is in both files
    offline = train("topology=offline", "topology.features_dir=features")
    assert losses(offline) == losses(reference)
    assert rows_of(offline, "eval") == rows_of(reference, "eval")
    assert weight_bytes(offline) == weight_bytes(reference)
    assert "0 samples captured, 15 were there already" in cli("capture", *tiny_work.base, "output=features").out


@pytest.mark.parametrize(
    "overrides",
    [["trainer.packing=false"], ["trainer.micro_batches=2"], ["trainer.micro_batches=4", "trainer.max_row_tokens=90"],
     ["trainer.prefetch_steps=0"], ["feature_store.max_bytes=150KB"],
     ["target_backend.batch_tokens=512", "topology.lookahead_tokens=1024"]],
)  # fmt: skip
def test_how_a_batch_is_cut_or_captured_changes_no_loss(overrides, train, reference) -> None:
    cut = train(*overrides)
    assert losses(cut) == pytest.approx(losses(reference), rel=1e-5)
    assert [row["weight_sum"] for row in rows_of(cut)] == [row["weight_sum"] for row in rows_of(reference)]
    for row, expected in zip(rows_of(cut), rows_of(reference), strict=True):
        assert row["per_position_accuracy"] == expected["per_position_accuracy"]
    for name, tensor in weights(reference).items():
        torch.testing.assert_close(weights(cut)[name], tensor, rtol=0, atol=2e-4)


def test_the_same_run_twice_is_the_same_bits(train, reference) -> None:
    assert weight_bytes(train()) == weight_bytes(reference)
    assert losses(train("seed=1")) != losses(reference)


@pytest.mark.slow
def test_two_processes_are_one(start_cli, reference, tiny_work) -> None:
    done = start_cli(*tiny_work.short, "launcher.processes=2", "output_dir=two", cwd=tiny_work.folder)
    assert done.code == 0, done.out + done.err
    two = tiny_work.folder / done.run_dir
    assert losses(two) == pytest.approx(losses(reference), rel=1e-5)
    for mine, theirs in zip(rows_of(two, "eval"), rows_of(reference, "eval"), strict=True):
        assert mine["per_position_accuracy"] == theirs["per_position_accuracy"] and mine["num_rows"] == theirs["num_rows"]
        assert mine["walk_accept_length"] == theirs["walk_accept_length"]
    for name, tensor in weights(reference).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=0, atol=2e-4)
    assert {path.name for path in (two / "logs" / "latest").iterdir()} == {"rank_0.log", "rank_1.log"}


# -- overfitting ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_conversation_learnt_by_heart_is_accepted_in_whole_chains(cli, tiny_work) -> None:
    """25 answer tokens: one from prefill, then six verify steps of a full chain of 4."""
    rows = [json.loads(line) for line in (tiny_work.folder / "train.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["finish"] == "length" and len(row["response_ids"]) == 1)
    assert len(row["response_ids"][0]) == 25
    (tiny_work.folder / "one.jsonl").write_text(json.dumps(row) + "\n")
    one = [f"data.train_path={tiny_work.folder / 'one.jsonl'}", f"data.eval_path={tiny_work.folder / 'one.jsonl'}"]
    pace = [f"trainer.{key}" for key in ("epochs=600", "global_batch_size=1", "log_every=100", "eval_every=600", "save_every=600")]
    outcome = cli(*tiny_work.base, *one, *pace, "strategy.draft_vocab_size=null", "optimizer.lr=5e-3")
    run_dir = tiny_work.folder / outcome.run_dir
    cli("evaluate", f"run={run_dir}", "evaluator.max_new_tokens=25", "evaluator.num_untrained_requests=0")
    report = measured(report_of(run_dir), "trained")
    assert report["decoding"]["acceptance_histogram"] == [0, 0, 0, 6] and report["decoding"]["accept_length"] == 4.0
    assert report["held_out_features"]["per_position_accuracy"] == [1.0, 1.0, 1.0]


# -- the wheel ------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_wheel_carries_its_configuration(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="the package 'build' is not installed (extra: dev)")
    pytest.importorskip("hatchling", reason="the wheel is built without isolation, and hatchling is not installed (extra: dev)")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    shipped = {f"specforge/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert shipped and shipped <= names and "specforge/data/demo/train.jsonl" in names
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    for arguments, words in (("--cfg job -p trainer", "micro_batches: 1"), ("--help", "show-sample"), ("--version", "specforge ")):
        done = subprocess.run(
            [sys.executable, "-m", "specforge", *arguments.split()],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0 and words in done.stdout, done.stdout + done.stderr
    assert list(elsewhere.iterdir()) == []
    where = subprocess.run(
        [sys.executable, "-c", "import specforge; print(specforge.__file__)"],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(tmp_path / "site")), "the wheel was tested, not the checkout"
    shutil.rmtree(tmp_path / "site")
