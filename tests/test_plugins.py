"""The plug-ins of ``tests/plugins`` (those of the two add-a guides) train, evaluate and export through the real command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

import specforge
from specforge import cli
from specforge.modeling.target import TargetHead
from specforge.runtime.contracts import StepContext, TrainBatch
from specforge.tracking.jsonl import read_metrics
from specforge.training.strategies.eagle3 import Eagle3

PLUGINS = Path(__file__).parent / "plugins"
SOURCE = Path(specforge.__file__).resolve().parents[1]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTIONS = ("one two three", "four five six", "seven eight nine", "ten eleven twelve", "red green blue", "north south east west")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: the plug-ins, a tiny target and a few conversations; nothing of it lies in the package."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(PLUGINS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    make_target(folder / "target")
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": f"{q} and {q} again"}]} for q in QUESTIONS]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[4:]))
    return folder


def make_target(folder: Path) -> None:
    """A random Llama of four layers and a byte-level tokenizer with a ChatML template, as save_pretrained writes them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([*QUESTIONS, "user assistant"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=special[:2])
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(11)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=len(tokenizer),
        max_position_embeddings=128, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def overrides(*more: str) -> list[str]:
    """A run of two steps on the CPU that uses both plug-ins unless ``more`` says otherwise."""
    return [
        "--config-dir", "conf", "plugins=[gelu_draft,confident_eagle3]", "draft=gelu", "strategy=confident_eagle3",
        "target=hf", "target.path=target", "data=jsonl", "data.train_path=chats.jsonl", "data.eval_path=heldout.jsonl",
        "data.max_length=96", "strategy.draft_vocab_size=64", "strategy.ttt_length=3", "trainer.global_batch_size=2", "trainer.max_steps=2",
        "trainer.epochs=1", "evaluator.max_new_tokens=6", "device=cpu", "cache_dir=cache", "name=plugged", *more,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """The run folder of a training with both plug-ins, started as a user starts it."""
    command = [sys.executable, "-m", "specforge", *overrides()]
    done = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (place / "outputs" / "plugged").iterdir()
    return run_dir


@pytest.fixture
def at_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path, str(place)])
    return place


def test_two_steps_train_and_are_logged(trained: Path) -> None:
    rows = list(read_metrics(trained / "metrics.jsonl"))
    assert [(row["step"], row["kind"]) for row in rows] == [(1, "train"), (2, "train"), (2, "eval")]
    assert all(row["loss"] > 0 and len(row["per_position_accuracy"]) == 3 for row in rows if row["kind"] == "train")
    assert rows[-1]["walk_accept_length"] >= 1.0
    assert (trained / "checkpoints" / "latest").read_text() == "step_0000002\n"


def test_the_run_remembers_the_plug_ins_and_the_checkpoint_names_no_code(trained: Path) -> None:
    config = yaml.safe_load((trained / "config.yaml").read_text())
    assert config["plugins"] == ["gelu_draft", "confident_eagle3"]
    assert config["draft"]["_target_"] == "gelu_draft.GeluDraft" and config["draft"]["hidden_size"] == 32
    assert config["strategy"]["confidence_power"] == 1.0 and config["strategy"]["step_decay"] == 0.8
    meta = (trained / "checkpoints" / "step_0000002" / "meta.json").read_text()
    identity = json.loads(meta)["identity"]
    assert (identity["architecture"], identity["strategy"]) == ("gelu", "confident_eagle3") and "_target_" not in meta


def test_the_feed_forward_of_the_plug_in_was_trained(trained: Path) -> None:
    from safetensors.torch import load_file

    weights = load_file(trained / "checkpoints" / "step_0000002" / "model.safetensors")
    assert weights["midlayer.mlp.up_proj.weight"].shape == (48, 32)
    assert not any("gate_proj" in name for name in weights)


def test_evaluate_finds_the_plug_ins_through_the_run(trained: Path, at_place: Path) -> None:
    assert cli.main(["evaluate", f"run={trained}"]) == 0
    (report,) = (json.loads(path.read_text()) for path in (trained / "evaluate").glob("2*.json"))
    decoding = report["drafts"]["trained (step_0000002)"]["decoding"]
    assert decoding["num_requests"] == 2 and decoding["lossless_requests"] == decoding["compared_requests"] == 2
    assert 1.0 <= decoding["accept_length"] <= 4.0


