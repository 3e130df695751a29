"""P-EAGLE's half of the export map: the layout and keys that vLLM's parallel drafting reads. SGLang 0.5.23 has no loader for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specforge.errors import ExportError
from specforge.export.weight_map import OuterExport

if TYPE_CHECKING:
    from specforge.modeling.draft.base import DraftArchitecture
    from specforge.modeling.target_facts import TargetFacts
    from specforge.training.strategies.peagle import PEagle

# vLLM's buffer for the mask state is three captured layers wide.
_VLLM_NUM_AUX = 3


def vllm_layer_ids(layer_ids: list[int]) -> list[int]:
    """Output-side ids as vLLM counts: it numbers what enters a layer (conventions.md §1)."""
    return [i + 1 for i in layer_ids]


def peagle_outer_export(strategy: PEagle, architecture: DraftArchitecture, target: TargetFacts, export_format: str) -> OuterExport:
    """Raises :class:`ExportError` for SGLang, and for what vLLM's class does not read."""
    serving_class, layer_ids = strategy.vllm_classes.get(architecture.name), list(strategy.aux_layer_ids(target))
    problems = []
    if export_format == "sglang":
        problems.append("SGLang 0.5.23 has no loader for P-EAGLE drafts; use format=vllm")
    elif serving_class is None:
        served = ", ".join(strategy.vllm_classes)
        problems.append(f"no class that reads draft={architecture.name} strategy={strategy.name} is known; served with it: {served}")
    elif export_format == "vllm" and len(layer_ids) != _VLLM_NUM_AUX:
        problems.append(f"vLLM reads {_VLLM_NUM_AUX} captured layers, this draft has {len(layer_ids)}: {layer_ids}; train with three")
    if problems or serving_class is None:
        raise ExportError(f"format={export_format}: {'; '.join(problems)}.")
    flags = strategy.flags
    names = {n: n for n in ("fc.weight", "mask_hidden", "norm.weight", "lm_head.weight", "d2t", "t2d", "layers.0.hidden_norm.weight")}
    if flags.fc_norm:
        names.update({f"fc_norm.{i}.weight": f"fc_norm.{i}.weight" for i in range(len(layer_ids))})
    if flags.norm_before_fc:
        names["input_norm.weight"] = "input_norm.weight"
    config = {
        "draft_vocab_size": strategy.draft_vocab_size or target.vocab_size,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "target_hidden_size": target.hidden_size,
        "num_aux_hidden_states": len(layer_ids),
        "fc_norm": flags.fc_norm,
        "norm_before_fc": flags.norm_before_fc,
        "norm_output": flags.norm_output,
        "norm_before_residual": flags.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": vllm_layer_ids(layer_ids),
        "parallel_drafting": True,
        "mask_token_id": strategy.mask_token_id,
        "pard_token": strategy.mask_token_id,  # the key by which vLLM's proposer finds it
        "num_depths": strategy.num_depths,
        "specforge": {
            "aux_layer_ids_output_side": layer_ids,
            "strategy": strategy.name,
            # Who proposes what: the row of the last committed token the first draft, the d-th mask row behind it, at its position + d,
            # the one after d others. Drafts that leave their first slot unused say so in the same place.
            "slot_convention": {"first_proposal": "last_committed_row", "mask_rows": "one_per_further_proposal"},
        },
    }
    norms = {n: n for n in ("input_layernorm.weight", "post_attention_layernorm.weight")}
    prefixes = {f"layers.{i}.": f"layers.{i}." for i in range(architecture.num_layers)}
    return OuterExport(serving_class, names, prefixes, norms, config)
