"""EAGLE-3's half of the export map, for SGLang and for a self-contained Hugging Face folder (conventions.md §5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specforge.errors import ExportError
from specforge.export.peagle import vllm_layer_ids
from specforge.export.weight_map import OuterExport
from specforge.inference.layer_ids import sglang_setter_ids

if TYPE_CHECKING:
    from specforge.modeling.draft.base import DraftArchitecture
    from specforge.modeling.target_facts import TargetFacts
    from specforge.training.strategies.eagle3 import Eagle3

# Of every layer; the first alone has an input_layernorm too, for the embedding.
_LAYER_NORMS = ("hidden_norm.weight", "post_attention_layernorm.weight")
_EMBEDDING_NORM = "midlayer.input_layernorm.weight"


def eagle3_outer_export(strategy: Eagle3, architecture: DraftArchitecture, target: TargetFacts, export_format: str) -> OuterExport:
    """Raises :class:`ExportError` for a flag or architecture that the serving class does not read."""
    serving_class = strategy.serving_classes.get(architecture.name)
    if serving_class is None:
        drops = "self_attn.q_norm.weight" in architecture.layer_weight_names()
        raise ExportError(
            f"format={export_format}: no serving class for draft={architecture.name} strategy={strategy.name}. "
            f"Served architectures: {', '.join(strategy.serving_classes)}"
            + (" (SGLang's EAGLE-3 loader would drop the norms on queries and keys)." if drops else ".")
        )
    if export_format == "vllm" and architecture.num_layers > 1:
        raise ExportError("format=vllm: of several layers vLLM names the norms otherwise; export draft.num_layers=1, or format=sglang.")
    if architecture.name == "deepseek_mla" and (problems := _latent_problems(architecture.plain_config())):
        raise ExportError(f"format={export_format}: {'; '.join(problems)}.")
    flags, layer_ids = strategy.flags, list(strategy.aux_layer_ids(target))
    served_ids = vllm_layer_ids(layer_ids) if export_format == "vllm" else layer_ids
    if export_format == "sglang":
        _refuse_unserved(strategy, architecture, target, layer_ids)
        served_ids = sglang_setter_ids(layer_ids, target.num_layers, (target.raw.get("architectures") or [""])[0])
    names = {n: n for n in ("fc.weight", _EMBEDDING_NORM, "norm.weight", "lm_head.weight", "d2t", "t2d")}
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
    if export_format == "vllm":  # it counts what enters a layer, and reads the ids beside the flags
        config["eagle_aux_hidden_state_layer_ids"] = vllm_layer_ids(layer_ids)
    prefixes = ["midlayer.", *(f"layers.{i}." for i in range(1, architecture.num_layers))]
    return OuterExport(serving_class, names, {p: p for p in prefixes}, {n: n for n in _LAYER_NORMS}, config)


def _refuse_unserved(strategy: Eagle3, architecture: DraftArchitecture, target: TargetFacts, layer_ids: list[int]) -> None:
    problems = strategy.serving_problems(architecture.name, architecture.plain_config(), asdict(strategy.flags))
    if len(layer_ids) == 1 and target.hidden_size == architecture.hidden_size:
        problems.append("with one captured layer of the draft's own width SGLang skips fc; capture two layers or more")
    if problems:
        raise ExportError("format=sglang: " + "; ".join(problems) + ".")


def eagle3_serving_problems(architecture: str, draft: Mapping[str, Any], strategy: Mapping[str, Any]) -> list[str]:
    """What SGLang's classes do not read of these configuration nodes (conventions §5), as sentences without a full stop."""
    problems = []
    if strategy["norm_before_residual"]:
        problems.append("strategy.norm_before_residual=true is not read by SGLang; train with false")
    if strategy["norm_before_fc"] and architecture != "llama":
        problems.append(f"strategy.norm_before_fc=true is read by SGLang for draft=llama only, not for {architecture}")
    return problems + (_latent_problems(draft) if architecture == "deepseek_mla" else [])


def _latent_problems(draft: Mapping[str, Any]) -> list[str]:
    """SGLang's MLA draft: one layer, queries through a rank, and every scaled RoPE taken for YaRN."""
    problems = []
    if draft["q_lora_rank"] == 0:
        problems.append("draft.q_lora_rank=0 (a direct query projection) is not read by SGLang's MLA draft; train with a rank")
    if draft["num_layers"] != 1:
        problems.append(f"SGLang's MLA draft has one layer, this one draft.num_layers={draft['num_layers']}")
    kind = (draft["rope"] or {}).get("rope_type", "default")
    if kind not in ("default", "yarn"):
        problems.append(f"draft.rope.rope_type={kind} would be served as YaRN; train with default or yarn")
    return problems
