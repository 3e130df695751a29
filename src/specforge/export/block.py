"""The block strategies' half of the export map: DFlash, D-PACE, Domino and DSpark as SGLang's block loaders read them (conventions.md §5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specforge.errors import ExportError
from specforge.export.weight_map import OuterExport
from specforge.inference.layer_ids import sglang_setter_ids

if TYPE_CHECKING:
    from specforge.modeling.draft.base import DraftArchitecture
    from specforge.modeling.target_facts import TargetFacts
    from specforge.training.strategies.block import BlockStrategy

_OUTSIDE = ("fc.weight", "hidden_norm.weight", "norm.weight")
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
# The whole target vocabulary is drafted, so the map says nothing.
_LEFT_OUT = ("d2t", "t2d")


def block_outer_export(strategy: BlockStrategy, architecture: DraftArchitecture, target: TargetFacts, export_format: str) -> OuterExport:
    """Raises :class:`ExportError` for an architecture or layer ids that no block loader reads."""
    serving_class = strategy.serving_classes.get(architecture.name)
    if serving_class is None:
        raise ExportError(
            f"format={export_format}: no block loader reads draft={architecture.name} strategy={strategy.name}; served architectures: "
            f"{', '.join(strategy.serving_classes)} (the loader always builds norms on queries and keys)."
        )
    layer_ids = list(strategy.aux_layer_ids(target))
    if export_format == "sglang":  # refuses what the target's setter cannot express; the config keeps output-side ids
        sglang_setter_ids(layer_ids, target.num_layers, (target.raw.get("architectures") or [""])[0], "dflash")
    names, nested, top = strategy.head_export()
    config: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "num_target_layers": target.num_layers,
        "block_size": strategy.block_size,
        "dflash_config": {
            "target_layer_ids": layer_ids,
            "mask_token_id": strategy.mask_token_id,
            "block_size": strategy.block_size,
            "num_target_layers": target.num_layers,
            **nested,
        },
        **top,
        "specforge": {
            "aux_layer_ids_output_side": layer_ids,
            "strategy": strategy.name,
            "slot_convention": {"first_proposal_slot": strategy.first_slot, "proposals": strategy.num_proposals},
        },
    }
    if top:  # DSpark's parser looks outside of the nested node too
        config |= {"target_layer_ids": layer_ids, "mask_token_id": strategy.mask_token_id}
    prefixes = {f"layers.{i}.": f"layers.{i}." for i in range(architecture.num_layers)}
    mapped = {n: n for n in (*_OUTSIDE, *names)}
    return OuterExport(serving_class, mapped, prefixes, {n: n for n in _NORMS}, config, left_out=_LEFT_OUT)
