"""Start a draft from the target's own weights: its last layer, final norm and kept head rows, where the shapes agree.

An untrained EAGLE-3 layer has to learn attention, a feed-forward and 2·Vd·H head weights that the target already has. What agrees in
shape is copied; the half of the projections that reads the token embedding starts at zero, so the layer begins as the target's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from specforge.modeling.draft.base import DraftArchitecture
from specforge.modeling.target import find_tensors
from specforge.modeling.target_facts import TargetFacts

# A quantized weight (FP8 of DeepSeek-V3) means nothing without its scales.
_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_prefixes(layer: int) -> tuple[str, ...]:
    """Where checkpoints of the common families keep decoder layer ``layer``."""
    return tuple(f"{root}layers.{layer}." for root in ("model.", "model.language_model.", "language_model.model.", ""))


def target_layer_weights(folder: Path, names: Mapping[str, str], layer: int) -> dict[str, torch.Tensor]:
    """The tensors of one target layer by our names; those that the checkpoint does not have are left out."""
    for prefix in layer_prefixes(layer):
        found = find_tensors(folder, [prefix + theirs for theirs in names.values()])
        if found:
            return {ours: found[prefix + theirs] for ours, theirs in names.items() if prefix + theirs in found}
    return {}


@torch.no_grad()
def copy_where_shapes_agree(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Copy tensors into parameters of ``module``; a [out, 2H] projection takes an [out, H] tensor into its right half, zero in the left.

    Returns the names that were copied.
    """
    copied = []
    for name, parameter in module.named_parameters():
        source = weights.get(name)
        if source is None or source.dtype not in _PLAIN_DTYPES:
            continue
        if source.shape == parameter.shape:
            parameter.copy_(source)
        elif source.dim() == 2 and parameter.dim() == 2 and parameter.shape == (source.shape[0], 2 * source.shape[1]):
            parameter[:, : source.shape[1]].zero_()
            parameter[:, source.shape[1] :].copy_(source)
        else:
            continue
        copied.append(name)
    return copied


def warm_start_weights(folder: Path, target: TargetFacts, architecture: DraftArchitecture) -> dict[str, torch.Tensor]:
    """The target's last layer under our layer names, its norms included: what an architecture says it can start from."""
    names = architecture.warm_start_names()
    return target_layer_weights(folder, names, target.num_layers - 1) if names else {}
