"""A tree of tokens in one forward of a transformers model: who sees whom, at which position, and what stays in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specforge.errors import TargetError

# Attention functions that take a mask of our own.
_MASKABLE = ("sdpa", "eager")


def tree_arguments(model: Any, parents: Sequence[int], cached: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """``attention_mask`` and ``position_ids`` of a forward over T tokens behind ``cached`` others.

    Token i follows token ``parents[i]`` < i of the same forward, or the last cached one for −1. Raises :class:`TargetError` for a model
    whose attention cannot take such a mask.
    """
    config = model.config.get_text_config(decoder=True)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in _MASKABLE:
        raise TargetError(
            f"target_backend.attn_implementation={implementation}: takes no mask of its own, which a tree of drafts needs. Set "
            "target_backend.attn_implementation=sdpa, or evaluator.tree_topk=1."
        )
    visible, depth = _visible(parents)
    positions = cached + depth
    whole = torch.cat((torch.ones(len(parents), cached, dtype=torch.bool), visible), dim=1)
    distance = positions.unsqueeze(-1) - torch.cat((torch.arange(cached), positions))
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    sliding = whole if window is None else whole & (distance < window)
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise TargetError(
            f"the target has layers of kind {', '.join(sorted(other))}, which cannot read a tree of drafts. Set evaluator.tree_topk=1."
        )

    def additive(seen: Tensor) -> Tensor:
        mask = torch.zeros(1, 1, *seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        return mask.to(device)

    # A class with layers of several kinds takes one mask a kind; one without kinds has a window in every layer or in none.
    if "sliding_attention" in kinds:
        mask: Any = {"full_attention": additive(whole), "sliding_attention": additive(sliding)}
    else:
        mask = additive(whole if kinds else sliding)
    return {"attention_mask": mask, "position_ids": positions.unsqueeze(0).to(device)}


def _visible(parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """bool [T, T]: a token sees itself and its ancestors; int64 [T]: how many ancestors that is."""
    visible = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
    return visible, visible.sum(-1) - 1


def keep_in_cache(cache: Any, length: int, places: Sequence[int]) -> Any:
    """Of every layer keep the first ``length`` positions and, in this order behind them, ``places``."""
    for layer in cache.layers:
        if layer.get_seq_length() == 0:  # a layer that reads another one's keys
            continue
        kept = torch.tensor([*range(length), *places], device=layer.keys.device)
        layer.keys, layer.values = layer.keys.index_select(-2, kept), layer.values.index_select(-2, kept)
    return cache
