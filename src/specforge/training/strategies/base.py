"""The contract of a strategy: what it takes from the target, which module it trains, its loss and its proposals.

A strategy owns an algorithm; the architecture (``modeling/draft``) owns what a layer is made of; neither knows where features
come from. Adding one is this interface in one module, one YAML in ``conf/strategy`` and one test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from specforge.runtime.contracts import CaptureSpec, StepContext, StepOutput, TrainBatch

if TYPE_CHECKING:
    from specforge.data.vocabulary_map import VocabularyMap
    from specforge.evaluation.proposer import Proposer
    from specforge.export.weight_map import OuterExport
    from specforge.modeling.draft.base import DraftArchitecture
    from specforge.modeling.target import TargetHead
    from specforge.modeling.target_facts import TargetFacts

# Of every legal row or anchor, in document order: document id [R], place in its document [R], which of steps 0 … n−1 are right,
# bool [R, n] (never where not supervised), and which are supervised, bool [R, n].
PrefixCorrectness = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class DraftTrainStrategy(ABC):
    """One training algorithm. Instances are made by ``config.build`` from ``conf/strategy/<name>.yaml`` and hold no weights."""

    name: ClassVar[str]
    # Architecture name -> the class that SGLang loads this pair as (conventions §5); pairs that are not here are not served.
    serving_classes: ClassVar[dict[str, str]] = {}
    # The same for vLLM: what export format=vllm writes.
    vllm_classes: ClassVar[dict[str, str]] = {}
    # Keys of its configuration that may change while the weights stay usable, such as the numbers of the loss.
    free_keys: ClassVar[tuple[str, ...]] = ()
    # Whether its proposer has ``propose_tree``: topk > 1 in decoding.
    drafts_trees: ClassVar[bool] = False

    @classmethod
    def fill_from_target(cls, node: Mapping[str, Any], target: TargetFacts, folder: Path) -> dict[str, Any]:
        """This strategy's config node with the nulls replaced that the target in ``folder`` decides, such as a mask token."""
        return dict(node)

    @classmethod
    def fill_from_draft(cls, node: Mapping[str, Any], target: TargetFacts, draft: Mapping[str, Any]) -> dict[str, Any]:
        """The same for what target and draft decide together, such as one captured layer a draft layer; ``draft`` is its filled node."""
        return dict(node)

    @abstractmethod
    def aux_layer_ids(self, target: TargetFacts) -> tuple[int, ...]:
        """Output-side layer ids to capture, ascending; configured ones or this algorithm's default for the target."""

    def capture_spec(self, target: TargetFacts, dtype: str) -> CaptureSpec:
        """What must be captured for :meth:`forward_loss`."""
        return CaptureSpec(self.aux_layer_ids(target), final_hidden=True, target_argmax=True, dtype=dtype)

    def weight_facts(self, node: Mapping[str, Any], target: TargetFacts) -> dict[str, Any]:
        """What the weights hang on: a checkpoint in which any of it differs is refused. ``node`` is this strategy's configuration."""
        kept = {key: value for key, value in node.items() if key not in self.free_keys and not key.startswith("_")}
        return {**kept, "aux_hidden_state_layer_ids": list(self.aux_layer_ids(target))}

    @abstractmethod
    def build_model(
        self, architecture: DraftArchitecture, target: TargetFacts, vocabulary: VocabularyMap, embedding: torch.Tensor
    ) -> nn.Module:
        """The wiring: an ``nn.Module`` on the current default device whose ``forward`` is all that the trainer runs.

        ``embedding`` [V, H] is the target's, frozen, and a non-persistent part of it: ``state_dict()`` is exactly what is trained plus
        the vocabulary map.
        """

    @abstractmethod
    def forward_loss(self, model: nn.Module, batch: TrainBatch, head: TargetHead, context: StepContext) -> StepOutput:
        """Loss and metrics of one micro-batch; runs ``model`` exactly once, also when no row is supervised."""

    @abstractmethod
    def proposer(self, model: nn.Module, head: TargetHead) -> Proposer:
        """How this draft proposes tokens in serving, for ``evaluation.decode``; ``head`` is the target's, for drafts without an own one."""

    @abstractmethod
    def outer_export(self, architecture: DraftArchitecture, target: TargetFacts, export_format: str) -> OuterExport:
        """The algorithm's half of the export map (names of fc, head, map; config keys); the architecture gives the other half."""

    def serving_arguments(self, num_draft_tokens: int) -> dict[str, Any]:
        """SGLang's flags, by name, with which this draft proposes ``num_draft_tokens`` a verify step, the draft's folder left out.

        Empty for a strategy that SGLang does not serve.
        """
        return {}

    @classmethod
    def serving_problems(cls, architecture: str, draft: Mapping[str, Any], strategy: Mapping[str, Any]) -> list[str]:
        """What SGLang does not read of a pair that it serves, for these filled config nodes; ``export format=sglang`` refuses it.

        Sentences without a full stop that name the keys. Composition warns of them, so that nobody trains first and learns it then.
        """
        return []

    @abstractmethod
    def prefix_correctness(self, model: nn.Module, batch: TrainBatch, head: TargetHead, num_draft_tokens: int) -> PrefixCorrectness:
        """What walk_accept_length, joint_acc_len and per_position_accuracy of an evaluation are made of (conventions §7)."""

    def warm_start(
        self, model: nn.Module, layer_weights: Mapping[str, torch.Tensor], final_norm: torch.Tensor | None, head_rows: torch.Tensor
    ) -> list[str]:
        """Start ``model`` from the target's last layer, final norm [H] and kept head rows [Vd, H]; the names of what was set."""
        return []

    def rules(self, choices: dict[str, str], config: dict[str, Any]) -> list[str]:
        """Problems of this strategy with the other choices, each a full sentence naming the override to change."""
        return []
