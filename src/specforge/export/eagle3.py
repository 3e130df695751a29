"""EAGLE-3's half of the export map, for SGLang and for a self-contained Hugging Face folder (conventions.md §5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specforge.errors import ExportError
from specforge.export.weight_map import OuterExport
from specforge.inference.layer_ids import sglang_setter_ids

if TYPE_CHECKING:
    from specforge.modeling.draft.base import DraftArchitecture
    from specforge.modeling.target_facts import TargetFacts
    from specforge.training.strategies.eagle3 import Eagle3

_LAYER_NORMS = ("input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight")


def eagle3_outer_export(strategy: Eagle3, architecture: DraftArchitecture, target: TargetFacts, export_format: str) -> OuterExport:
    """Raises :class:`ExportError` for a flag or architecture that the serving class does not read."""
    serving_class = strategy.serving_classes.get(architecture.name)
    if serving_class is None:
        raise ExportError(
            f"format={export_format}: no serving class for draft={architecture.name} strategy={strategy.name}. "
            f"Served architectures: {', '.join(strategy.serving_classes)}."
        )
    flags, layer_ids = strategy.flags, list(strategy.aux_layer_ids(target))
    served_ids = layer_ids
    if export_format == "sglang":
        _refuse_unserved(strategy, architecture, target, layer_ids)
        served_ids = sglang_setter_ids(layer_ids, target.num_layers, (target.raw.get("architectures") or [""])[0])
    names = {n: n for n in ("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d")}
    if flags.fc_norm:
        names.update({f"fc_norm.{i}.weight": f"fc_norm.{i}.weight" for i in range(len(layer_ids))})
    if flags.norm_before_fc:
        names["input_norm.weight"] = "input_norm.weight"
    config = {
        "draft_vocab_size": strategy.draft_vocab_size or target.vocab_size,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,  # a tied target would make SGLang ignore the draft's own head
        "target_hidden_size": target.hidden_size,
        "num_aux_hidden_states": len(layer_ids),
        "fc_norm": flags.fc_norm,
        "norm_before_fc": flags.norm_before_fc,
        "norm_output": flags.norm_output,
        "norm_before_residual": flags.norm_before_residual,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": served_ids,
            "use_aux_hidden_state": True,
            "norm_before_fc": flags.norm_before_fc,
        },
        # Servers differ in how they count; these are the outputs of the target's layers, counted from 0.
        "specforge": {"aux_layer_ids_output_side": layer_ids, "strategy": strategy.name, "ttt_length": strategy.ttt_length},
    }
    return OuterExport(serving_class, names, {"midlayer.": "midlayer."}, {n: n for n in _LAYER_NORMS}, config)


def _refuse_unserved(strategy: Eagle3, architecture: DraftArchitecture, target: TargetFacts, layer_ids: list[int]) -> None:
    problems = []
    if strategy.flags.norm_before_residual:
        problems.append("strategy.norm_before_residual=true is not read by SGLang; train with false")
    if strategy.flags.norm_before_fc and architecture.name != "llama":
        problems.append(f"strategy.norm_before_fc=true is read by SGLang for draft=llama only, not for {architecture.name}")
    if len(layer_ids) == 1 and target.hidden_size == architecture.hidden_size:
        problems.append("with one captured layer of the draft's own width SGLang skips fc; capture two layers or more")
    if problems:
        raise ExportError("format=sglang: " + "; ".join(problems) + ".")
