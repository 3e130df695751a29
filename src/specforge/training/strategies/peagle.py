"""Strategy ``peagle``: all depths of a draft in one forward, with sampled depths in training (P-EAGLE, arXiv 2602.01469)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from specforge.errors import ConfigError
from specforge.modeling.mask_token import mask_token_id as find_mask_token
from specforge.modeling.target_facts import TargetFacts
from specforge.modeling.wiring.eagle3 import Eagle3Flags
from specforge.modeling.wiring.peagle import PEagleDraft
from specforge.ops.attention import fastest_attention, plain_attention
from specforge.ops.soft_cross_entropy import soft_cross_entropy
from specforge.runtime import contracts
from specforge.runtime.contracts import StepContext, StepOutput, TrainBatch
from specforge.training.strategies.base import DraftTrainStrategy, PrefixCorrectness
from specforge.training.strategies.peagle_rows import ParallelRows, align, legal_rows, sampled_rows
from specforge.training.strategies.teacher import kept_teacher

if TYPE_CHECKING:
    from specforge.data.vocabulary_map import VocabularyMap
    from specforge.evaluation.proposer import Proposer
    from specforge.export.weight_map import OuterExport
    from specforge.modeling.draft.base import DraftArchitecture
    from specforge.modeling.target import TargetHead


class PEagle(DraftTrainStrategy):
    """P-EAGLE with any architecture. SGLang has no loader for it; vLLM serves it (parallel drafting).

    Args:
        num_depths: depths D trained in one forward; at least as many as serving drafts.
        down_sample_ratio: depth d keeps this to the power d of a sample's rows, drawn among those kept at depth d − 1.
        down_sample_ratio_min: but never a smaller share than this.
        mask_token_id: id whose embedding the rows of depth ≥ 1 read; null = the tokenizer's mask token or an id that no token has.
        draft_vocab_size: kept words Vd of the draft's head; null keeps the whole target vocabulary.
        aux_hidden_state_layer_ids: output-side ids to capture; null = layers 1, N//2 − 1, N − 4.
        fc_norm, norm_before_fc, norm_before_residual: conventions §5; norm_output has no meaning, since no state is fed back.
    """

    name = "peagle"
    vllm_classes: ClassVar[dict[str, str]] = {"llama": "PEagleDraftModel"}
    free_keys: ClassVar[tuple[str, ...]] = ("num_depths", "down_sample_ratio", "down_sample_ratio_min", "draft_vocab_size")

    def __init__(
        self,
        *,
        num_depths: Annotated[int, Field(ge=1, le=32)],
        down_sample_ratio: Annotated[float, Field(gt=0, le=1)],
        down_sample_ratio_min: Annotated[float, Field(ge=0, le=1)],
        mask_token_id: Annotated[int, Field(ge=0)] | None,
        draft_vocab_size: Annotated[int, Field(ge=2)] | None,
        aux_hidden_state_layer_ids: list[int] | None,
        fc_norm: bool,
        norm_before_fc: bool,
        norm_before_residual: bool,
    ) -> None:
        self.num_depths, self.down_sample_ratio, self.down_sample_ratio_min = num_depths, down_sample_ratio, down_sample_ratio_min
        self.mask_token_id, self.draft_vocab_size, self._layer_ids = mask_token_id, draft_vocab_size, aux_hidden_state_layer_ids
        self.flags = Eagle3Flags(fc_norm, norm_before_fc, norm_output=False, norm_before_residual=norm_before_residual)

    # -- composition ------------------------------------------------------------------------------------------------------------

    @classmethod
    def fill_from_target(cls, node: Mapping[str, Any], target: TargetFacts, folder: Path) -> dict[str, Any]:
        filled = dict(node)
        if filled.get("mask_token_id") is None:
            filled["mask_token_id"] = find_mask_token(folder, target.vocab_size)
        return filled

    def rules(self, choices: dict[str, str], config: dict[str, Any]) -> list[str]:
        folder = config["target"].get("resolved_path")
        if not folder:
            return []
        problems, target, width = [], TargetFacts.from_folder(folder), config["draft"].get("hidden_size")
        if isinstance(width, int) and width != target.hidden_size:
            problems.append(
                f"draft.hidden_size: {width} — strategy {self.name} reads the target's own embedding of width {target.hidden_size}. "
                "Set draft.hidden_size=null."
            )
        if self.mask_token_id is not None and self.mask_token_id >= target.vocab_size:
            problems.append(
                f"strategy.mask_token_id: {self.mask_token_id} — the target's embedding has ids 0 to {target.vocab_size - 1}. "
                "Set strategy.mask_token_id=null to look for a free one."
            )
        return problems

    # -- target and model -------------------------------------------------------------------------------------------------------

    def aux_layer_ids(self, target: TargetFacts) -> tuple[int, ...]:
        if self._layer_ids is not None:
            return tuple(sorted(self._layer_ids))
        return tuple(sorted({min(1, target.num_layers - 2), max(target.num_layers // 2 - 1, 0), max(target.num_layers - 4, 0)}))

    def build_model(
        self, architecture: DraftArchitecture, target: TargetFacts, vocabulary: VocabularyMap, embedding: torch.Tensor
    ) -> nn.Module:
        if self.mask_token_id is None:
            raise ConfigError("strategy.mask_token_id: null — composition fills it from the target. Set strategy.mask_token_id=<id>.")
        return PEagleDraft(
            architecture,
            target_hidden_size=target.hidden_size,
            num_aux=len(self.aux_layer_ids(target)),
            mask_token_id=self.mask_token_id,
            embedding=embedding,
            d2t=vocabulary.d2t,
            t2d=vocabulary.t2d,
            flags=self.flags,
        )

    def warm_start(
        self, model: nn.Module, layer_weights: Mapping[str, torch.Tensor], final_norm: torch.Tensor | None, head_rows: torch.Tensor
    ) -> list[str]:
        return _draft_of(model).warm_start(layer_weights, final_norm, head_rows)

    # -- training and measuring -------------------------------------------------------------------------------------------------

    def forward_loss(self, model: nn.Module, batch: TrainBatch, head: TargetHead, context: StepContext) -> StepOutput:
        legal = legal_rows(batch, self.num_depths)
        kept = sampled_rows(legal, batch, self.down_sample_ratio, self.down_sample_ratio_min, context.seed, context.epoch)
        draft, rows = self._rows(model, batch, kept)
        teacher, label = kept_teacher(draft, batch, head, rows.teacher_places)
        # A teacher argmax outside the draft vocabulary: loss weight 0, a miss in every accuracy.
        weight = draft.t2d[label][rows.teacher_rows].float()

        def loss(normed: torch.Tensor, head_weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            loss_sum, losses, predicted = soft_cross_entropy(normed, head_weight, teacher, rows.teacher_rows, weight)
            return loss_sum, losses * weight, predicted + draft.d2t[predicted] == label[rows.teacher_rows]

        loss_sum, losses, correct = model(rows.inputs, loss)

        def by_depth(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(self.num_depths, dtype=torch.float64).index_add_(0, rows.depths, values.double())

        count = by_depth(torch.ones_like(losses))
        metrics = {"per_position_accuracy": (by_depth(correct), count), "step_loss": (by_depth(losses), count)}
        return StepOutput(loss_sum, count.sum(), metrics)

    @staticmethod
    def _rows(model: nn.Module, batch: TrainBatch, kept: torch.Tensor) -> tuple[PEagleDraft, ParallelRows]:
        """The draft with the attention that is fast on its device, and the kept rows aligned for it."""
        draft = _draft_of(model)
        draft.attend = fastest_attention(batch.tensors[contracts.INPUT_IDS].device, draft.layers[0].self_attn.facts.query_key_width)
        return draft, align(batch, kept, by_document=draft.attend is plain_attention)

    @torch.no_grad()
    def prefix_correctness(self, model: nn.Module, batch: TrainBatch, head: TargetHead, num_draft_tokens: int) -> PrefixCorrectness:
        """Rows are the anchors with weight at depth 0, each with all of its depths: nothing is sampled here."""
        draft, rows = self._rows(model, batch, legal := legal_rows(batch, num_draft_tokens))
        _, label = kept_teacher(draft, batch, head, rows.teacher_places)
        predicted = model(rows.inputs, lambda normed, _: draft.logits(normed).argmax(-1))
        anchors = legal[0].flatten().nonzero().squeeze(-1)
        supervised = legal.flatten(1)[:, anchors].transpose(0, 1)
        ordinal = torch.zeros(legal[0].numel(), dtype=torch.int64, device=anchors.device)
        ordinal[anchors] = torch.arange(anchors.numel(), device=anchors.device)
        correct = torch.zeros_like(supervised)
        correct[ordinal[rows.anchors], rows.depths] = predicted + draft.d2t[predicted] == label[rows.teacher_rows]
        tensors = batch.tensors
        return tensors["document_ids"].flatten()[anchors], tensors["position_ids"].flatten()[anchors], correct, supervised

    def proposer(self, model: nn.Module, head: TargetHead | None = None) -> Proposer:
        from specforge.evaluation.peagle_proposer import PEagleProposer

        return PEagleProposer(_draft_of(model))

    def outer_export(self, architecture: DraftArchitecture, target: TargetFacts, export_format: str) -> OuterExport:
        from specforge.export.peagle import peagle_outer_export

        return peagle_outer_export(self, architecture, target, export_format)


def _draft_of(model: nn.Module) -> PEagleDraft:
    """The wiring inside whatever a backend wrapped around it."""
    inner = getattr(model, "module", model)
    if not isinstance(inner, PEagleDraft):
        raise TypeError(f"strategy peagle trains a PEagleDraft, not a {type(inner).__name__}")
    return inner
