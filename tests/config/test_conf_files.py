"""Every YAML in conf/ is reached, begins with its comment, checks against its constructor, and every combination is accounted for."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from specforge.config import schema
from specforge.config.check import check_node, find_problems
from specforge.config.compose import compose_overrides, flatten
from specforge.config.help import group_options
from specforge.config.locate import config_dir
from specforge.config.rules import RULES, violations
from specforge.config.signature import locate, parameters
from specforge.errors import ConfigError
from specforge.modeling.target_facts import TargetFacts

# Values that have no default, by group and option; a new `???` in a YAML must get a line here.
REQUIRED: dict[tuple[str, str], dict[str, Any]] = {
    ("target", "hf"): {"path": "some/target"},
    ("data", "jsonl"): {"train_path": "chats.jsonl"},
    ("topology", "offline"): {"features_dir": "features/demo"},
    ("feature_store", "shared_dir"): {"path": "features/shared"},
    ("target_backend", "custom"): {"engine": {"_target_": "specforge.inference.target_engine.hf.HFTargetEngine", "_partial_": True}},
}
FLOOR = 25  # files that were there when this test was written
TINY = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 50000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def yaml_files() -> list[Path]:
    return sorted(config_dir().rglob("*.yaml"))


def groups() -> dict[str, list[str]]:
    return {group: options for group, options in group_options().items() if group in schema.GROUPS}


@functools.cache
def option_node(group: str, option: str) -> dict[str, Any]:
    """One option's node as Hydra composes it, with its required values filled."""
    node = compose_overrides("train", ["sizes=none", f"{group}={option}"]).config[group]
    return {**node, **REQUIRED.get((group, option), {})}


def test_every_file_is_a_command_a_group_option_or_a_declared_exception() -> None:
    reached = 0
    for path in yaml_files():
        relative = path.relative_to(config_dir())
        if len(relative.parts) == 1:
            assert relative.stem in {*schema.SCHEMAS, "base"}, relative
            if relative.stem != "base":
                compose_overrides(relative.stem, [])
        elif relative.parts[0] == "hydra":
            assert relative.as_posix() == "hydra/help/specforge.yaml"
        elif relative.parts[0] == "experiment":
            assert relative.stem in group_options()["experiment"]  # tests/config/test_recipes.py composes each of them
        elif relative.parts[0] == "sizes":
            composed = compose_overrides("train", [f"sizes={relative.stem}"])
            assert composed.choices["sizes"] == relative.stem
        else:
            assert relative.parts[0] in schema.GROUPS and len(relative.parts) == 2, relative
            assert option_node(relative.parts[0], relative.stem)
        reached += 1
    assert reached == len(yaml_files()) >= FLOOR


@pytest.mark.parametrize("path", yaml_files(), ids=lambda p: p.relative_to(config_dir()).as_posix())
def test_every_file_begins_with_purpose_command_and_override(path: Path) -> None:
    comment = list(itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines()))
    assert len(comment) >= 3, "say what it is for, the command and the one usual override"
    assert any("specforge" in line or "pip install" in line for line in comment), "show the command"


@pytest.mark.parametrize(("group", "option"), [(g, o) for g, options in groups().items() for o in options])
def test_every_option_fits_its_constructor(group: str, option: str) -> None:
    assert check_node(option_node(group, option), group) == []


@pytest.mark.parametrize(("group", "option"), [(g, o) for g, options in groups().items() for o in options])
def test_defaults_live_in_yaml_only(group: str, option: str) -> None:
    component = locate(option_node(group, option)["_target_"])
    if not component.__module__.startswith("specforge."):
        return
    for name, parameter in parameters(component).items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, f"{component.__name__}.{name} must be keyword-only"
        assert parameter.default is inspect.Parameter.empty, f"{component.__name__}.{name} has a default in code"
        assert parameter.annotation is not inspect.Parameter.empty, f"{component.__name__}.{name} is not annotated"
    kinds = [p.kind for p in inspect.signature(component).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds


def test_every_combination_of_the_groups_passes_or_fails_by_a_declared_rule() -> None:
    facts = TargetFacts.from_config(dict(TINY), "tiny")
    # Rules see a target's facts, which are the same here: one option of each class stands for the recipes' (tests/config/test_recipes.py).
    stand_ins = {option_node("target", option)["_target_"]: option for option in reversed(groups()["target"])}
    base = compose_overrides("train", ["device=cpu"])
    available = {**groups(), "target": list(stand_ins.values())}
    assert set(available) == set(schema.GROUPS)
    declared = {r.id for r in RULES}
    bad_nodes = {key: check_node(option_node(*key), key[0]) for key in ((g, o) for g, options in available.items() for o in options)}
    passed = failed = 0
    for options in itertools.product(*available.values()):
        choices: dict[str, str | None] = dict(zip(available, options, strict=True))
        assert not any(bad_nodes[(g, str(o))] for g, o in choices.items())
        config = {**base.config, **{g: option_node(g, str(o)) for g, o in choices.items()}}
        errors = [v for v in violations(config, choices, facts) if v.severity == "error"]
        assert all(v.rule in declared or v.rule.partition(":")[0] in schema.GROUPS for v in errors)
        assert all(len(v.message) > 40 and ("=" in v.message or "null" in v.message) for v in errors), "name the override to change"
        failed += bool(errors)
        passed += not errors
    total = 1
    for options in available.values():
        total *= len(options)
    assert passed + failed == total
    assert passed >= total // 2, f"{failed} of {total} combinations are refused"


def test_real_composition_agrees_with_the_product() -> None:
    """A sample of real compositions has the same nodes as the product above, which puts them together from single options."""
    available = groups()
    draw = random.Random(0)
    for _ in range(12):
        choices = {g: draw.choice(options) for g, options in available.items()}
        composed = compose_overrides("train", ["sizes=none", *(f"{g}={o}" for g, o in choices.items())])
        for group, option in choices.items():
            node = copy.deepcopy(composed.config[group])
            assert {**node, **REQUIRED.get((group, option), {})} == option_node(group, option)
        missing = [key for key, value in flatten(composed.config).items() if value == "???"]
        assert len(find_problems(composed.config)) == len(missing)


def test_sizes_of_the_embedded_example_go_with_its_target_data_and_strategy_only() -> None:
    def length(*overrides: str) -> int:
        return compose_overrides("train", list(overrides)).config["strategy"]["ttt_length"]

    assert length() == length("strategy=eagle3_1") == 3
    assert length("sizes=none") == length("target=hf", "target.path=x") == length("data=jsonl", "data.train_path=x") == 7
    with pytest.raises(ConfigError, match="sizes=nome: no such option. Available options: .*none"):
        compose_overrides("train", ["sizes=nome"])
