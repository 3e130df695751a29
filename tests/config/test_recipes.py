"""Every recipe composes, checks and builds the published draft on the meta device, offline: the targets are config.json files.

The facts are in ``published_targets.yaml``. Where transformers has a configuration class for a family, the config.json is written by
that class from the published dimensions, so a field that the family does not have, or another default, shows here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from specforge.config.build import build
from specforge.config.check import find_problems
from specforge.config.compose import Composed, compose_overrides
from specforge.config.derive import derive
from specforge.config.locate import config_dir
from specforge.config.rules import violations
from specforge.data.vocabulary_map import VocabularyMap
from specforge.errors import ConfigError, TargetError
from specforge.inference.layer_ids import hf_hidden_states_index, sglang_setter_ids
from specforge.launch.estimate import draft_vocabulary
from specforge.modeling.draft.base import DraftArchitecture
from specforge.modeling.target_facts import TargetFacts, resolve_rope, rope_both_forms
from specforge.training.strategies.base import DraftTrainStrategy

TABLE = yaml.safe_load((Path(__file__).parent / "published_targets.yaml").read_text())
TARGETS: dict[str, dict[str, Any]] = TABLE["targets"]
EXPECTED: dict[str, dict[str, Any]] = TABLE["experiments"]
ROOT = Path(__file__).resolve().parents[2]
PLACES = ["data.train_path=answers.jsonl", "device=cpu"]
BLOCK = ("dflash", "dpace", "domino", "dspark")


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


RECIPES = options("experiment")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for each target: config.json, a weight file without weights, a tokenizer of one word."""
    root = tmp_path_factory.mktemp("targets")
    for name, entry in TARGETS.items():
        folder = root / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_json(entry)))
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return root


def config_json(entry: dict[str, Any]) -> dict[str, Any]:
    """What transformers' class writes for the published dimensions; the table's own words where it has no such class."""
    from transformers import CONFIG_MAPPING

    # A class keeps fields that it does not know, so a misspelt one would slip through here: see the test of the classes.
    text = dict(entry["config"]) if entry["class"] is None else CONFIG_MAPPING[entry["class"]](**entry["config"]).to_dict()
    if entry["wrapper"] is None:
        return {**text, "architectures": [entry["architecture"]]}
    return {"model_type": entry["wrapper"], "architectures": [entry["architecture"]], "text_config": text}


@functools.cache
def plain(recipe: str) -> Composed:
    asks = "servers: ???" in (config_dir() / "experiment" / f"{recipe}.yaml").read_text()
    servers = ["target_backend.servers=[http://a:1]"] if asks else []
    return compose_overrides("train", [f"experiment={recipe}", *PLACES, *servers])


@functools.cache
def derived(recipe: str, shelf: Path) -> tuple[Composed, dict[str, Any], TargetFacts]:
    """The recipe on its target's folder, with everything filled that the target decides."""
    composed = plain(recipe)
    folder = shelf / str(composed.choices["target"])
    filled = derive({**composed.config, "target": {**composed.config["target"], "path": str(folder)}}, report=lambda line: None)
    assert filled.facts is not None
    return composed, filled.config, filled.facts


def on_meta(config: dict[str, Any], facts: TargetFacts) -> tuple[torch.nn.Module, DraftTrainStrategy]:
    strategy = build(config["strategy"], expects=DraftTrainStrategy)
    architecture = build(config["draft"], expects=DraftArchitecture)
    with torch.device("meta"):
        kept = torch.zeros(draft_vocabulary(config, facts), dtype=torch.int64)
        vocabulary = VocabularyMap(kept, torch.zeros(facts.vocab_size, dtype=torch.bool), 1.0)
        return strategy.build_model(architecture, facts, vocabulary, torch.empty(facts.vocab_size, facts.hidden_size)), strategy


def test_targets_and_recipes_are_those_of_the_table() -> None:
    assert sorted([*TARGETS, "hf", "smollm2_135m"]) == options("target")
    assert sorted(EXPECTED) == RECIPES
    assert len(TARGETS) >= 25
    assert {recipe.split("-")[0] for recipe in RECIPES} == set(TARGETS), "each target has a recipe"


@pytest.mark.parametrize("name", TARGETS)
def test_config_class_of_transformers_carries_the_dimensions(name: str) -> None:
    entry = TARGETS[name]
    if entry["class"] is None:
        pytest.skip("transformers has no class for this family")
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[entry["class"]]().to_dict()
    # Some classes take the width of a head from config.json without a default of their own; it is a real field there.
    strange = set(entry["config"]) - set(default) - {"head_dim"}
    assert not strange, f"transformers' class for {entry['class']} has no {strange}"
    written = config_json(entry)
    text = written.get("text_config", written)
    for key, value in entry["config"].items():
        if key != "rope_parameters":
            assert text[key] == value, key
    assert resolve_rope(text)["rope_theta"] == resolve_rope(entry["config"])["rope_theta"]


