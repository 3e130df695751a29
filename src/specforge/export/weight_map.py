"""How a draft's names and facts become a server's: the strategy's outer half combined with the architecture's inner half."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from specforge.errors import ExportError
from specforge.modeling.draft.base import DraftArchitecture


@dataclass(frozen=True)
class OuterExport:
    """An algorithm's half of the map for one format.

    ``serving_class`` is the class a server loads; ``names`` maps whole parameter names, ours to theirs; ``layer_prefixes`` maps the
    prefix of each decoder layer and ``layer_names`` what the algorithm adds inside a layer; ``config`` are the algorithm's own fields;
    ``left_out`` names what our draft has and the server's does not.
    """

    serving_class: str
    names: dict[str, str]
    layer_prefixes: dict[str, str]
    layer_names: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def weight_names(self, architecture: DraftArchitecture) -> dict[str, str]:
        """Every exported parameter and buffer: our name -> theirs."""
        inside = {**architecture.layer_weight_names(), **self.layer_names}
        layers = {ours + name: theirs + inside[name] for ours, theirs in self.layer_prefixes.items() for name in inside}
        return {**self.names, **layers}


def exported_tensors(model: nn.Module, outer: OuterExport, architecture: DraftArchitecture, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The draft's ``state_dict`` under the server's names; raises :class:`ExportError` if the map misses or invents a tensor."""
    names = outer.weight_names(architecture)
    state = {n: t for n, t in model.state_dict().items() if n not in outer.left_out}
    unmapped, invented = sorted(state.keys() - names.keys()), sorted(names.keys() - state.keys())
    if unmapped or invented:
        raise ExportError(
            f"the export map of {outer.serving_class} does not fit the draft: without a name {unmapped or 'none'}; "
            f"named but absent {invented or 'none'}."
        )
    return {names[n]: (t.to(dtype) if t.is_floating_point() else t).cpu().contiguous() for n, t in state.items()}
