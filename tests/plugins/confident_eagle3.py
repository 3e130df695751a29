"""Strategy ``confident_eagle3``: EAGLE-3 whose rows count by the target's confidence, as an example of a plug-in outside of the package."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import nn

from specforge.modeling.target import TargetHead
from specforge.ops.soft_cross_entropy import soft_cross_entropy
from specforge.runtime.contracts import StepContext, StepOutput, TrainBatch
from specforge.training.strategies.eagle3 import Eagle3


class ConfidentEagle3(Eagle3):
    """A row's loss weight is multiplied by (largest kept teacher probability) ** ``confidence_power``; 0 is EAGLE-3 itself.

    A row whose next token even the target finds hard to tell is rarely accepted in serving, so it may teach less.
    """

    name = "confident_eagle3"
    # A number of the loss: a run may be continued, and a checkpoint used, with another value.
    free_keys: ClassVar[tuple[str, ...]] = (*Eagle3.free_keys, "confidence_power")

    def __init__(
        self,
        *,
        confidence_power: Annotated[float, Field(ge=0)],
        ttt_length: Annotated[int, Field(ge=1, le=32)],
        step_decay: Annotated[float, Field(gt=0, le=1)],
        draft_vocab_size: Annotated[int, Field(ge=2)] | None,
        aux_hidden_state_layer_ids: list[int] | None,
        fc_norm: bool,
        norm_before_fc: bool,
        norm_output: bool,
        norm_before_residual: bool,
    ) -> None:
        super().__init__(
            ttt_length=ttt_length,
            step_decay=step_decay,
            draft_vocab_size=draft_vocab_size,
            aux_hidden_state_layer_ids=aux_hidden_state_layer_ids,
            fc_norm=fc_norm,
            norm_before_fc=norm_before_fc,
            norm_output=norm_output,
            norm_before_residual=norm_before_residual,
        )
        self.confidence_power = confidence_power

    def forward_loss(self, model: nn.Module, batch: TrainBatch, head: TargetHead, context: StepContext) -> StepOutput:
        rows, draft = self._rows(model, batch, self.ttt_length)
        teacher, label = self._teacher(draft, batch, head, rows)
        # The one thing that is new. It depends on the row alone, never on the rest of the batch, so any cut of a batch agrees.
        confidence = torch.softmax(teacher.float(), dim=-1).amax(dim=-1) ** self.confidence_power
        factor = confidence * draft.t2d[label]

        def on_step(k: int, normed: torch.Tensor, head_weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            taught, weight = rows.teacher_rows[k], rows.weights[k]
            loss, _, predicted = soft_cross_entropy(normed, head_weight, teacher, taught, weight * factor[taught])
            correct = (predicted + draft.d2t[predicted] == label[taught]) & (weight > 0)
            return loss, loss.detach(), correct.sum(), weight.sum()

        steps = model(rows.inputs, on_step)
        loss_sum = sum((self.step_decay**k * step[0] for k, step in enumerate(steps)), torch.zeros((), device=teacher.device))
        step_loss, correct, count = (torch.stack([step[j].double() for step in steps]) for j in (1, 2, 3))
        # The denominator stays that of EAGLE-3: it must not depend on the model or on the teacher's numbers.
        weight_sum = rows.weights[0].sum().double()
        return StepOutput(loss_sum, weight_sum, {"per_position_accuracy": (correct, count), "step_loss": (step_loss, count)})
