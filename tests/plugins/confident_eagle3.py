"""Strategy ``confident_eagle3``: EAGLE-3 whose rows count by the target's confidence, as an example of a plug-in outside of the package."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from specforge.modeling.wiring.eagle3 import Eagle3Draft
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
        loss: Literal["soft_cross_entropy", "lk_alpha", "lk_lambda"],
        kl_scale: Annotated[float, Field(ge=0, le=1)],
        kl_decay: Annotated[float, Field(ge=0)],
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
            loss=loss,
            kl_scale=kl_scale,
            kl_decay=kl_decay,
        )
        self.confidence_power = confidence_power

    def teacher_factor(self, draft: Eagle3Draft, teacher: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        # The one thing that is new. It depends on the row alone, never on the rest of the batch, so any cut of a batch agrees.
        confidence = torch.softmax(teacher.float(), dim=-1).amax(dim=-1) ** self.confidence_power
        return super().teacher_factor(draft, teacher, label) * confidence
