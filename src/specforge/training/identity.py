"""What a checkpoint's weights are good for: the facts that must agree before they are loaded into a draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specforge.runtime.contracts import TargetIdentity

# Where ``strategy_config`` keeps what the weights hang on (``DraftTrainStrategy.weight_facts``).
WEIGHT_FACTS = "weight_facts"


@dataclass(frozen=True)
class DraftIdentity:
    """What a checkpoint's weights are good for. ``draft`` and ``strategy_config`` are plain values; ``_target_`` is taken out."""

    architecture: str
    strategy: str
    draft: dict[str, Any]
    strategy_config: dict[str, Any]
    target: TargetIdentity
    vocabulary_digest: str

    @classmethod
    def make(
        cls,
        architecture: str,
        strategy: str,
        draft: Mapping[str, Any],
        strategy_config: Mapping[str, Any],
        target: TargetIdentity,
        vocabulary_digest: str,
    ) -> DraftIdentity:
        return cls(architecture, strategy, without_targets(dict(draft)), without_targets(dict(strategy_config)), target, vocabulary_digest)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DraftIdentity:
        return cls(**{**data, "target": TargetIdentity(**data["target"])})

    def differences(self, other: DraftIdentity) -> list[str]:
        """What makes the weights of ``other`` unusable here, each with both values. Strategy numbers (loss weights) may change."""
        found = [
            f"{name}: {getattr(other, name)} in the checkpoint, {getattr(self, name)} in this run"
            for name in ("architecture", "strategy", "vocabulary_digest")
            if getattr(self, name) != getattr(other, name)
        ]
        keys = sorted(self.draft.keys() | other.draft.keys())
        found += [
            f"draft.{key}: {other.draft.get(key)} in the checkpoint, {self.draft.get(key)} in this run"
            for key in keys
            if self.draft.get(key) != other.draft.get(key)
        ]
        mine, theirs = (side.strategy_config.get(WEIGHT_FACTS) or {} for side in (self, other))
        found += [
            f"strategy.{key}: {theirs[key]} in the checkpoint, {mine[key]} in this run"
            for key in mine
            if key in theirs and mine[key] != theirs[key]
        ]
        found += [f"target ({other.target.path} and {self.target.path}) {line}" for line in other.target.differences(self.target)]
        return found


def without_targets(node: Any) -> Any:
    """A plain copy of a configuration node without ``_target_`` and its like, at any depth: checkpoints never name code."""
    if isinstance(node, Mapping):
        return {str(k): without_targets(v) for k, v in node.items() if not (str(k).startswith("_") and str(k).endswith("_"))}
    if isinstance(node, list | tuple):
        return [without_targets(v) for v in node]
    return node
