"""Strategy ``dflash``: block diffusion with hard labels under the target's own head (DFlash, arXiv 2602.06036)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import nn

from specforge.ops.hard_cross_entropy import argmax_of_head, hard_cross_entropy
from specforge.runtime.contracts import StepContext, StepOutput, TrainBatch
from specforge.training.strategies.block import BlockStrategy, draft_of, picked, slot_metrics
from specforge.training.strategies.block_rows import BlockRows, slot_weights

if TYPE_CHECKING:
    from specforge.evaluation.proposer import Proposer
    from specforge.modeling.target import TargetHead


class DFlash(BlockStrategy):
    """Slot k of a block predicts tok[a+k]; slot 0 is the anchor itself.

    Args:
        block_size: slots of a block, the anchor included; bs − 1 tokens are proposed.
        num_anchors: blocks drawn from each conversation and epoch; null = every legal anchor.
        loss_decay_gamma: slot k weighs exp(−(k−1)/γ); null = all alike.
        mask_token_id: id that fills slots 1 … bs − 1; null = the tokenizer's mask token or an id that no token has.
        aux_hidden_state_layer_ids: output-side ids to capture; null = SGLang's default, one a draft layer.
    """

    name = "dflash"
    first_slot = 1

    def __init__(
        self,
        *,
        block_size: Annotated[int, Field(ge=2, le=64)],
        num_anchors: Annotated[int, Field(ge=1)] | None,
        loss_decay_gamma: Annotated[float, Field(gt=0)] | None,
        mask_token_id: Annotated[int, Field(ge=0)] | None,
        aux_hidden_state_layer_ids: list[int] | None,
    ) -> None:
        super().__init__(block_size, num_anchors, mask_token_id, aux_hidden_state_layer_ids)
        self.loss_decay_gamma = loss_decay_gamma

    def loss(
        self, draft: Any, slots: torch.Tensor, rows: BlockRows, batch: TrainBatch, head: TargetHead, context: StepContext
    ) -> StepOutput:
        weights = slot_weights(rows.valid, self.loss_decay_gamma)
        losses, predicted = hard_cross_entropy(picked(slots, rows.valid), head.weight, rows.labels[rows.valid])
        loss_sum = (losses * weights[rows.valid]).sum()
        return StepOutput(loss_sum, weights.sum().double(), slot_metrics(predicted, losses, rows, batch))

    def predict(self, draft: Any, slots: torch.Tensor, rows: BlockRows, head: TargetHead) -> torch.Tensor:
        return argmax_of_head(slots.flatten(0, 1), head.weight).unflatten(0, slots.shape[:2])

    def proposer(self, model: nn.Module, head: TargetHead) -> Proposer:
        from specforge.evaluation.block_proposer import DFlashProposer

        return DFlashProposer(draft_of(model), head, self)
