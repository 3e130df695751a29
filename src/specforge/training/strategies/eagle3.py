"""Strategy ``eagle3``: training-time test with soft targets (EAGLE-3, arXiv 2503.01840); with its flags also EAGLE-3.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from specforge.modeling.target_facts import TargetFacts
from specforge.modeling.wiring.eagle3 import Eagle3Draft, Eagle3Flags
from specforge.ops.attention import fastest_attention, plain_attention
from specforge.ops.lk_loss import LKForm, lk_loss
from specforge.ops.soft_cross_entropy import soft_cross_entropy
from specforge.runtime import contracts
from specforge.runtime.contracts import StepContext, StepOutput, TrainBatch
from specforge.training.strategies.base import DraftTrainStrategy, PrefixCorrectness
from specforge.training.strategies.eagle3_rows import Eagle3Rows, align
from specforge.training.strategies.teacher import kept_teacher, teacher_normalizers

if TYPE_CHECKING:
    from specforge.data.vocabulary_map import VocabularyMap
    from specforge.evaluation.proposer import Proposer
    from specforge.export.weight_map import OuterExport
    from specforge.modeling.draft.base import DraftArchitecture
    from specforge.modeling.target import TargetHead


class Eagle3(DraftTrainStrategy):
    """EAGLE-3 with any architecture.

    Args:
        ttt_length: unrolled steps L; at least as many as serving drafts in a chain.
        step_decay: weight of step k is step_decay^k (conventions §3).
        draft_vocab_size: kept words Vd of the draft's head; null keeps the whole target vocabulary.
        aux_hidden_state_layer_ids: output-side ids to capture; null = layers 1, N//2 − 1, N − 4.
        fc_norm, norm_before_fc, norm_output, norm_before_residual: conventions §5.
        loss: of one row; the two LK losses (arXiv 2602.23881) train acceptance itself.
        kl_scale, kl_decay: of ``lk_lambda``: the divergence has weight kl_scale · exp(−kl_decay · acceptance), the rest has 1 minus it.
    """

    name = "eagle3"
    serving_classes: ClassVar[dict[str, str]] = {"llama": "LlamaForCausalLMEagle3", "deepseek_mla": "Eagle3DeepseekV2ForCausalLM"}
    # Numbers of the loss; the draft vocabulary has a digest of its own.
    free_keys: ClassVar[tuple[str, ...]] = ("ttt_length", "step_decay", "draft_vocab_size", "loss", "kl_scale", "kl_decay")
    drafts_trees = True
    vllm_classes: ClassVar[dict[str, str]] = {"llama": "LlamaForCausalLMEagle3"}

    def __init__(
        self,
        *,
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
        self.ttt_length, self.step_decay, self.draft_vocab_size = ttt_length, step_decay, draft_vocab_size
        self._layer_ids = aux_hidden_state_layer_ids
        self.flags = Eagle3Flags(fc_norm, norm_before_fc, norm_output, norm_before_residual)
        kind: Literal["alpha", "lambda"] = "alpha" if loss == "lk_alpha" else "lambda"
        self.lk_form = None if loss == "soft_cross_entropy" else LKForm(kind, kl_scale, kl_decay)

    def aux_layer_ids(self, target: TargetFacts) -> tuple[int, ...]:
        if self._layer_ids is not None:
            return tuple(sorted(self._layer_ids))
        return tuple(sorted({min(1, target.num_layers - 2), max(target.num_layers // 2 - 1, 0), max(target.num_layers - 4, 0)}))

    def build_model(
        self, architecture: DraftArchitecture, target: TargetFacts, vocabulary: VocabularyMap, embedding: torch.Tensor
    ) -> nn.Module:
        return Eagle3Draft(
            architecture,
            target_hidden_size=target.hidden_size,
            num_aux=len(self.aux_layer_ids(target)),
            embedding=embedding,
            d2t=vocabulary.d2t,
            t2d=vocabulary.t2d,
            flags=self.flags,
        )

    def forward_loss(self, model: nn.Module, batch: TrainBatch, head: TargetHead, context: StepContext) -> StepOutput:
        rows, draft = self._rows(model, batch, self.ttt_length)
        teacher, label = kept_teacher(draft, batch, head, rows.teacher_places)
        factor = self.teacher_factor(draft, teacher, label)
        normalizers = None if self.lk_form is None else teacher_normalizers(teacher, batch, head, rows.teacher_places)

        def on_step(k: int, normed: torch.Tensor, head_weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            taught = rows.teacher_rows[k]
            weight = rows.weights[k]
            loss_weight = weight * factor[taught]
            if self.lk_form is None or normalizers is None:
                loss, _, predicted = soft_cross_entropy(normed, head_weight, teacher, taught, loss_weight)
                accepted = torch.zeros((), device=loss.device)
            else:
                loss, _, predicted, alpha = lk_loss(normed, head_weight, teacher, normalizers, taught, loss_weight, self.lk_form)
                accepted = (alpha * weight).sum()
            correct = (predicted + draft.d2t[predicted] == label[taught]) & (weight > 0)
            return loss, loss.detach(), correct.sum(), weight.sum(), accepted

        steps = model(rows.inputs, on_step)
        loss_sum = sum((self.step_decay**k * step[0] for k, step in enumerate(steps)), torch.zeros((), device=teacher.device))
        step_loss, correct, count, accepted = (torch.stack([step[j].double() for step in steps]) for j in (1, 2, 3, 4))
        metrics = {"per_position_accuracy": (correct, count), "step_loss": (step_loss, count)}
        if self.lk_form is not None:
            metrics["acceptance_rate"] = (accepted, count)
        return StepOutput(loss_sum, rows.weights[0].sum().double(), metrics)

    def teacher_factor(self, draft: Eagle3Draft, teacher: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """What the loss of a row is multiplied by for its teacher: kept logits [P, Vd] and choice [P] -> [P].

        A choice outside of the draft vocabulary has no loss, and is a miss in every accuracy. The denominator knows nothing of this.
        """
        return draft.t2d[label].float()

    @staticmethod
    def _rows(model: nn.Module, batch: TrainBatch, num_steps: int) -> tuple[Eagle3Rows, Eagle3Draft]:
        """Aligned rows and the draft with the attention that is fast on its device."""
        draft = _draft_of(model)
        draft.attend = fastest_attention(batch.tensors[contracts.INPUT_IDS].device, draft.midlayer.self_attn.facts.query_key_width)
        return align(batch, num_steps, by_document=draft.attend is plain_attention), draft

    @torch.no_grad()
    def prefix_correctness(self, model: nn.Module, batch: TrainBatch, head: TargetHead, num_draft_tokens: int) -> PrefixCorrectness:
        """Rows are those with weight at step 0; see the base class."""
        rows, draft = self._rows(model, batch, num_draft_tokens)
        _, label = kept_teacher(draft, batch, head, rows.teacher_places)

        def on_step(k: int, normed: torch.Tensor, _head: torch.Tensor) -> torch.Tensor:
            predicted = draft.logits(normed).argmax(-1)
            return (predicted + draft.d2t[predicted] == label[rows.teacher_rows[k]]) & (rows.weights[k] > 0)

        correct = torch.stack(model(rows.inputs, on_step), dim=-1)
        flat = rows.inputs.rows.flat
        legal = (rows.weights > 0).transpose(0, 1)
        return batch.tensors["document_ids"].flatten()[flat], batch.tensors["position_ids"].flatten()[flat], correct, legal

    def proposer(self, model: nn.Module, head: TargetHead | None = None) -> Proposer:
        from specforge.evaluation.eagle3_proposer import Eagle3Proposer

        return Eagle3Proposer(_draft_of(model))

    def warm_start(
        self, model: nn.Module, layer_weights: Mapping[str, torch.Tensor], final_norm: torch.Tensor | None, head_rows: torch.Tensor
    ) -> list[str]:
        return _draft_of(model).warm_start(layer_weights, final_norm, head_rows)

    def outer_export(self, architecture: DraftArchitecture, target: TargetFacts, export_format: str) -> OuterExport:
        from specforge.export.eagle3 import eagle3_outer_export

        return eagle3_outer_export(self, architecture, target, export_format)

    @classmethod
    def serving_problems(cls, architecture: str, draft: Mapping[str, Any], strategy: Mapping[str, Any]) -> list[str]:
        from specforge.export.eagle3 import eagle3_serving_problems

        return eagle3_serving_problems(architecture, draft, strategy)

    def serving_arguments(self, num_draft_tokens: int) -> dict[str, Any]:
        # SGLang counts the root among the draft tokens: a chain of n drafts is n steps, one branch, n + 1 tokens.
        return {
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": num_draft_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": num_draft_tokens + 1,
        }

    def rules(self, choices: dict[str, str], config: dict[str, Any]) -> list[str]:
        problems = []
        folder, width = config["target"].get("resolved_path"), config["draft"].get("hidden_size")
        if folder and isinstance(width, int) and width != (wanted := TargetFacts.from_folder(folder).hidden_size):
            problems.append(
                f"draft.hidden_size: {width} — strategy {self.name} reads the target's own embedding of width {wanted}. "
                "Set draft.hidden_size=null."
            )
        return problems


def kept_ids(draft: Eagle3Draft) -> torch.Tensor:
    """Target ids [Vd] of the draft vocabulary; the same tensor until the map changes, so that the head gathers its rows once."""
    version = (draft.d2t.data_ptr(), draft.d2t._version)
    cached = getattr(draft, "_kept_ids", None)
    if cached is None or cached[0] != version:
        cached = (version, draft.d2t + torch.arange(draft.d2t.numel(), device=draft.d2t.device))
        draft._kept_ids = cached  # type: ignore[assignment]
    return cached[1]


def _draft_of(model: nn.Module) -> Eagle3Draft:
    """The wiring inside whatever a backend wrapped around it."""
    inner = getattr(model, "module", model)
    if not isinstance(inner, Eagle3Draft):
        raise TypeError(f"strategy eagle3 trains an Eagle3Draft, not a {type(inner).__name__}")
    return inner