@pytest.mark.parametrize("name", TARGETS)
def test_target_facts_are_the_published_ones(name: str, shelf: Path) -> None:
    published, facts = TARGETS[name]["config"], TargetFacts.from_folder(shelf / name)
    assert facts.hidden_size == published["hidden_size"] and facts.vocab_size == published["vocab_size"]
    assert facts.num_layers == published.get("num_hidden_layers", published.get("num_layers"))
    assert (facts.num_heads, facts.num_kv_heads) == (published["num_attention_heads"], published["num_key_value_heads"])
    assert facts.max_position_embeddings == published["max_position_embeddings"] and facts.rms_norm_eps == published["rms_norm_eps"]
    assert facts.tie_word_embeddings == published["tie_word_embeddings"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_checks_and_keeps_the_rules(recipe: str, shelf: Path) -> None:
    assert find_problems(plain(recipe).config) == []
    composed, config, facts = derived(recipe, shelf)
    assert find_problems(config) == []
    assert [v.message for v in violations(config, composed.choices, facts) if v.severity == "error"] == []
    target, strategy = recipe.split("-")
    assert (composed.choices["target"], composed.choices["strategy"]) == (target, strategy.removesuffix("_mla")), "the name says what it is"
    assert strategy.endswith("_mla") == (composed.choices["draft"] == "deepseek_mla"), "a draft is called MLA only if it is one"


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_without_its_target_on_disk_checks_too(recipe: str) -> None:
    """What a user meets who has not downloaded anything: rules know less and must not fall over nulls."""
    composed = plain(recipe)
    assert [v.message for v in violations(composed.config, composed.choices, None) if v.severity == "error"] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_draft_has_the_published_dimensions(recipe: str, shelf: Path) -> None:
    composed, config, facts = derived(recipe, shelf)
    expected = EXPECTED[recipe]
    assert composed.choices["draft"] == expected["draft"]
    model, strategy = on_meta(config, facts)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert all(p.device.type == "meta" for p in model.parameters())
    assert list(strategy.aux_layer_ids(facts)) == expected["aux"]
    hidden = TARGETS[recipe.split("-")[0]]["config"]["hidden_size"]
    assert shapes["fc.weight"] == (hidden, len(expected["aux"]) * hidden)
    assert count(shapes, "mlp.down_proj.weight") == [(hidden, expected["intermediate_size"])] * expected["layers"]
    vocabulary = facts.vocab_size if expected["vocabulary"] is None else expected["vocabulary"]
    assert draft_vocabulary(config, facts) == vocabulary
    if "lm_head.weight" in shapes:
        assert shapes["lm_head.weight"] == (vocabulary, hidden)
    else:
        assert composed.choices["strategy"] in BLOCK
    if expected["draft"] == "deepseek_mla":
        latent_attention(shapes, TARGETS[recipe.split("-")[0]]["config"], hidden)
        return
    heads, kv_heads, width = expected["num_heads"], expected["num_kv_heads"], expected["head_dim"]
    assert [s[0] for s in count(shapes, "self_attn.q_proj.weight")] == [heads * width] * expected["layers"]
    assert [s[0] for s in count(shapes, "self_attn.k_proj.weight")] == [kv_heads * width] * expected["layers"]
    assert (config["draft"]["num_heads"], config["draft"]["num_kv_heads"], config["draft"]["head_dim"]) == (heads, kv_heads, width)


def latent_attention(shapes: dict[str, tuple[int, ...]], published: dict[str, Any], hidden: int) -> None:
    """The projections of one MLA layer with the two-part input of EAGLE-3 (upstream's serving layout before fusing)."""
    heads, rank, rope = published["num_attention_heads"], published["kv_lora_rank"], published["qk_rope_head_dim"]
    assert count(shapes, "q_a_proj.weight") == [(published["q_lora_rank"], 2 * hidden)]
    assert count(shapes, "q_b_proj.weight") == [(heads * (published["qk_nope_head_dim"] + rope), published["q_lora_rank"])]
    assert count(shapes, "kv_a_proj_with_mqa.weight") == [(rank + rope, 2 * hidden)]
    assert count(shapes, "kv_b_proj.weight") == [(heads * (published["qk_nope_head_dim"] + published["v_head_dim"]), rank)]
    assert count(shapes, "o_proj.weight") == [(hidden, heads * published["v_head_dim"])]


def test_softmax_scale_of_the_kimi_draft_is_the_published_one(shelf: Path) -> None:
    """64-fold YaRN on heads of 128 + 64: (0.1 ln 64 + 1)^2 / sqrt(192), as TorchSpec's draft for it has."""
    _, config, facts = derived("kimi_k2_5-eagle3_mla", shelf)
    architecture = build(config["draft"], expects=DraftArchitecture)
    with torch.device("meta"):
        attention = architecture.attention(2 * facts.hidden_size, facts.hidden_size, 0)
    assert attention.facts.scale == pytest.approx(0.1446796, rel=1e-6)
    assert (attention.facts.query_key_width, attention.facts.value_width) == (192, 128)


def count(shapes: dict[str, tuple[int, ...]], end: str) -> list[tuple[int, ...]]:
    return [shape for name, shape in shapes.items() if name.endswith(end)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_can_be_captured(recipe: str) -> None:
    entry, expected = TARGETS[recipe.split("-")[0]], EXPECTED[recipe]
    family = "dflash" if plain(recipe).choices["strategy"] in BLOCK else "eagle3"
    assert family in entry["setters"], f"SGLang's {entry['architecture']} has no setter for {family}"
    num_layers = entry["config"].get("num_hidden_layers", entry["config"].get("num_layers"))
    ids = sglang_setter_ids(expected["aux"], num_layers, entry["architecture"], family)
    assert len(ids) == len(expected["aux"])
    assert [hf_hidden_states_index(i, num_layers) for i in expected["aux"]] == [i + 1 for i in expected["aux"]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_template_is_the_models_own_or_exists(recipe: str) -> None:
    template = plain(recipe).config["data"]["chat_template"]
    assert template is None or "{%" in template or Path(template).is_file()


@pytest.mark.parametrize("recipe", RECIPES)
def test_file_says_its_command_and_what_it_aims_at(recipe: str) -> None:
    text = (config_dir() / "experiment" / f"{recipe}.yaml").read_text()
    assert f"specforge experiment={recipe} " in text
    aim = text.split("# Aims at:")[1].split("defaults:")[0]
    assert "none published" in aim or any(letter.isdigit() for letter in aim)
    assert ("target_backend.servers=" in text) == ("servers: ???" in text), "the command gives what has no default"


@pytest.mark.parametrize("recipe", RECIPES)
def test_row_fits_the_longest_sample_and_steps_the_proposals(recipe: str) -> None:
    config = plain(recipe).config
    assert config["trainer"]["max_row_tokens"] >= config["data"]["max_length"]
    drafted, strategy = config["evaluator"]["num_draft_tokens"], config["strategy"]
    assert drafted <= strategy.get("ttt_length", strategy.get("num_depths", strategy.get("block_size")))


def rows() -> Iterator[tuple[str, list[str]]]:
    for line in (ROOT / "docs" / "recipes.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 8:
            yield cells[1].strip("`"), cells


def test_the_page_of_recipes_tells_the_truth() -> None:
    page = dict(rows())
    assert sorted(page) == RECIPES
    assert f"{len(RECIPES)} of them cover {len(TARGETS)} targets" in (ROOT / "docs" / "recipes.md").read_text()
    for recipe, (target, _, draft, strategy, layers, vocabulary, aims, source) in page.items():
        composed, expected = plain(recipe), EXPECTED[recipe]
        assert target == f"`{composed.choices['target']}`" and strategy == composed.choices["strategy"]
        assert draft.split(" ")[0] == composed.choices["draft"] and draft.endswith(f"× {expected['layers']}")
        assert layers == ", ".join(map(str, expected["aux"]))
        assert vocabulary == ("all" if composed.config["strategy"].get("draft_vocab_size") is None else str(expected["vocabulary"]))
        assert aims and (source != "–") == (aims != "none published")


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_overrides("train", ["experiment=qwen3_8b-eagel3"])
    [message] = caught.value.problems
    assert message.startswith("experiment=qwen3_8b-eagel3: no such option. Did you mean 'experiment=qwen3_8b-eagle3'?")
    assert "Available options in 'experiment':" in message


def test_no_recipe_is_the_default_and_may_be_written() -> None:
    assert compose_overrides("train", ["experiment=null"]).config == compose_overrides("train", []).config


def test_the_command_line_wins_over_a_recipe() -> None:
    composed = compose_overrides("train", ["experiment=qwen3_8b-eagle3", "strategy=eagle3_1", "optimizer.lr=3e-4"])
    assert composed.choices["strategy"] == "eagle3_1" and composed.config["optimizer"]["lr"] == 3e-4
    assert composed.config["strategy"]["fc_norm"] is True and composed.choices.get("sizes") is None


def test_partial_rotation_reaches_loaders_that_look_at_the_top_level() -> None:
    both = rope_both_forms({"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25})
    assert both["partial_rotary_factor"] == both["rope_parameters"]["partial_rotary_factor"] == 0.25
    assert resolve_rope(both)["partial_rotary_factor"] == 0.25
    assert "partial_rotary_factor" not in rope_both_forms({"rope_type": "default", "rope_theta": 1e7})


def test_facts_of_a_family_with_other_names_are_found_and_absent_ones_are_still_refused() -> None:
    config = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "rope_theta": 1e4, "ffn_hidden_size": 24}
    facts = TargetFacts.from_config({**config, "num_layers": 3})
    assert (facts.num_layers, facts.intermediate_size) == (3, 24)
    with pytest.raises(TargetError, match="lacks num_hidden_layers"):
        TargetFacts.from_config(config)
