"""Freezing and reading a run, the signature, the lock, comparing, and composing from a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specforge.commands import diff as diff_command
from specforge.config import freeze
from specforge.config.compose import compose_overrides
from specforge.config.derive import derive
from specforge.config.diff import Side, compare, read_side
from specforge.config.from_run import compose_from_run, run_argument
from specforge.errors import ConfigError, RunError


@pytest.fixture
def frozen_run(on_tiny_target: list[str], tmp_path: Path) -> Path:
    """A run folder as the front end would make it."""
    composed = compose_overrides("train", [*on_tiny_target, "optimizer.lr=5e-4", "name=first"])
    config = derive(composed.config, lambda _: None).config
    run_dir = freeze.make_run_folder(config)
    freeze.freeze(run_dir, config, command="train", choices=composed.choices, overrides=composed.overrides)
    return run_dir


def test_round_trip_keeps_every_value(plain_config: dict[str, Any], tmp_path: Path) -> None:
    written = freeze.freeze(tmp_path, plain_config, command="train", choices={"draft": "llama", "experiment": None}, overrides=["a=1"])
    read = freeze.read_config(tmp_path)
    assert read == written
    assert {k: v for k, v in read.items() if k not in ("format_version", "command", "choices")} == plain_config
    assert type(read["optimizer"]["lr"]) is float
    assert read["choices"] == {"draft": "llama", "experiment": None} and read["format_version"] == 1
    assert yaml.safe_load((tmp_path / "overrides.yaml").read_text()) == ["a=1"]
    env = json.loads((tmp_path / "env.json").read_text())
    assert env["packages"]["torch"] and env["host"] and set(env["git"]) == {"commit", "dirty"}
    assert not list(tmp_path.glob(".*.tmp"))


def test_numbers_written_by_hand_stay_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: 1e-4\nb: 2E5\nc: 1.5e+3\nd: e5\n")
    assert freeze.load_yaml(tmp_path / "a.yaml") == {"a": 1e-4, "b": 2e5, "c": 1500.0, "d": "e5"}


def test_other_format_versions_are_refused(plain_config: dict[str, Any], tmp_path: Path) -> None:
    freeze.freeze(tmp_path, plain_config, command="train", choices={}, overrides=[])
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("format_version: 1", "format_version: 7"))
    with pytest.raises(ConfigError, match="format_version 7 — this release reads 1"):
        freeze.read_config(tmp_path)
    path.write_text("just text")
    with pytest.raises(ConfigError, match="in place of keys"):
        freeze.read_config(tmp_path)
    with pytest.raises(ConfigError, match="is not a run folder"):
        freeze.read_config(tmp_path / "nowhere")


def test_a_changed_configuration_keeps_the_old_one(plain_config: dict[str, Any], tmp_path: Path) -> None:
    for seed in (1, 2, 2, 3):
        freeze.freeze(tmp_path, {**plain_config, "seed": seed}, command="train", choices={}, overrides=[])
    assert freeze.read_config(tmp_path)["seed"] == 3
    assert [freeze.load_yaml(tmp_path / f"config.{n}.yaml")["seed"] for n in (1, 2)] == [1, 2]


def test_signature_ignores_where_a_run_happened(plain_config: dict[str, Any]) -> None:
    base = freeze.signature(plain_config)
    assert freeze.signature({**plain_config, "name": "x", "output_dir": "y", "tracker": {"kind": "z"}, "launcher": 3}) == base
    assert freeze.signature({**plain_config, "seed": 2}) != base
    assert freeze.signature({**plain_config, "names": "x"}) != base, "a prefix is a whole key"


def test_run_folders_are_never_shared(plain_config: dict[str, Any], tmp_path: Path) -> None:
    plain_config["output_dir"] = str(tmp_path / "out")
    folders = {freeze.make_run_folder(plain_config) for _ in range(5)}
    assert len(folders) == 5
    assert all(f.parent == tmp_path / "out" / "n" and freeze.signature(plain_config)[:8] in f.name for f in folders)


def test_an_output_dir_that_cannot_be_written(plain_config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="output_dir"):
        freeze.make_run_folder({**plain_config, "output_dir": str(tmp_path / "file")})


def test_the_lock_refuses_a_second_run_and_dies_with_its_process(tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from specforge.config.freeze import lock\n"
        "with lock(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"in use by process {child.pid}"), freeze.lock(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()
    with freeze.lock(tmp_path):
        pass


def test_compare_separates_choices_added_removed_and_changed() -> None:
    a = Side("a", {"draft": "x", "tracker": "p"}, {"k": 1, "gone": 2, "same": [1], "tracker.q": 1, "name": "a", "flag": True, "n": 1})
    b = Side("b", {"draft": "y", "tracker": "r"}, {"k": 3, "new": 4, "same": [1], "tracker.q": 2, "name": "b", "flag": 1, "n": 1.0})
    found = compare(a, b)
    assert found.choices == {"draft": ("x", "y")}
    assert (found.added, found.removed) == ({"new": 4}, {"gone": 2})
    assert found.changed == {"k": (1, 3), "flag": (True, 1)}
    assert "name" in compare(a, b, ignore=()).changed
    assert not compare(a, a)


def test_sides_can_be_runs_files_and_overrides(frozen_run: Path, on_tiny_target: list[str]) -> None:
    overrides = " ".join([*on_tiny_target, "optimizer.lr=5e-4"])
    assert not compare(read_side(str(frozen_run)), read_side(overrides)), "overrides are filled from a target that is on disk"
    assert not compare(read_side(str(frozen_run)), read_side(str(frozen_run / "config.yaml")))
    found = compare(read_side(overrides), read_side(f"{overrides} strategy=eagle3_1 seed=4"))
    assert found.choices == {"strategy": ("eagle3", "eagle3_1")}
    assert found.changed["seed"] == (0, 4) and found.changed["strategy.fc_norm"] == (False, True)
    with pytest.raises(ConfigError, match="is not a run folder, a YAML file or a list"):
        read_side("no such thing")


def test_diff_command_exit_codes_and_table(frozen_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.yaml"
    other.write_text((frozen_run / "config.yaml").read_text().replace("lr: 0.0005", "lr: 0.0001").replace("name: first", "name: second"))
    assert diff_command.main([str(frozen_run), str(frozen_run)]) == 0
    assert diff_command.main([str(frozen_run), str(other)]) == 1
    printed = capsys.readouterr().out
    assert "optimizer.lr" in printed and "0.0001" in printed and "second" not in printed
    assert diff_command.main([str(frozen_run), str(other), "--ignore", "optimizer,name"]) == 0
    assert diff_command.main(["--json", str(frozen_run), str(other), "--ignore="]) == 1
    out = capsys.readouterr().out
    assert set(json.loads(out[out.index("{") :])["changed"]) == {"optimizer.lr", "name"}


def test_from_run_starts_at_the_frozen_values(frozen_run: Path) -> None:
    composed = compose_from_run("evaluate", [f"run={frozen_run}", "evaluator.max_new_tokens=7", "checkpoint=latest"], str(frozen_run))
    config = composed.config
    assert config["optimizer"]["lr"] == 5e-4 and config["name"] == "first"
    assert config["draft"]["hidden_size"] == 16
    assert config["evaluator"]["max_new_tokens"] == 7 and config["checkpoint"] == "latest"
    assert config["run"] == str(frozen_run)
    assert composed.choices["target"] == "hf"


def test_from_run_takes_a_whole_group_anew(frozen_run: Path) -> None:
    composed = compose_from_run("export", [f"run={frozen_run}", "optimizer=adamw", "scheduler=wsd"], str(frozen_run))
    fresh = compose_overrides("train", ["scheduler=wsd"]).config
    assert composed.config["optimizer"] == fresh["optimizer"] and composed.config["scheduler"] == fresh["scheduler"]
    assert composed.choices["scheduler"] == "wsd"
    assert composed.config["strategy"]["draft_vocab_size"] is None, "groups that were not named stay frozen"


def test_from_run_names_unknown_keys_and_foreign_folders(frozen_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_from_run("evaluate", [f"run={frozen_run}", "evaluator.max_new_token=1", "chekpoint=best"], str(frozen_run))
    assert len(caught.value.problems) == 2
    assert "Did you mean 'evaluator.max_new_tokens'?" in caught.value.problems[0]
    assert "Did you mean 'checkpoint'?" in caught.value.problems[1]
    with pytest.raises(ConfigError, match="is not a run folder"):
        compose_from_run("evaluate", [f"run={tmp_path}"], str(tmp_path))


def test_run_argument() -> None:
    assert run_argument(["a=1", "run=x", "run='y z'"]) == "y z"
    assert run_argument(["run=null"]) is None and run_argument(["rerun=x"]) is None
