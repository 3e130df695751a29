"""Strategy ``domino``: a DFlash backbone with a causal correction of its logits (Domino, arXiv 2605.29707), shifted labels only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import linear

from specforge.modeling.target_facts import TargetFacts
from specforge.modeling.wiring.domino import DominoDraft
from specforge.ops.corrected_cross_entropy import domino_cross_entropy
from specforge.ops.hard_cross_entropy import rows_per_tile
from specforge.runtime.contracts import StepContext, StepOutput, TrainBatch
from specforge.training.strategies.block import BlockStrategy, draft_of, picked, slot_metrics, spread
from specforge.training.strategies.block_rows import BlockRows, slot_weights

if TYPE_CHECKING:
    from specforge.data.vocabulary_map import VocabularyMap
    from specforge.evaluation.proposer import Proposer
    from specforge.modeling.draft.base import DraftArchitecture
    from specforge.modeling.target import TargetHead


class Domino(BlockStrategy):
    """Slot k predicts tok[a+1+k]; slots past 0 add a correction from a GRU over tok[a … a+k]. The last slot is never served.

    Args:
        block_size: slots of a block; bs − 1 tokens are proposed.
        num_anchors: blocks drawn from each conversation and epoch; null = every legal anchor.
        loss_decay_gamma: slot k weighs exp(−k/γ); null = all alike.
        gru_hidden_size, correction_size: widths of the GRU and of the low-rank correction.
        base_loss_fraction: λ, the base logits' share of the loss, falls from 1 to 0 over this part of all optimizer steps.
        candidate_pool_size: words that a correction may choose among when drafting, as SGLang's flag of that name; 0 = all.
        mask_token_id, aux_hidden_state_layer_ids: as DFlash.
    """

    name = "domino"
    free_keys: ClassVar[tuple[str, ...]] = ("num_anchors", "loss_decay_gamma", "base_loss_fraction", "candidate_pool_size")

    def __init__(
        self,
        *,
        block_size: Annotated[int, Field(ge=2, le=64)],
        num_anchors: Annotated[int, Field(ge=1)] | None,
        loss_decay_gamma: Annotated[float, Field(gt=0)] | None,
        gru_hidden_size: Annotated[int, Field(ge=1)],
        correction_size: Annotated[int, Field(ge=1)],
        base_loss_fraction: Annotated[float, Field(ge=0, le=1)],
        candidate_pool_size: Annotated[int, Field(ge=0)],
        mask_token_id: Annotated[int, Field(ge=0)] | None,
        aux_hidden_state_layer_ids: list[int] | None,
    ) -> None:
        super().__init__(block_size, num_anchors, mask_token_id, aux_hidden_state_layer_ids)
        self.loss_decay_gamma, self.base_loss_fraction = loss_decay_gamma, base_loss_fraction
        self.gru_hidden_size, self.correction_size, self.candidate_pool_size = gru_hidden_size, correction_size, candidate_pool_size

    def build_model(
        self, architecture: DraftArchitecture, target: TargetFacts, vocabulary: VocabularyMap, embedding: torch.Tensor
    ) -> nn.Module:
        backbone = self.draft_arguments(target, vocabulary, embedding)
        return DominoDraft(architecture, gru_hidden_size=self.gru_hidden_size, correction_size=self.correction_size, **backbone)

    def base_share(self, context: StepContext) -> float:
        """λ of this step: linear from 1 to 0 over the first ``base_loss_fraction`` of the run (conventions §3)."""
        steps = self.base_loss_fraction * context.total_steps
        return max(0.0, 1.0 - context.step / steps) if steps > 0 else 0.0

    def loss(
        self, draft: Any, slots: torch.Tensor, rows: BlockRows, batch: TrainBatch, head: TargetHead, context: StepContext
    ) -> StepOutput:
        weights = slot_weights(rows.valid, self.loss_decay_gamma)
        loss_sum, losses, predicted = domino_cross_entropy(
            picked(slots, rows.valid),
            head.weight,
            picked(draft.latent(slots, draft.prefix_states(rows.previous_tokens())), rows.valid),
            draft.correction_weight,
            after_first(rows.valid)[rows.valid],
            rows.labels[rows.valid],
            weights[rows.valid],
            self.base_share(context),
        )
        metrics = slot_metrics(predicted, losses[0], rows, batch)
        metrics["base_step_loss"] = (spread(losses[1].double(), rows.valid).sum(0), metrics["step_loss"][1])
        return StepOutput(loss_sum, weights.sum().double(), metrics)

    def predict(self, draft: Any, slots: torch.Tensor, rows: BlockRows, head: TargetHead) -> torch.Tensor:
        latent = draft.latent(slots, draft.prefix_states(rows.previous_tokens()))
        tile = max(1, rows_per_tile(head.weight) // max(slots.shape[1], 1))
        parts = [
            corrected_logits(linear(s.to(head.weight.dtype), head.weight).float(), z, draft.correction_weight, self.candidate_pool_size)
            for s, z in zip(slots.split(tile), latent.split(tile), strict=True)
        ]
        return torch.cat([logits.argmax(-1) for logits in parts])

    def proposer(self, model: nn.Module, head: TargetHead) -> Proposer:
        from specforge.evaluation.domino_proposer import DominoProposer

        return DominoProposer(draft_of(model), head, self)

    def head_export(self) -> tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]:
        names = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")
        nested = {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1}
        return names, {**nested, "gru_hidden_dim": self.gru_hidden_size, "emb_dim": self.correction_size}, {}

    def serving_arguments(self, num_draft_tokens: int) -> dict[str, Any]:
        return {**super().serving_arguments(num_draft_tokens), "speculative_domino_candidate_pool_size": self.candidate_pool_size}


def after_first(valid: torch.Tensor) -> torch.Tensor:
    """bool like ``valid`` [N, J]: every slot but the first, which keeps its base logits."""
    corrected = torch.ones_like(valid)
    corrected[:, 0] = False
    return corrected


def corrected_logits(base: torch.Tensor, latent: torch.Tensor, projection: torch.Tensor, pool_size: int) -> torch.Tensor:
    """What SGLang chooses from: base [N, J, V] plus the correction of ``latent`` [N, J, e] in all slots but the first.

    The words of a block's candidate pool are those with the highest base logit in any corrected slot; the rest is −inf there.
    """
    corrected = base[:, 1:] + linear(latent[:, 1:], projection).float()
    if 0 < pool_size < base.shape[-1] and base.shape[1] > 1:
        pool = base[:, 1:].amax(1).topk(pool_size, dim=-1).indices
        outside = torch.ones(base.shape[0], base.shape[-1], dtype=torch.bool, device=base.device).scatter_(1, pool, False)
        corrected = corrected.masked_fill(outside.unsqueeze(1), float("-inf"))
    return torch.cat((base[:, :1], corrected), dim=1)
