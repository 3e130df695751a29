"""Composition: groups, typos, the searched folders, and what Hydra's errors become."""

from __future__ import annotations

from pathlib import Path

import pytest

from specforge.config import schema
from specforge.config.compose import compose, compose_overrides, flatten
from specforge.config.locate import config_dir
from specforge.errors import ConfigError


def problems(*overrides: str, command: str = "train") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose_overrides(command, overrides)
    return caught.value.problems


@pytest.mark.parametrize("command", schema.SCHEMAS)
def test_every_command_composes_with_every_root_key(command: str) -> None:
    composed = compose_overrides(command, [])
    assert set(composed.config) == set(schema.SCHEMAS[command].__dataclass_fields__)
    assert all(composed.choices[group] for group in schema.GROUPS)
    assert "hydra" not in composed.config


def test_overrides_and_choices_are_kept() -> None:
    composed = compose_overrides("train", ["strategy=eagle3_1", "seed=7"])
    assert composed.choices["strategy"] == "eagle3_1"
    assert composed.config["seed"] == 7
    assert composed.overrides == ["strategy=eagle3_1", "seed=7"]


def test_cache_dir_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFORGE_CACHE", "/somewhere")
    assert compose_overrides("train", []).config["cache_dir"] == "/somewhere"
    monkeypatch.delenv("SPECFORGE_CACHE")
    assert compose_overrides("train", []).config["cache_dir"] == "~/.cache/specforge"


def test_unknown_option_names_the_nearest_and_all() -> None:
    [message] = problems("draft=lama")
    assert message.startswith("draft=lama: no such option. Did you mean 'draft=llama'?")
    assert "Available options in 'draft':" in message and "llama" in message


def test_unknown_keys_are_named_together() -> None:
    found = problems("sede=1", "optimizer.lrr=3", "draft=lama")
    assert len(found) == 3
    assert any(m.startswith("sede: no such key. Did you mean 'seed'?") for m in found)
    assert any(m.startswith("optimizer.lrr: no such key. Did you mean 'optimizer.lr'? Keys of optimizer:") for m in found)
    assert any(m.startswith("draft=lama") for m in found)


def test_root_value_of_the_wrong_type() -> None:
    [message] = problems("seed=abc")
    assert message.startswith("seed: 'abc'") and "Integer" in message


def test_a_comma_without_multirun_says_m() -> None:
    [message] = problems("seed=1,2")
    assert "Add -m" in message and "seed=[1,2]" in message


def test_a_line_that_is_no_override() -> None:
    [message] = problems("x=[1,")
    assert "not a valid override" in message


def test_unresolvable_interpolation_names_the_key() -> None:
    [message] = problems("name=${nope}")
    assert message.startswith("name: cannot be resolved")


def test_root_typo_in_a_yaml_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "my" / "experiment").mkdir(parents=True)
    (tmp_path / "my" / "experiment" / "wrong.yaml").write_text("# @package _global_\nsede: 3\n")
    with pytest.raises(ConfigError) as caught:
        compose("train", ["--config-dir", str(tmp_path / "my"), "experiment=wrong"])
    assert caught.value.problems == ["experiment/wrong.yaml: sede: no such key at the root. Did you mean 'seed'?"]


@pytest.mark.parametrize(("text", "line"), [("lr: 1\nlr: 2\n", 2), ("a: [1\nb: 2\n", 2), ("\ta: 1\n", 1)])
def test_a_file_that_is_no_yaml_is_named_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "my" / "optimizer").mkdir(parents=True)
    (tmp_path / "my" / "optimizer" / "broken.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose("train", ["--config-dir", str(tmp_path / "my"), "optimizer=broken"])
    [message] = caught.value.problems
    assert f"broken.yaml, line {line}: is not valid YAML" in message


def test_an_experiment_switches_groups_and_the_line_wins(tmp_path: Path) -> None:
    folder = tmp_path / "my" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /strategy: eagle3_1\nseed: 9\n")
    flags = ["--config-dir", str(tmp_path / "my"), "experiment=mine"]
    composed = compose("train", flags)
    assert composed is not None and composed.choices["strategy"] == "eagle3_1" and composed.config["seed"] == 9
    composed = compose("train", [*flags, "strategy=eagle3", "seed=2"])
    assert composed is not None and composed.choices["strategy"] == "eagle3" and composed.config["seed"] == 2


def test_a_search_path_works_like_config_dir(tmp_path: Path) -> None:
    (tmp_path / "more" / "scheduler").mkdir(parents=True)
    node = "_target_: specforge.training.scheduler.Constant\nwarmup_steps: 0\nwarmup_ratio: 0.0\n"
    (tmp_path / "more" / "scheduler" / "flat.yaml").write_text(node)
    composed = compose_overrides("train", [f"hydra.searchpath=[file://{tmp_path / 'more'}]", "scheduler=flat"])
    assert composed.choices["scheduler"] == "flat"


def test_composing_leaves_nothing_behind(tmp_path: Path) -> None:
    compose_overrides("train", ["seed=3"])
    assert list(tmp_path.iterdir()) == []


def test_locate_prefers_the_checkout_and_names_both(tmp_path: Path) -> None:
    package = tmp_path / "src" / "specforge"
    package.mkdir(parents=True)
    with pytest.raises(ConfigError, match="no configuration folder found"):
        config_dir(package)
    for folder in (package / "conf", tmp_path / "conf"):
        folder.mkdir()
        (folder / "base.yaml").write_text("")
    assert config_dir(package) == tmp_path / "conf"
    (tmp_path / "conf" / "base.yaml").unlink()
    assert config_dir(package) == package / "conf"


def test_flatten_keeps_lists_and_empty_nodes_as_leaves() -> None:
    assert flatten({"a": {"b": [1], "c": {}}, "d": None}) == {"a.b": [1], "a.c": {}, "d": None}
