"""What the block strategies share: anchors, capture, the served block, legal prefixes; DFlash, D-PACE, Domino and DSpark add a loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from specforge.errors import ConfigError
from specforge.modeling.mask_token import mask_token_id as find_mask_token
from specforge.modeling.target_facts import TargetFacts
from specforge.modeling.wiring.block import BlockDraft
from specforge.ops.attention import fastest_attention, plain_attention
from specforge.runtime import contracts
from specforge.runtime.contracts import CaptureSpec, StepContext, StepOutput, TrainBatch
from specforge.training.strategies.base import DraftTrainStrategy, PrefixCorrectness
from specforge.training.strategies.block_rows import BlockRows, align_blocks, drawn_anchors, legal_anchors

if TYPE_CHECKING:
    from specforge.data.vocabulary_map import VocabularyMap
    from specforge.export.weight_map import OuterExport
    from specforge.modeling.draft.base import DraftArchitecture
    from specforge.modeling.target import TargetHead

# Anchors whose blocks run at a time when every legal one is looked at (evaluation).
_ANCHORS_AT_A_TIME = 512
_MASK_KEY, _LAYERS_KEY = "mask_token_id", "aux_hidden_state_layer_ids"


class BlockStrategy(DraftTrainStrategy):
    """A draft that fills a block of ``block_size`` slots from one anchor in one forward."""

    serving_classes: ClassVar[dict[str, str]] = {"qwen3": "DFlashDraftModel"}
    free_keys: ClassVar[tuple[str, ...]] = ("num_anchors", "loss_decay_gamma")
    needs_teacher: ClassVar[bool] = False  # the target's distribution, not only its choice
    first_slot: ClassVar[int] = 0  # slot that proposes the first token after the anchor
    unserved_slots: ClassVar[int] = 1  # slots of a block that propose nothing

    def __init__(self, block_size: int, num_anchors: int | None, mask_token_id: int | None, layer_ids: list[int] | None) -> None:
        self.block_size, self.num_anchors, self.mask_token_id, self._layer_ids = block_size, num_anchors, mask_token_id, layer_ids

    @property
    def num_proposals(self) -> int:
        """Tokens that a whole block proposes."""
        return self.block_size - self.unserved_slots

    def served_block(self, num_draft_tokens: int) -> int:
        """Slots that SGLang runs to propose ``num_draft_tokens``: its verify window sets the block, whatever block was trained."""
        return num_draft_tokens + self.unserved_slots

    # -- composition ------------------------------------------------------------------------------------------------------------

    @classmethod
    def fill_from_target(cls, node: Mapping[str, Any], target: TargetFacts, folder: Path) -> dict[str, Any]:
        filled = dict(node)
        if filled.get(_MASK_KEY) is None:
            filled[_MASK_KEY] = find_mask_token(folder, target.vocab_size)
        return filled

    @classmethod
    def fill_from_draft(cls, node: Mapping[str, Any], target: TargetFacts, draft: Mapping[str, Any]) -> dict[str, Any]:
        filled = dict(node)
        if filled.get(_LAYERS_KEY) is None:
            layers = draft.get("num_layers")
            filled[_LAYERS_KEY] = default_layer_ids(target.num_layers, layers if isinstance(layers, int) else 1)
        return filled

    def rules(self, choices: dict[str, str], config: dict[str, Any]) -> list[str]:
        problems = []
        wanted = (config.get("evaluator") or {}).get("num_draft_tokens")
        if isinstance(wanted, int) and wanted > self.num_proposals:
            problems.append(
                f"evaluator.num_draft_tokens: {wanted} — a block of strategy.block_size={self.block_size} slots proposes "
                f"{self.num_proposals} tokens. Set evaluator.num_draft_tokens={self.num_proposals} or "
                f"strategy.block_size={self.served_block(wanted)}."
            )
        folder = config["target"].get("resolved_path")
        if not folder:
            return problems
        target, width = TargetFacts.from_folder(folder), config["draft"].get("hidden_size")
        if isinstance(width, int) and width != target.hidden_size:
            problems.append(
                f"draft.hidden_size: {width} — strategy {self.name} reads the target's own embedding and head of width "
                f"{target.hidden_size}. Set draft.hidden_size=null."
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < target.vocab_size:
            problems.append(
                f"strategy.mask_token_id: {self.mask_token_id} — the target's embedding has ids 0 to {target.vocab_size - 1}. "
                "Set strategy.mask_token_id=null to look for a free one."
            )
        return problems

    # -- target and model -------------------------------------------------------------------------------------------------------

    def aux_layer_ids(self, target: TargetFacts) -> tuple[int, ...]:
        """Configured ids; null is filled at composition by the draft's depth and here means that of one layer."""
        return tuple(sorted(default_layer_ids(target.num_layers, 1) if self._layer_ids is None else self._layer_ids))

    def capture_spec(self, target: TargetFacts, dtype: str) -> CaptureSpec:
        """Labels are tokens; the target's choice is needed for accuracies, its final states only where it teaches."""
        return CaptureSpec(self.aux_layer_ids(target), final_hidden=self.needs_teacher, target_argmax=True, dtype=dtype)

    def draft_arguments(self, target: TargetFacts, vocabulary: VocabularyMap, embedding: torch.Tensor) -> dict[str, Any]:
        """Keyword arguments of the wiring besides the architecture."""
        if self.mask_token_id is None:
            raise ConfigError("strategy.mask_token_id: null — composition fills it from the target. Set strategy.mask_token_id=<id>.")
        return {
            "target_hidden_size": target.hidden_size,
            "num_aux": len(self.aux_layer_ids(target)),
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "embedding": embedding,
            "d2t": vocabulary.d2t,
            "t2d": vocabulary.t2d,
        }

    def build_model(
        self, architecture: DraftArchitecture, target: TargetFacts, vocabulary: VocabularyMap, embedding: torch.Tensor
    ) -> nn.Module:
        return BlockDraft(architecture, **self.draft_arguments(target, vocabulary, embedding))

    # No warm start: a block's rows begin as token embeddings, and a copy of the target's last layer, which expects its late residual
    # stream, learns slower than random weights (docs/algorithms/dflash.md).

    # -- training and measuring -------------------------------------------------------------------------------------------------

    def forward_loss(self, model: nn.Module, batch: TrainBatch, head: TargetHead, context: StepContext) -> StepOutput:
        draft = self._ready(model, batch)
        anchors = drawn_anchors(batch, self.num_anchors, context.seed, context.epoch)
        rows = align_blocks(batch, anchors, self.block_size, self.num_proposals, draft.attend is plain_attention)
        return model(rows.inputs, lambda hidden: self.loss(draft, self.slots(hidden), rows, batch, head, context))

    @abstractmethod
    def loss(
        self, draft: Any, slots: torch.Tensor, rows: BlockRows, batch: TrainBatch, head: TargetHead, context: StepContext
    ) -> StepOutput:
        """Loss and metrics from the states [N, J, H] of the slots that propose."""

    @abstractmethod
    def predict(self, draft: Any, slots: torch.Tensor, rows: BlockRows, head: TargetHead) -> torch.Tensor:
        """What serving would propose at each slot if everything before it had been right: states [N, J, H] -> ids [N, J]."""

    @torch.no_grad()
    def prefix_correctness(self, model: nn.Module, batch: TrainBatch, head: TargetHead, num_draft_tokens: int) -> PrefixCorrectness:
        """Rows are the legal anchors, each with the block that serving would run for ``num_draft_tokens``."""
        draft = self._ready(model, batch)
        found: list[tuple[torch.Tensor, ...]] = []
        for anchors in legal_anchors(batch).flatten().nonzero().squeeze(-1).split(_ANCHORS_AT_A_TIME):
            by_document = draft.attend is plain_attention
            rows = align_blocks(batch, anchors, self.served_block(num_draft_tokens), num_draft_tokens, by_document)
            predicted = model(rows.inputs, lambda hidden, rows=rows: self.predict(draft, self.slots(hidden), rows, head))
            found.append((anchors, (predicted == rows.choices(batch)) & rows.valid, rows.valid))
        anchors, correct, valid = (torch.cat(parts) for parts in zip(*found, strict=True))
        return batch.tensors["document_ids"].flatten()[anchors], batch.tensors["position_ids"].flatten()[anchors], correct, valid

    def slots(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, bs, H] -> the states of the slots that propose [N, J, H]."""
        end = hidden.shape[1] - self.unserved_slots + self.first_slot
        return hidden[:, self.first_slot : end]

    def _ready(self, model: nn.Module, batch: TrainBatch) -> BlockDraft:
        """The draft with the attention that is fast on its device."""
        draft = draft_of(model)
        width = min(layer.self_attn.facts.query_key_width for layer in draft.layers)
        draft.attend = fastest_attention(batch.tensors[contracts.INPUT_IDS].device, width)
        return draft

    # -- serving ----------------------------------------------------------------------------------------------------------------

    def outer_export(self, architecture: DraftArchitecture, target: TargetFacts, export_format: str) -> OuterExport:
        from specforge.export.block import block_outer_export

        return block_outer_export(self, architecture, target, export_format)

    def head_export(self) -> tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]:
        """Of the heads besides the backbone: parameter names, keys inside ``dflash_config``, keys at the top of the config."""
        return (), {}, {}

    def serving_arguments(self, num_draft_tokens: int) -> dict[str, Any]:
        # SGLang counts the anchor among the draft tokens, and that number is the block it runs.
        return {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": num_draft_tokens + 1}


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """SGLang's own default: N // 2 for one draft layer, else one id a draft layer, evenly spaced from 1 to N − 3."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    last = num_target_layers - 3
    if last < num_draft_layers:
        raise ConfigError(
            f"strategy.{_LAYERS_KEY}: null — {num_draft_layers} draft layers have no evenly spaced layers 1 to {last} in a target of "
            f"{num_target_layers}. Set strategy.{_LAYERS_KEY}=[...] or fewer draft.num_layers."
        )
    return [round(1 + i * (last - 1) / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def picked(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """values [N, J, ...] at the true places of ``valid`` [N, J] -> [R, ...], with a gradient that needs no sorting."""
    return values.flatten(0, 1).index_select(0, valid.flatten().nonzero().squeeze(-1))


def spread(rows: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`picked` for [R]: zeros elsewhere, [N, J]."""
    return rows.new_zeros(valid.shape).masked_scatter(valid, rows)


def slot_metrics(predicted: torch.Tensor, losses: torch.Tensor, rows: BlockRows, batch: TrainBatch) -> dict[str, tuple[torch.Tensor, ...]]:
    """per_position_accuracy against the target's choice and step_loss, one entry a proposed slot; predicted, losses [R] of the valid slots."""
    count = rows.valid.sum(0).double()
    correct = spread((predicted == rows.choices(batch)[rows.valid]).double(), rows.valid).sum(0)
    return {"per_position_accuracy": (correct, count), "step_loss": (spread(losses.detach().double(), rows.valid).sum(0), count)}


def draft_of(model: nn.Module) -> BlockDraft:
    """The wiring inside whatever a backend wrapped around it."""
    inner = getattr(model, "module", model)
    if not isinstance(inner, BlockDraft):
        raise TypeError(f"a block strategy trains a BlockDraft, not a {type(inner).__name__}")
    return inner
