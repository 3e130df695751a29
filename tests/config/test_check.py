"""The constructor as schema: every kind of mistake, all reported at once, in words a user can act on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from specforge.config.check import check, check_node, find_problems
from specforge.config.signature import describe, locate, mismatch
from specforge.errors import ConfigError

ADAMW = {
    "_target_": "specforge.training.optimizer.AdamW",
    "lr": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0,
    "implementation": "auto",
}


def with_changes(**changes: Any) -> dict[str, Any]:
    return {**ADAMW, **changes}


def test_a_good_node_has_no_problem_and_an_int_is_a_float() -> None:
    assert check_node(with_changes(), "optimizer") == []


def test_all_problems_at_once() -> None:
    node = with_changes(lr="abc", beta1=1.5, weight_decay="???", implementation="fusd", bta2=1)
    del node["beta2"]
    config = {"plugins": [], "optimizer": node, "scheduler": {"_target_": "os.system", "command": "x"}, "tracker": "???", "seed": "???"}
    with pytest.raises(ConfigError) as caught:
        check(config)
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 9 and caught.value.exit_code == 2
    assert "optimizer.lr: 'abc' — input should be a valid number. Allowed: number greater than 0.0." in text
    assert "optimizer.beta1: 1.5 — input should be less than 1" in text
    assert "optimizer.weight_decay: missing" in text
    assert "optimizer.implementation: 'fusd'" in text and "'auto', 'fused', 'foreach', 'plain'" in text
    assert "optimizer.bta2: 1 — no such key. Did you mean 'beta2'? Keys of AdamW: lr, beta1" in text
    assert "optimizer.beta2: not set — AdamW needs number" in text
    assert "scheduler._target_: 'os.system' is outside of what a configuration may build" in text
    assert "tracker: no option chosen" in text
    assert "seed: missing" in text


def test_a_leaked_key_of_another_option_is_found() -> None:
    [message] = check_node(with_changes(decay_shape="linear"), "optimizer")
    assert "left over from another option" in message


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("os.system", "plugins=[os]"),
        ("numpy.load", "outside"),
        ("builtins.eval", "outside"),
        ("specforge.nope.Thing", "No module named 'specforge.nope'"),
        ("specforge.training.optimizer.AdamV", "Did you mean 'AdamW'?"),
        ("specforge.training.optimizer.is_decayed", "is a function"),
        ("specforge.training.optimizer.Mapping", "may not build"),
        ("specforge.training.optimizer.torch.load", "cannot be imported"),
        ("AdamW", "not a dotted path"),
    ],
)
def test_targets_that_cannot_be_used_say_why(target: str, words: str) -> None:
    [message] = check_node({"_target_": target}, "optimizer")
    assert words in message and message.startswith("optimizer._target_: ")


def test_a_missing_package_names_the_extra(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_sglang.py").write_text("import sglang_is_absent\n")
    (tmp_path / "needs_mooncake.py").write_text("raise ModuleNotFoundError(\"No module named 'mooncake'\", name='mooncake')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    [message] = check_node({"_target_": "needs_mooncake.Store"}, "feature_store", ["needs_mooncake"])
    assert "No module named 'mooncake'" in message and "pip install 'specforge[mooncake]'" in message
    [message] = check_node({"_target_": "needs_sglang.Engine"}, "target_backend", ["needs_sglang"])
    assert "No module named 'sglang_is_absent'" in message


def test_foreign_targets_may_have_defaults_and_take_runtime_arguments() -> None:
    assert check_node({"_target_": "torch.optim.AdamW", "lr": 0.1}, "optimizer") == []
    [message] = check_node({"_target_": "torch.optim.AdamW", "betass": 1}, "optimizer")
    assert "Did you mean 'betas'?" in message
    [message] = check_node({"_target_": "torch.optim.AdamW", "params": []}, "optimizer")
    assert "given at run time" in message


def test_a_runtime_argument_cannot_be_configured() -> None:
    node = {"_target_": "specforge.inference.target_engine.custom.CustomTargetEngine", "engine": None, "device": "cpu"}
    [message] = check_node(node, "target_backend")
    assert message.startswith("target_backend.device: 'cpu' — is given at run time")


def test_nested_nodes_are_checked_with_their_path() -> None:
    node = {
        "_target_": "specforge.inference.target_engine.custom.CustomTargetEngine",
        "engine": {"_target_": "specforge.inference.target_engine.hf.HFTargetEngine", "_partial_": True, "batch_token": 3},
    }
    [message] = check_node(node, "target_backend")
    assert message.startswith("target_backend.engine.batch_token: 3 — no such key. Did you mean 'batch_tokens'?")
    node["engine"] = {"_target_": "???"}
    [message] = check_node(node, "target_backend")
    assert message.startswith("target_backend.engine._target_: missing")


def test_groups_that_are_no_node() -> None:
    assert "is not a node" in find_problems({"optimizer": 3})[0]
    assert "no option chosen" in find_problems({"optimizer": None})[0]
    assert find_problems({"tracker": {"a": "???", "b": {"c": "???"}}}) == [
        "tracker.a: missing — this value has no default. Set it with tracker.a=<value>.",
        "tracker.b.c: missing — this value has no default. Set it with tracker.b.c=<value>.",
    ]
    assert find_problems({"plugins": [1]})[0].startswith("plugins: [1]")


@pytest.mark.parametrize(
    ("value", "annotation", "fits"),
    [
        (3, float, True),
        (3.5, int, False),
        ("5", int, False),
        (True, int, False),
        (1, bool, False),
        (None, int | None, True),
        ("x", Literal["x", "y"], True),
        ("z", Literal["x", "y"], False),
        ([1, 2], tuple[int, ...], True),
        ([1, "2"], list[int], False),
        (0, Annotated[int, Field(ge=1)], False),
        ({"a": 1}, dict[str, Any], True),
        ({"a": 1}, Mapping[str, int], True),
        (5, str, False),
    ],
)
def test_values_against_annotations(value: Any, annotation: Any, fits: bool) -> None:
    assert (mismatch(value, annotation) is None) is fits


def test_annotations_read_as_words() -> None:
    assert describe(int | None) == "int or null"
    assert describe(Annotated[int, Field(ge=1, le=8)]) == "int at least 1 at most 8"
    assert describe(Literal["a", "b"]) == "one of 'a', 'b'"
    assert describe(list[int]) == "list[int]"


def test_locate_refuses_a_plugin_that_leads_elsewhere() -> None:
    from specforge.config.signature import TargetProblem

    with pytest.raises(TargetProblem):
        locate("subprocess.Popen", ["my_package"])
    with pytest.raises(TargetProblem):
        locate("my_packageevil.Thing", ["my_package"])
