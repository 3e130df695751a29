"""What the target fills in, and the rules that connect groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specforge.config.compose import compose_overrides
from specforge.config.derive import derive, run_name
from specforge.config.rules import RULES, Violation, enforce, violations
from specforge.errors import ConfigError, TargetError


def filled(overrides: list[str], prepare: bool = True) -> tuple[Any, dict[str, str | None]]:
    composed = compose_overrides("train", overrides)
    return derive(composed.config, lambda _: None, prepare=prepare), composed.choices


def broken(overrides: list[str], **choices: str) -> list[Violation]:
    derived, chosen = filled(overrides)
    return violations(derived.config, {**chosen, **choices}, derived.facts)


def test_null_dimensions_come_from_the_target(on_tiny_target: list[str], target_dir: Path) -> None:
    derived, _ = filled([*on_tiny_target, "draft.intermediate_size=99"])
    draft = derived.config["draft"]
    assert (draft["hidden_size"], draft["num_kv_heads"], draft["head_dim"]) == (16, 2, 4)
    assert draft["intermediate_size"] == 99, "what the user set stays"
    assert None not in draft.values()
    assert derived.config["target"]["resolved_path"] == str(target_dir)
    assert derived.config["target"]["path"] == str(target_dir)
    assert Path(derived.config["cache_dir"]).is_absolute()


def test_an_absent_target_is_said_and_not_prepared(tmp_path: Path) -> None:
    derived, _ = filled(["target=hf", "target.path=owner/name"], prepare=False)
    assert derived.facts is None and "resolved_path" not in derived.config["target"]
    assert "not on disk" in derived.notes[0] and "owner/name" in derived.notes[0]
    assert derived.config["draft"]["hidden_size"] is None
    assert not (tmp_path / "cache").exists()


def test_a_target_folder_without_a_tokenizer_is_refused(on_tiny_target: list[str], target_dir: Path) -> None:
    (target_dir / "tokenizer.json").unlink()
    with pytest.raises(TargetError, match="tokenizer"):
        filled(on_tiny_target)


def test_run_name() -> None:
    choices: dict[str, str | None] = {"target": "t", "draft": "d", "strategy": "s"}
    assert run_name({"name": None}, choices) == "t-d-s"
    assert run_name({"name": "mine"}, choices) == "mine"
    for bad in ("a/b", "..", "a b"):
        with pytest.raises(ConfigError, match="name:"):
            run_name({"name": bad}, choices)


def test_rule_ids_are_unique() -> None:
    assert len({r.id for r in RULES}) == len(RULES) >= 8


def test_the_default_breaks_no_rule(on_tiny_target: list[str]) -> None:
    assert broken(on_tiny_target) == []


@pytest.mark.parametrize(
    ("overrides", "rule", "words"),
    [
        (["strategy.draft_vocab_size=41"], "draft_vocabulary_fits", "larger than the target's vocabulary of 40"),
        (["strategy.aux_hidden_state_layer_ids=[0,5]"], "aux_layers_exist", "allowed are output-side ids 0 to 4"),
        (["strategy.aux_hidden_state_layer_ids=[-1,2]"], "aux_layers_exist", "[-1]"),
        (["strategy.aux_hidden_state_layer_ids=[2,2]"], "aux_layers_exist", "only once"),
        (["device=gpu"], "device_exists", "allowed are auto, cpu, cuda"),
        (["device=cuda:99"], "device_exists", "torch sees"),
        (["launcher.processes=99"], "ranks_can_be_placed", "trainer.global_batch_size"),
        (["+parallel.tp_degree=3", "launcher.processes=2"], "degrees_fill_the_world", "parallel.tp_degree=3"),
    ],
)
def test_broken_rules(on_tiny_target: list[str], overrides: list[str], rule: str, words: str) -> None:
    errors = [v for v in broken([*on_tiny_target, *overrides]) if v.severity == "error"]
    assert [v.rule for v in errors] == [rule]
    assert words in errors[0].message


def test_rules_about_choices(on_tiny_target: list[str]) -> None:
    assert [v.rule for v in broken(on_tiny_target, topology="offline")] == ["offline_needs_features"]
    assert [v.rule for v in broken(on_tiny_target, topology="disagg_http")] == ["local_store_is_one_process"]
    [served] = broken(on_tiny_target, draft="qwen3")
    assert served.rule == "served_by_sglang" and served.severity == "warning"


def test_rules_of_training_do_not_stop_other_commands(on_tiny_target: list[str]) -> None:
    """A run made with four ranks can be evaluated where there is one."""
    derived, choices = filled([*on_tiny_target, "launcher.processes=99"])
    assert violations(derived.config, choices, derived.facts, "evaluate") == []
    assert violations(derived.config, choices, derived.facts, "train") != []


def test_errors_are_raised_together_and_warnings_returned(on_tiny_target: list[str]) -> None:
    derived, choices = filled([*on_tiny_target, "strategy.draft_vocab_size=41", "device=gpu"])
    with pytest.raises(ConfigError) as caught:
        enforce(derived.config, choices, derived.facts)
    assert len(caught.value.problems) == 2
    derived, choices = filled([*on_tiny_target, "target.trust_remote_code=true", "launcher.processes=3"])
    warnings = enforce(derived.config, choices, derived.facts)
    assert any("trust_remote_code" in w for w in warnings) and any("multiple of 3" in w for w in warnings)


def test_a_component_adds_rules_of_its_own(on_tiny_target: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rules_plugin.py").write_text(
        "from specforge.training.strategies.eagle3 import Eagle3\n"
        "class Picky(Eagle3):\n    name = 'picky'\n"
        "    def rules(self, choices, config):\n        return [f'picky: needs seed=1, not {config[\"seed\"]}. Set seed=1.']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    derived, choices = filled([*on_tiny_target, "strategy._target_=rules_plugin.Picky", "plugins=[rules_plugin]"])
    [found] = violations(derived.config, choices, derived.facts)
    assert found.rule == "strategy:eagle3" and found.message.startswith("picky: needs seed=1, not 0")


def test_a_broken_target_config_is_named(on_tiny_target: list[str], target_dir: Path) -> None:
    (target_dir / "config.json").write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(TargetError, match="num_hidden_layers"):
        filled(on_tiny_target)
