"""Strategy ``dpace``: DFlash whose slots weigh by how far acceptance is expected to reach (D-PACE, arXiv 2605.18810)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from specforge.ops.hard_cross_entropy import hard_cross_entropy
from specforge.runtime.contracts import StepContext, StepOutput, TrainBatch
from specforge.training.strategies.block import picked, slot_metrics, spread
from specforge.training.strategies.block_rows import BlockRows
from specforge.training.strategies.dflash import DFlash

if TYPE_CHECKING:
    from specforge.modeling.target import TargetHead

Weighting = Literal["full", "cumulative", "continuation"]


class DPace(DFlash):
    """DFlash with weights from the draft's own, detached label probabilities.

    Args:
        weighting: ``full``, ``cumulative`` or ``continuation``, see :func:`dpace_weights`.
        alpha: smoothing of the label probability, s = (1 − α)·π + α.
        block_size, num_anchors, mask_token_id, aux_hidden_state_layer_ids: as DFlash.
    """

    name = "dpace"
    free_keys: ClassVar[tuple[str, ...]] = ("num_anchors", "weighting", "alpha")

    def __init__(
        self,
        *,
        block_size: Annotated[int, Field(ge=2, le=64)],
        num_anchors: Annotated[int, Field(ge=1)] | None,
        weighting: Weighting,
        alpha: Annotated[float, Field(ge=0, le=1)],
        mask_token_id: Annotated[int, Field(ge=0)] | None,
        aux_hidden_state_layer_ids: list[int] | None,
    ) -> None:
        super().__init__(
            block_size=block_size,
            num_anchors=num_anchors,
            loss_decay_gamma=None,
            mask_token_id=mask_token_id,
            aux_hidden_state_layer_ids=aux_hidden_state_layer_ids,
        )
        self.weighting, self.alpha = weighting, alpha

    def loss(
        self, draft: Any, slots: torch.Tensor, rows: BlockRows, batch: TrainBatch, head: TargetHead, context: StepContext
    ) -> StepOutput:
        losses, predicted = hard_cross_entropy(picked(slots, rows.valid), head.weight, rows.labels[rows.valid])
        weights = dpace_weights(spread((-losses.detach()).exp(), rows.valid), rows.valid, self.weighting, self.alpha)
        loss_sum = (losses * weights[rows.valid]).sum()
        # The weights depend on the model, so the denominator is what does not: the number of blocks (conventions §3).
        kept = torch.tensor(float(rows.anchors.numel()), dtype=torch.float64, device=slots.device)
        return StepOutput(loss_sum, kept, slot_metrics(predicted, losses, rows, batch))


def dpace_weights(probability: torch.Tensor, valid: torch.Tensor, weighting: Weighting, alpha: float) -> torch.Tensor:
    """Label probabilities π [N, J] and valid bool [N, J] -> weights [N, J]; s = (1 − α)·π + α on valid slots, 1 elsewhere.

    ``cumulative``: ∏ s up to the slot, the chance that it is reached and right. ``full``: Σ of that over the slot and all later valid
    ones, the expected accepted length that hangs on it. ``continuation``: the second over the first.
    """
    s = torch.where(valid, (1.0 - alpha) * probability + alpha, 1.0)
    prefix = s.cumprod(-1)
    suffix = (prefix * valid).flip(-1).cumsum(-1).flip(-1)
    if weighting == "cumulative":
        return prefix * valid
    return suffix * valid if weighting == "full" else suffix / prefix.clamp_min(torch.finfo(prefix.dtype).tiny) * valid
