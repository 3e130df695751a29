"""The plain values at the root of every command's configuration, registered so that a typo in any YAML is named.

Only names and types are here; the values are in ``conf/base.yaml`` and in the command's own file. Group nodes are untyped on
purpose: the constructor of the class behind ``_target_`` is their schema (``config.check``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING


@dataclass
class Root:
    """What every command has: one node a group, then plain values."""

    target: Any = MISSING
    target_backend: Any = MISSING
    feature_store: Any = MISSING
    draft: Any = MISSING
    strategy: Any = MISSING
    topology: Any = MISSING
    data: Any = MISSING
    optimizer: Any = MISSING
    scheduler: Any = MISSING
    trainer: Any = MISSING
    parallel: Any = MISSING
    evaluator: Any = MISSING
    tracker: Any = MISSING
    launcher: Any = MISSING
    name: str | None = MISSING
    seed: int = MISSING
    device: str = MISSING
    num_threads: int | None = MISSING
    output_dir: str = MISSING
    cache_dir: str = MISSING
    plugins: list[str] = MISSING


@dataclass
class Train(Root):
    run: str | None = MISSING


@dataclass
class Prepare(Root):
    pass


@dataclass
class Regenerate(Root):
    input: str | None = MISSING
    output: str | None = MISSING
    batch_size: int = MISSING
    max_new_tokens: int = MISSING
    temperature: float = MISSING
    top_p: float = MISSING
    limit: int | None = MISSING


@dataclass
class Capture(Root):
    output: str | None = MISSING
    limit: int | None = MISSING


@dataclass
class Evaluate(Root):
    run: str | None = MISSING
    checkpoint: str = MISSING
    draft_folder: str | None = MISSING


@dataclass
class Export(Root):
    run: str | None = MISSING
    checkpoint: str = MISSING
    format: str = MISSING
    output: str | None = MISSING
    dtype: str = MISSING
    verify: str = MISSING
    verify_prompts: int | None = MISSING
    verify_max_new_tokens: int | None = MISSING
    server: Any = MISSING


@dataclass
class ShowSample(Root):
    index: int = MISSING
    count: int = MISSING


GROUPS: tuple[str, ...] = (
    "target",
    "target_backend",
    "feature_store",
    "draft",
    "strategy",
    "topology",
    "data",
    "optimizer",
    "scheduler",
    "trainer",
    "parallel",
    "evaluator",
    "tracker",
    "launcher",
)

# Name of the primary config (also of the file in conf/) -> its root.
SCHEMAS: dict[str, type[Root]] = {
    "train": Train,
    "prepare": Prepare,
    "regenerate": Regenerate,
    "capture": Capture,
    "evaluate": Evaluate,
    "export": Export,
    "show_sample": ShowSample,
}


def register() -> None:
    """Put the schemas into Hydra's ConfigStore; harmless when repeated."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        # Without a group, so that --help does not list the schemas as choices.
        store.store(name=f"{name}_schema", node=schema)
