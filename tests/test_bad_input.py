"""Wrong input through the command line: one message that names the thing, its value and the way out; an exit code; nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut_short(path: Path, keep: float = 0.5) -> None:
    os.truncate(path, int(path.stat().st_size * keep))


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def files_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture
def target(tiny_target_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target that a test may damage."""
    return shutil.copytree(tiny_target_folder, tmp_path / "target")


@pytest.fixture(scope="module")
def trained(tiny_work, run_cli) -> Path:
    """A finished run of two epochs with both checkpoints kept."""
    outcome = run_cli(*tiny_work.base, "trainer.epochs=2", "trainer.global_batch_size=4", "output_dir=done", cwd=tiny_work.folder)
    assert outcome.code == 0, outcome.err
    return tiny_work.folder / outcome.run_dir


@pytest.fixture
def run_copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may damage."""
    return shutil.copytree(trained, tmp_path / "copy" / trained.name)


@pytest.fixture(scope="module")
def features(tiny_work, run_cli) -> Path:
    assert run_cli("capture", *tiny_work.base, "output=captured", cwd=tiny_work.folder).code == 0
    return tiny_work.folder / "captured"


@pytest.fixture
def features_copy(features: Path, tmp_path: Path) -> Path:
    return shutil.copytree(features, tmp_path / "features")


# -- the command line and the YAML files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["strategy=eagle4"], ["strategy=eagle4: no such option", "Did you mean 'strategy=eagle3'", "eagle3_1"]),
        (["topology=ofline"], ["Did you mean 'topology=offline'"]),
        (["optimizer.lrr=1"], ["optimizer.lrr: no such key", "Did you mean 'optimizer.lr'"]),
        (["optimiser=adamw"], ["optimiser", "Did you mean 'optimizer'"]),
        (["optimizer.lr=fast"], ["optimizer.lr: 'fast'", "Allowed: "]),
        (["trainer.epochs=0"], ["trainer.epochs: 0", "Allowed: "]),
        (["seed=x"], ["seed: 'x'"]),
        (["device=tpu"], ["device: 'tpu'", "allowed are auto, cpu, cuda"]),
        (["device=cuda:77"], ["device: 'cuda:77'", "Use device=auto or device=cpu"]),
        (["strategy.draft_vocab_size=301"], ["strategy.draft_vocab_size: 301", "the target's vocabulary of 300", "Allowed: 2 to 300"]),
        (["strategy.aux_hidden_state_layer_ids=[1,5]"], ["aux_hidden_state_layer_ids: [5]", "6 layers", "ids 0 to 4"]),
        (["strategy.aux_hidden_state_layer_ids=[-1,2]"], ["aux_hidden_state_layer_ids: [-1]", "ids 0 to 4"]),
        (["strategy.aux_hidden_state_layer_ids=[2,2]"], ["aux_hidden_state_layer_ids: [2, 2]", "only once"]),
        (["strategy.aux_hidden_state_layer_ids=[]"], ["aux_hidden_state_layer_ids: []", "at least one layer"]),
        (["draft.num_layers=0"], ["draft.num_layers: 0", "greater than or equal to 1"]),
        (["draft.init_from=taget"], ["draft.init_from", "taget", "random, target, or a published draft"]),
        (["draft.num_heads=3", "draft.num_kv_heads=2"], ["draft.num_heads", "3", "draft.num_kv_heads", "2"]),
        (["draft.hidden_size=16"], ["draft.hidden_size: 16", "embedding of width 32"]),
        (["draft.head_dim=7"], ["draft.head_dim: 7", "must be even"]),
        (["draft.num_kv_heads=0"], ["draft.num_kv_heads: 0", "at least 1"]),
        (["draft.rope={rope_type: llama3, rope_theta: 1e4}"], ["draft.rope: ", "rope_type llama3 needs 'factor'"]),
        (["draft.rope={rope_type: ntk, rope_theta: 1e4}"], ["draft.rope.rope_type: 'ntk'", "yarn"]),
        (["draft.rope={rope_type: default}"], ["draft.rope: ", "lacks rope_theta"]),
        (["num_threads=0"], ["num_threads: 0", "allowed is 1 or more"]),
        (["optimizer=null"], ["optimizer: null", "Choose optimizer=<option>"]),
        (["data.train_path=."], ["data.train_path=. is a folder", "train.jsonl"]),
        (["launcher.processes=9", "trainer.global_batch_size=4"], ["trainer.global_batch_size: 4", "9 ranks"]),
        (["topology=offline"], ["topology.features_dir: missing"]),
        (["topology=offline", "topology.features_dir=nowhere"], ["nowhere", "capture output="]),
        (["feature_store.max_bytes=lots"], ["feature_store.max_bytes=lots", "8GiB"]),
        (["trainer.resume=nowhere"], ["nowhere"]),
        (["tracker=wandb"], ["tracker=wandb: no such option"]),
        (["name=a/b"], ["name: 'a/b'"]),
        (["data.train_path=trian.jsonl"], ["data.train_path=trian.jsonl: no such file", "Did you mean train.jsonl"]),
        (["data.eval_path=/nowhere/x.jsonl"], ["data.eval_path=/nowhere/x.jsonl: no such file", "does not exist either"]),
        (["data.chat_template=/nowhere/chat.jinja"], ["data.chat_template=/nowhere/chat.jinja cannot be read"]),
        (["data.chat_template='{% for %}'"], ["data.chat_template: not valid Jinja"]),
        (["run=nowhere"], ["run: ", "nowhere", "is not a run folder"]),
        (["run=."], ["is not a run folder"]),
    ],
)  # fmt: skip
def test_a_wrong_value_is_answered(overrides, says, refused, tiny_work, tmp_path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    own = [] if overrides[0].startswith("run=") else tiny_work.base
    refused(*own, *overrides, says=says)


def test_the_command_word_comes_first(refused, tiny_work) -> None:
    refused("-m", "evaluate", "run=x", says=["evaluate: the command comes first: specforge evaluate -m run=x"])


def test_several_mistakes_are_told_together(refused, tiny_work) -> None:
    refused(*tiny_work.base, "optimizer.lrr=1", "strategy=eagle4", says=["2 problems", "optimizer.lrr", "strategy=eagle4"])
    refused(*tiny_work.base, "optimizer.lr=-1", "trainer.epochs=0", says=["2 problems", "optimizer.lr: -1", "trainer.epochs: 0"])
    refused(*tiny_work.base, "strategy.draft_vocab_size=999", "strategy.aux_hidden_state_layer_ids=[9]", says=["2 problems", "999", "[9]"])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("epochs: 3\nepoch: 4\n", ["trainer.epoch", "no such key", "Did you mean 'epochs'"]),
        ("epochs: [3\n", ["trainer/mine.yaml, line", "not valid YAML"]),
        ("epochs: three\n", ["trainer.epochs: 'three'"]),
    ],
)
def test_a_typo_in_a_users_yaml_is_named(content, says, refused, tiny_work, tmp_path) -> None:
    (tmp_path / "mine" / "trainer").mkdir(parents=True)
    (tmp_path / "mine" / "trainer" / "mine.yaml").write_text(f"defaults: [default]\n{content}")
    refused("--config-dir", "mine", *tiny_work.base, "trainer=mine", says=says)


# -- data -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ["bad.jsonl", "0 rows", "The file is empty"]),
        (b'{"messages": []}\nnot json\n{"text": "x"}\n', ["3 rows gave no supervised token", "skipped: 3", "bad.jsonl:1: messages is"]),
        (b'{"messages": [{"role": "user", "content": "x"}]}\n', ["no supervised token", "no assistant message", "regenerate"]),
        (b'\xff\xfe{"a": 1}\n\x80\n', ["no supervised token", "not UTF-8 (byte 0)"]),
        (b"\x1f\x8b\x08broken", ["no supervised token", "bad.jsonl:1"]),
    ],
)
@pytest.mark.parametrize("command", ["train", "prepare", "capture"])
def test_a_file_without_a_usable_row_is_refused(command, content, says, refused, tiny_work, tmp_path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    own = ["output=features"] if command == "capture" else []
    refused(command, *tiny_work.base, *own, "data.train_path=bad.jsonl", says=says)
    assert not (tmp_path / "features").exists()


def test_a_run_without_a_supervised_token_is_refused(refused, tiny_work) -> None:
    refused(*tiny_work.base, "data.max_length=8", says=["no supervised token", "data.max_length=8", "Raise data.max_length"])


def test_a_few_bad_rows_are_skipped_and_told(run_cli, tiny_work, tmp_path) -> None:
    good = (tiny_work.folder / "train.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "mixed.jsonl").write_bytes(b"".join([good[0], b"\xff\n", good[1], b'{"messages": 3}\n', good[2]]))
    done = run_cli(*tiny_work.base, "data.train_path=mixed.jsonl", "trainer.epochs=1", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "5 rows, 3 samples" in done.out and "mixed.jsonl:2: not UTF-8" in done.out and "mixed.jsonl:4: messages is a number" in done.out


# -- the target -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remove", "says"),
    [
        (["tokenizer.json"], ["lacks a tokenizer"]),
        (["model.safetensors"], ["lacks weights"]),
        (["config.json"], ["lacks config.json"]),
        (["config.json", "model.safetensors", "tokenizer.json"], ["config.json", "weights", "tokenizer"]),
    ],
)
def test_an_incomplete_target_folder_is_named(remove, says, refused, target, tiny_work) -> None:
    for name in remove:
        (target / name).unlink()
    refused(*tiny_work.base, f"target.path={target}", says=[str(target), *says])


def test_a_target_that_is_not_there(refused, tiny_work, tmp_path) -> None:
    refused(*tiny_work.base, f"target.path={tmp_path}/nowhere", says=["target.path=", "nowhere", "no such folder"])
    (tmp_path / "file").write_text("x")
    refused(*tiny_work.base, f"target.path={tmp_path}/file", says=["is a file"])


@pytest.mark.parametrize("topology", ["colocated", "offline"])
def test_cut_off_target_weights_are_named(topology, refused, target, tiny_work, features) -> None:
    cut_short(target / "model.safetensors")
    more = [f"topology={topology}", *([f"topology.features_dir={features}"] if topology == "offline" else [])]
    refused(*tiny_work.base, *more, f"target.path={target}", says=["model.safetensors", "damaged or incomplete"])


def test_a_damaged_target_configuration_is_named(refused, target, tiny_work) -> None:
    (target / "config.json").write_text('{"hidden_size": 32')
    refused(*tiny_work.base, f"target.path={target}", says=["config.json", "cannot be read as JSON"])


def test_a_damaged_tokenizer_is_named(refused, target, tiny_work) -> None:
    cut_short(target / "tokenizer.json")
    refused(*tiny_work.base, f"target.path={target}", says=["tokenizer", "cannot be loaded"])


def test_a_target_without_a_chat_template_is_named(refused, target, tiny_work) -> None:
    (target / "chat_template.jinja").unlink()
    refused(*tiny_work.base, f"target.path={target}", says=["data.chat_template=null", "has no chat template"])


def test_a_tokenizer_of_a_larger_model_is_named(refused, make_tiny_target, tiny_work, tmp_path) -> None:
    small = make_tiny_target(tmp_path / "small", vocab_size=280)
    refused(*tiny_work.base, f"target.path={small}", "strategy.draft_vocab_size=null", says=["the target's vocabulary has 280"])


# -- captured features ----------------------------------------------------------------------------------------------------------


def test_features_of_another_target_or_other_layers_are_refused(refused, features, make_tiny_target, tiny_work, tmp_path) -> None:
    offline = [*tiny_work.base, "topology=offline", f"topology.features_dir={features}"]
    other = make_tiny_target(tmp_path / "other", seed=1)
    refused(*offline, f"target.path={other}", says=["do not belong to this run", "target config_digest", " versus "])
    refused(*offline, "strategy.aux_hidden_state_layer_ids=[0,3]", says=["aux_layer_ids: (0, 3) versus (1, 2)"])
    refused("capture", *tiny_work.base, f"output={features}", f"target.path={other}", says=["do not belong to this run"])


def test_features_of_other_conversations_are_refused(refused, features, tiny_work, tmp_path) -> None:
    row = json.loads((tiny_work.folder / "train.jsonl").read_text().splitlines()[0])
    row["response_ids"][0][3] += 1
    (tmp_path / "other.jsonl").write_text(json.dumps(row) + "\n")
    refused(
        *tiny_work.base,
        "topology=offline",
        f"topology.features_dir={features}",
        "data.train_path=other.jsonl",
        says=["lacks 1 of 1 samples", "capture output="],
    )


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: cut_short(next(folder.glob("*.safetensors"))), ["damaged or cut short"]),
        (lambda folder: damage(next(folder.glob("*.safetensors")), -100), ["checksum", "the file is damaged"]),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), ["is missing"]),
        (lambda folder: cut_short(next(folder.glob("*.jsonl"))), ["is damaged", "capture again"]),
        (lambda folder: (folder / "header.json").unlink(), ["header.json", "not a feature folder"]),
        (lambda folder: edit_json(folder / "header.json", format_version=99), ["format version 99"]),
    ],
)
def test_damaged_features_are_refused_by_name(spoil, says, refused, features_copy, tiny_work) -> None:
    spoil(features_copy)
    # A checksum is compared when its sample is read for the first time, which may be after some steps.
    refused(
        *tiny_work.base,
        "topology=offline",
        f"topology.features_dir={features_copy}",
        says=[str(features_copy), *says],
        leaves="checksum" in says,
    )


# -- runs and checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["draft.intermediate_size=64"], ["of another draft", "draft.intermediate_size: 48 in the checkpoint, 64 in this run"]),
        (["strategy.fc_norm=true"], ["of another draft", "strategy.fc_norm"]),
        (["strategy.draft_vocab_size=90"], ["of another draft", "vocabulary"]),
        (["strategy.aux_hidden_state_layer_ids=[0,2,4]"], ["of another draft", "aux_hidden_state_layer_ids"]),
    ],
)
def test_a_run_is_not_continued_as_another_draft_and_keeps_its_files(overrides, says, refused, run_copy) -> None:
    before = files_of(run_copy)
    refused(f"run={run_copy}", "trainer.epochs=4", *overrides, says=says, leaves=True)
    assert files_of(run_copy) == before


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["strategy.fc_norm=true"], ["of another draft", "strategy.fc_norm: False in the checkpoint, True"]),
        (["strategy.norm_output=true"], ["of another draft", "strategy.norm_output"]),
        (["draft.intermediate_size=64"], ["draft.intermediate_size: 48 in the checkpoint, 64 in this run"]),
        (["strategy.aux_hidden_state_layer_ids=[0,2]"], ["of another draft", "aux_hidden_state_layer_ids"]),
        (["checkpoint=7"], ["has no checkpoint '7'", "best, latest, 3, 6"]),
        (["data.eval_path=null"], ["data.eval_path=null", "held-out"]),
        (["data.eval_path=gone.jsonl"], ["data.eval_path=gone.jsonl: no such file"]),
    ],
)
def test_evaluate_refuses_what_the_checkpoint_is_not(overrides, says, refused, run_copy) -> None:
    before = files_of(run_copy)
    refused("evaluate", f"run={run_copy}", *overrides, says=says, leaves=True)
    assert files_of(run_copy) == before


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["format=gguf"], ["format=gguf: unknown", "sglang, hf"]),
        (["+format2=hf"], ["format2: no such key"]),
        (["dtype=int3"], ["dtype: int3", "float32, bfloat16, float16"]),
        (["checkpoint=4"], ["has no checkpoint '4'"]),
        (["output=file"], ["output=file", "is a file"]),
        (["output=full"], ["output=full", "is not an export of ours"]),
        (["draft.intermediate_size=64"], ["of another draft"]),
    ],
)
def test_export_refuses_what_it_cannot_write(overrides, says, refused, run_copy, tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    before = files_of(run_copy)
    refused("export", f"run={run_copy}", *overrides, says=says, leaves=True)
    assert files_of(run_copy) == before and (tmp_path / "full" / "mine").read_text() == "x"


@pytest.mark.parametrize(
    ("name", "spoil", "says"),
    [
        ("model.safetensors", cut_short, ["model.safetensors has", "the file is truncated", "Delete this checkpoint folder"]),
        ("training.pt", cut_short, ["training.pt has", "the file is truncated"]),
        ("model.safetensors", lambda path: damage(path, -5), ["model.safetensors is damaged"]),
        ("meta.json", cut_short, ["meta.json cannot be read"]),
        ("meta.json", lambda path: edit_json(path, format_version=99), ["format version 99", "this SpecForge reads 1"]),
    ],
)
def test_a_damaged_checkpoint_is_named_and_nothing_is_overwritten(name, spoil, says, refused, run_copy) -> None:
    spoil(run_copy / "checkpoints" / "step_0000006" / name)
    before = files_of(run_copy)
    refused(f"run={run_copy}", "trainer.epochs=3", says=["step_0000006", *says], leaves=True)
    if name != "training.pt":  # which evaluating does not need
        refused("evaluate", f"run={run_copy}", "checkpoint=6", says=["step_0000006", *says], leaves=True)
    assert files_of(run_copy) == before


def test_a_frozen_configuration_of_another_release_is_refused(refused, run_copy) -> None:
    path = run_copy / "config.yaml"
    path.write_text(path.read_text().replace("format_version: 1", "format_version: 99"))
    refused(f"run={run_copy}", says=["format_version 99", "this release reads 1"], leaves=True)
    path.write_text(": [")
    refused("evaluate", f"run={run_copy}", says=["config.yaml", "not readable as YAML"], leaves=True)


def test_published_drafts_that_do_not_fit_are_named(refused, run_cli, trained, tiny_work, tmp_path) -> None:
    assert run_cli("export", f"run={trained}", f"output={tmp_path}/draft", cwd=tmp_path).code == 0
    draft = tmp_path / "draft"
    base = [*tiny_work.base, "draft.init_from=draft"]
    refused(*base, "draft.intermediate_size=64", says=["does not fit this configuration", "mlp.up_proj.weight"])
    refused(*base, "strategy.aux_hidden_state_layer_ids=[0,2,4]", says=["fc.weight is [32, 64], this draft has [32, 96]"])
    config = json.loads((draft / "config.json").read_text())
    edit_json(draft / "config.json", architectures=["NobodysDraft"])
    refused("evaluate", *tiny_work.base, "draft_folder=draft", says=["architectures is NobodysDraft"])
    (draft / "config.json").write_text(json.dumps(config))
    tensors = load_file(draft / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, draft / "model.safetensors")
    refused("evaluate", *tiny_work.base, "draft_folder=draft", says=["fc.weight is missing"])
    cut_short(draft / "model.safetensors")
    refused("evaluate", *tiny_work.base, "draft_folder=draft", says=["weights cannot be read"])
    refused("evaluate", *tiny_work.base, "draft_folder=nowhere", says=["nowhere", "config.json"])


# -- places that cannot be written ----------------------------------------------------------------------------------------------


def test_an_output_dir_that_is_a_file(refused, tiny_work, tmp_path) -> None:
    (tmp_path / "taken").write_text("mine")
    refused(*tiny_work.base, "output_dir=taken", says=["output_dir", "taken", "Choose another output_dir"], code=1)
    refused("capture", *tiny_work.base, "output=taken", says=["output=taken", "is a file"])
    refused("capture", *tiny_work.base, "output=taken/features", says=["taken/features", "Not a directory"], code=1, leaves=True)
    refused(*tiny_work.base, f"cache_dir={tmp_path}/taken", says=["taken", "cache_dir"], code=1, leaves=True)
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["output=null"], ["output=null"]),
        (["output=."], ["is a folder"]),
        (["input=nowhere.jsonl"], ["input=nowhere.jsonl: no such file"]),
        (["temperature=-1", "top_p=0"], ["2 problems", "temperature=-1", "top_p=0"]),
        (["batch_size=0"], ["batch_size=0"]),
        (["output=foreign.jsonl"], ["foreign.jsonl, line 1"]),
    ],
)
def test_regenerate_says_what_it_cannot_do(overrides, says, refused, tiny_work, tmp_path) -> None:
    (tmp_path / "foreign.jsonl").write_text('{"id": "a", "note": "somebody else\'s"}\n')
    refused("regenerate", *tiny_work.base, "output=answers.jsonl", *overrides, says=says)
    assert not (tmp_path / "answers.jsonl").exists()
    assert (tmp_path / "foreign.jsonl").read_text().startswith('{"id": "a", "note"')


def test_capture_needs_an_output(refused, tiny_work) -> None:
    refused("capture", *tiny_work.base, says=["output=null", "output=features/demo"])


# -- numbers --------------------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_ends_the_run_and_spares_the_checkpoint(run_cli, run_copy, tmp_path) -> None:
    before = files_of(run_copy / "checkpoints")
    outcome = run_cli(
        f"run={run_copy}",
        "trainer.epochs=9",
        "optimizer.lr=1e30",
        "scheduler=constant",
        "trainer.clip_norm=null",
        "trainer.save_every=100",
        "trainer.eval_every=100",
        cwd=tmp_path,
    )
    assert outcome.code == 3 and "Traceback" not in outcome.err, outcome.err
    assert "is not finite" in outcome.err and "step 8" in outcome.err and "Lower optimizer.lr" in outcome.err
    assert files_of(run_copy / "checkpoints") == before
    # With a sane rate the same run goes on from its last checkpoint.
    again = run_cli(f"run={run_copy}", "optimizer.lr=1e-3", "trainer.epochs=3", cwd=tmp_path)
    assert again.code == 0 and "step_0000006: step 6 of 9" in again.err, again.err
