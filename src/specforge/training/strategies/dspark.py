"""Strategy ``dspark``: a block backbone with a Markov head, taught by tokens and by the target's distribution (arXiv 2607.05147)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from specforge.modeling.target_facts import TargetFacts
from specforge.modeling.wiring.dspark import DSparkDraft, MarkovType
from specforge.ops.corrected_cross_entropy import dspark_cross_entropy
from specforge.ops.hard_cross_entropy import rows_per_tile
from specforge.runtime import contracts
from specforge.runtime.contracts import StepContext, StepOutput, TrainBatch
from specforge.training.strategies.block import BlockStrategy, draft_of, picked, slot_metrics, spread
from specforge.training.strategies.block_rows import BlockRows, slot_weights

if TYPE_CHECKING:
    from specforge.data.vocabulary_map import VocabularyMap
    from specforge.evaluation.proposer import Proposer
    from specforge.modeling.draft.base import DraftArchitecture
    from specforge.modeling.target import TargetHead


class DSpark(BlockStrategy):
    """Slot k predicts tok[a+1+k], slot 0 too, so that a block of bs slots proposes bs tokens.

    Args:
        block_size: slots of a block, all of them served.
        num_anchors: blocks drawn from each conversation and epoch; null = every legal anchor.
        loss_decay_gamma: slot k weighs exp(−k/γ); null = all alike.
        markov_head_type, markov_rank: kind and rank of the bias that the token before a slot gives.
        confidence_head, confidence_head_with_markov: train the head that predicts acceptance; let it read the token before.
        ce_weight, l1_weight, confidence_weight: the three terms of the loss.
        mask_token_id, aux_hidden_state_layer_ids: as DFlash.
    """

    name = "dspark"
    serving_classes: ClassVar[dict[str, str]] = {"qwen3": "Qwen3DSparkModel"}
    free_keys: ClassVar[tuple[str, ...]] = ("num_anchors", "loss_decay_gamma", "ce_weight", "l1_weight", "confidence_weight")
    needs_teacher = True
    unserved_slots = 0

    def __init__(
        self,
        *,
        block_size: Annotated[int, Field(ge=1, le=64)],
        num_anchors: Annotated[int, Field(ge=1)] | None,
        loss_decay_gamma: Annotated[float, Field(gt=0)] | None,
        markov_head_type: MarkovType,
        markov_rank: Annotated[int, Field(ge=1)],
        confidence_head: bool,
        confidence_head_with_markov: bool,
        ce_weight: Annotated[float, Field(ge=0)],
        l1_weight: Annotated[float, Field(ge=0)],
        confidence_weight: Annotated[float, Field(ge=0)],
        mask_token_id: Annotated[int, Field(ge=0)] | None,
        aux_hidden_state_layer_ids: list[int] | None,
    ) -> None:
        super().__init__(block_size, num_anchors, mask_token_id, aux_hidden_state_layer_ids)
        self.loss_decay_gamma = loss_decay_gamma
        self.markov_head_type, self.markov_rank = markov_head_type, markov_rank
        self.confidence_head, self.confidence_head_with_markov = confidence_head, confidence_head_with_markov
        self.ce_weight, self.l1_weight, self.confidence_weight = ce_weight, l1_weight, confidence_weight

    def build_model(
        self, architecture: DraftArchitecture, target: TargetFacts, vocabulary: VocabularyMap, embedding: torch.Tensor
    ) -> nn.Module:
        return DSparkDraft(
            architecture,
            markov_head_type=self.markov_head_type,
            markov_rank=self.markov_rank,
            confidence_head=self.confidence_head,
            confidence_head_with_markov=self.confidence_head_with_markov,
            **self.draft_arguments(target, vocabulary, embedding),
        )

    def loss(
        self, draft: Any, slots: torch.Tensor, rows: BlockRows, batch: TrainBatch, head: TargetHead, context: StepContext
    ) -> StepOutput:
        valid = rows.valid
        weights = slot_weights(valid, self.loss_decay_gamma)
        weight, states = weights[valid], picked(slots, valid)
        previous = draft.markov_head.markov_w1(rows.previous_tokens())
        final = batch.tensors[contracts.FINAL_HIDDEN_STATES].flatten(0, 1)
        places = rows.before[valid]
        loss_sum, losses, predicted = dspark_cross_entropy(
            states,
            head.weight,
            picked(draft.markov_head.latent(previous, slots), valid),
            draft.markov_head.markov_w2.weight,
            lambda tile: head.logits(final[places[tile]]),
            rows.labels[valid],
            weight,
            self.ce_weight,
            self.l1_weight,
        )
        metrics = slot_metrics(predicted, losses[0], rows, batch)
        accepted = 1.0 - 0.5 * losses[1]  # 1 − total variation: the chance that rejection sampling keeps a drawn draft
        metrics["acceptance_rate"] = (spread(accepted.double(), valid).sum(0), metrics["step_loss"][1])
        if draft.confidence_head is not None:
            logits = draft.confidence_head(states, picked(previous, valid))
            confidence = binary_cross_entropy_with_logits(logits, accepted.clamp(0, 1), reduction="none")
            loss_sum = loss_sum + self.confidence_weight * (confidence * weight).sum()
            metrics["confidence_loss"] = (spread(confidence.detach().double(), valid).sum(0), metrics["step_loss"][1])
        return StepOutput(loss_sum, weights.sum().double(), metrics)

    def predict(self, draft: Any, slots: torch.Tensor, rows: BlockRows, head: TargetHead) -> torch.Tensor:
        latent = draft.markov_head.latent(draft.markov_head.markov_w1(rows.previous_tokens()), slots).flatten(0, 1)
        tile, w2 = rows_per_tile(head.weight), draft.markov_head.markov_w2.weight
        parts = [
            (linear(s.to(head.weight.dtype), head.weight).float() + linear(z, w2).float()).argmax(-1)
            for s, z in zip(slots.flatten(0, 1).split(tile), latent.split(tile), strict=True)
        ]
        return torch.cat(parts).unflatten(0, slots.shape[:2])

    def proposer(self, model: nn.Module, head: TargetHead) -> Proposer:
        from specforge.evaluation.dspark_proposer import DSparkProposer

        return DSparkProposer(draft_of(model), head, self)

    def head_export(self) -> tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]:
        extra = {"vanilla": (), "gated": ("gate_proj.weight", "gate_proj.bias"), "rnn": ("joint_proj.weight", "joint_proj.bias")}
        names = [f"markov_head.{n}" for n in ("markov_w1.weight", "markov_w2.weight", *extra[self.markov_head_type])]
        if self.confidence_head:
            names += ["confidence_head.proj.weight", "confidence_head.proj.bias"]
        top = {
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type,
            "sample_from_anchor": True,
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": self.confidence_head and self.confidence_head_with_markov,
        }
        return tuple(names), {}, top

    def serving_arguments(self, num_draft_tokens: int) -> dict[str, Any]:
        # The verify window is the block plus the anchor; both are given, since SGLang refuses a window that does not fit the block.
        return {
            "speculative_algorithm": "DSPARK",
            "speculative_dspark_block_size": num_draft_tokens,
            "speculative_num_draft_tokens": num_draft_tokens + 1,
        }