def test_an_architecture_without_a_loader_is_not_exported(trained: Path, at_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", f"run={trained}", "format=sglang"]) == 2
    assert "no serving class for draft=gelu" in capsys.readouterr().err
    assert not (trained / "export" / "sglang").exists()


def test_the_strategy_alone_exports_as_an_ordinary_eagle3_draft(at_place: Path) -> None:
    assert cli.main(overrides("draft=llama", "name=alone", "data.eval_path=null")) == 0
    (run_dir,) = (at_place / "outputs" / "alone").iterdir()
    assert cli.main(["export", f"run={run_dir}", "format=sglang"]) == 0
    exported = json.loads((run_dir / "export" / "sglang" / "config.json").read_text())
    assert exported["architectures"] == ["LlamaForCausalLMEagle3"] and exported["specforge"]["strategy"] == "confident_eagle3"


def test_a_run_goes_on_with_another_loss_but_not_with_another_draft(at_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(overrides("draft=llama", "name=goes_on", "data.eval_path=null", "trainer.max_steps=1")) == 0
    (run_dir,) = (at_place / "outputs" / "goes_on").iterdir()
    assert cli.main([f"run={run_dir}", "trainer.max_steps=2", "strategy.confidence_power=0.5"]) == 0
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_0000002\n"
    assert cli.main([f"run={run_dir}", "trainer.max_steps=3", "strategy.fc_norm=true"]) == 2
    assert "fc_norm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("plugins=[]", "If you trust the package, name it: plugins=[gelu_draft]"),
        ("strategy.confidence_power=-1", "strategy.confidence_power: -1 — input should be greater than or equal to 0"),
        ("strategy.confidence_powr=1", "Did you mean 'strategy.confidence_power'?"),
        ("draft.hidden_size=16", "strategy confident_eagle3 reads the target's own embedding of width 32"),
    ],
)
def test_mistakes_are_answered_as_for_built_in_options(change: str, words: str, at_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(overrides(change, "name=wrong")) == 2
    assert words in capsys.readouterr().err
    assert not (at_place / "outputs" / "wrong").exists()


@pytest.fixture
def confident(at_place: Path) -> ModuleType:
    import importlib

    return importlib.import_module("confident_eagle3")


@pytest.mark.parametrize(("power", "relation"), [(0.0, "equal"), (1.0, "smaller")])
def test_confidence_scales_the_loss_and_nothing_else(
    power: float, relation: str, confident: ModuleType, make_strategy: Callable[..., Eagle3], make_draft: Callable[..., Any],
    make_batch: Callable[..., TrainBatch], tiny_head: TargetHead,
) -> None:  # fmt: skip
    plain = make_strategy()
    strategy = confident.ConfidentEagle3(
        confidence_power=power, ttt_length=3, step_decay=0.8, draft_vocab_size=None, aux_hidden_state_layer_ids=[1, 2, 4], fc_norm=False,
        norm_before_fc=False, norm_output=False, norm_before_residual=False, loss="soft_cross_entropy", kl_scale=1.0, kl_decay=3.0,
    )  # fmt: skip
    draft, batch = make_draft(plain), make_batch([[[0, 0, 1, 1, 1, 1, 1]], [[0, 1, 1, 1, 1]]], width=7)
    context = StepContext(step=0, total_steps=1, epoch=0, seed=0)
    expected = plain.forward_loss(draft, batch, tiny_head, context)
    found = strategy.forward_loss(draft, batch, tiny_head, context)
    assert torch.equal(found.weight_sum, expected.weight_sum)
    assert torch.equal(found.metrics["per_position_accuracy"][0], expected.metrics["per_position_accuracy"][0])
    if relation == "equal":
        torch.testing.assert_close(found.loss_sum, expected.loss_sum)
    else:
        assert 0 < found.loss_sum < 0.99 * expected.loss_sum
