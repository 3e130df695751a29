"""Building: the allow-list, the type of the result, runtime objects untouched, and a plug-in from outside of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specforge.config.build import build, component_class
from specforge.config.check import check_node
from specforge.config.compose import compose
from specforge.errors import ConfigError
from specforge.training.optimizer import OptimizerFactory
from specforge.training.scheduler import Cosine, Schedule

COSINE = {"_target_": "specforge.training.scheduler.Cosine", "warmup_steps": 3, "warmup_ratio": 0.0, "min_ratio": 0.1}

PLUGIN = """
from __future__ import annotations
import dataclasses
from typing import ClassVar
from specforge.training.scheduler import Schedule

@dataclasses.dataclass(frozen=True)
class Fact:
    ids: tuple

class Steps(Schedule):
    runtime_arguments: ClassVar[tuple[str, ...]] = ("fact",)
    def __init__(self, *, every: int, tags: list[str], inner: Schedule | None, fact: Fact | None = None) -> None:
        self.every, self.tags, self.inner, self.fact = every, tags, inner, fact
    def shape(self, progress: float) -> float:
        return 1.0
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"plugin_{request.node.name.split('[')[0]}"
    (tmp_path / f"{name}.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "my_conf" / "scheduler"
    folder.mkdir(parents=True)
    (folder / "steps.yaml").write_text(f"_target_: {name}.Steps\nevery: 5\ntags: [a, b]\ninner: null\n")
    return name


def test_builds_a_plain_node() -> None:
    made = build(COSINE, expects=Schedule)
    assert isinstance(made, Cosine) and made.warmup_steps == 3


@pytest.mark.parametrize("target", ["os.system", "numpy.load", "builtins.eval", "subprocess.Popen", "specforge.config.build.build"])
def test_refuses_what_is_not_allowed(target: str) -> None:
    with pytest.raises(ConfigError, match="_target_"):
        build({"_target_": target}, expects=object)


def test_refuses_a_nested_target_before_anything_is_called(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    node = {**COSINE, "min_ratio": {"_target_": "pathlib.Path.mkdir", "self": str(trap)}}
    with pytest.raises(ConfigError, match="min_ratio._target_"):
        build(node, expects=Schedule)
    with pytest.raises(ConfigError, match="warmup_steps.0._target_"):
        build({**COSINE, "warmup_steps": [{"_target_": "os.system"}]}, expects=Schedule)
    assert not trap.exists()


def test_the_result_must_be_of_the_expected_class() -> None:
    with pytest.raises(ConfigError, match="makes a Cosine, but OptimizerFactory is needed"):
        build(COSINE, expects=OptimizerFactory)


def test_errors_of_the_constructor_become_config_errors() -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        build({"_target_": COSINE["_target_"], "warmup_steps": 1}, expects=Schedule)
    with pytest.raises(ConfigError, match="needs the key _target_"):
        build({"lr": 1}, expects=Schedule)


def test_a_plug_in_with_config_dir_checks_and_builds(plugin: str, tmp_path: Path) -> None:
    composed = compose("train", ["--config-dir", str(tmp_path / "my_conf"), "scheduler=steps", f"plugins=[{plugin}]"])
    assert composed is not None
    node = composed.config["scheduler"]
    assert check_node(node, "scheduler", [plugin]) == []
    assert "plugins=" in check_node(node, "scheduler", [])[0]
    with pytest.raises(ConfigError, match="plugins="):
        build(node, expects=Schedule)
    made: Any = build({**node, "inner": COSINE}, expects=Schedule, plugins=[plugin])
    assert type(made.tags) is list and isinstance(made.inner, Cosine)


def test_runtime_objects_arrive_as_they_are(plugin: str) -> None:
    node = {"_target_": f"{plugin}.Steps", "every": 1, "tags": [], "inner": None}
    fact = component_class({"_target_": f"{plugin}.Fact"}, [plugin])(ids=(1, 2))
    made: Any = build(node, expects=Schedule, plugins=[plugin], fact=fact)
    assert made.fact is fact  # Hydra's instantiate would have turned the dataclass into a dict
    with pytest.raises(TypeError, match="takes no runtime argument group"):
        build(node, expects=Schedule, plugins=[plugin], group=1)


def test_a_partial_node_stays_a_partial(plugin: str) -> None:
    partial: Any = build({"_target_": f"{plugin}.Steps", "_partial_": True, "every": 1, "tags": []}, expects=object, plugins=[plugin])
    assert partial(inner=None).every == 1


def test_the_resolved_path_of_a_target_is_no_argument(target_dir: Path) -> None:
    from specforge.inference.target_source import TargetSource

    node = {"_target_": "specforge.inference.target_source.HubOrFolderTarget", "path": str(target_dir), "revision": None,
            "trust_remote_code": False, "resolved_path": "/elsewhere"}  # fmt: skip
    assert check_node(node, "target") == []
    assert build(node, expects=TargetSource).ensure(target_dir, print) == target_dir  # type: ignore[type-abstract]
