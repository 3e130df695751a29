"""Read a published draft in the SGLang layout: to evaluate it as a baseline or to start training from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specforge.data.vocabulary_map import VocabularyMap
from specforge.errors import ExportError, TargetError
from specforge.export.published_layouts import LAYOUTS, Layout

if TYPE_CHECKING:
    from specforge.training.assembly import Parts


@dataclass(frozen=True)
class PublishedDraft:
    """config.json and weights of a draft folder, under our names."""

    folder: Path
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    layout: Layout

    def vocabulary(self, target_vocab_size: int) -> VocabularyMap:
        """Its draft vocabulary; a draft without a map knows the whole target vocabulary."""
        d2t = self.weights.get("d2t")
        if d2t is None:
            return VocabularyMap.identity(target_vocab_size)
        kept = d2t.long() + torch.arange(d2t.numel())
        if kept.numel() and (int(kept.max()) >= target_vocab_size or int(kept.min()) < 0 or not bool((kept[1:] > kept[:-1]).all())):
            raise ExportError(
                f"{self.folder}: d2t maps to ids {int(kept.min())} … {int(kept.max())}, which are not ascending ids of the target's "
                f"{target_vocab_size} tokens. Is it a draft for this target?"
            )
        t2d = torch.zeros(target_vocab_size, dtype=torch.bool)
        t2d[kept] = True
        return VocabularyMap(d2t.long(), t2d, float("nan"))

    @property
    def strategy(self) -> str:
        """Name of the strategy that trains this layout; the D-PACE loss leaves a DFlash draft."""
        return self.layout.strategy(self.config)

    def draft_node(self) -> dict[str, Any]:
        """Dimensions as the keys of ``conf/draft/<architecture>.yaml``."""
        return self.layout.draft_node(self.config)

    def strategy_node(self) -> dict[str, Any]:
        """Flags, sizes and layer ids as the keys of ``conf/strategy/<strategy>.yaml``."""
        return self.layout.strategy_node(self.config, self.weights)

    def load_into(self, model: nn.Module, parts: Parts) -> None:
        """Copy every weight; raises :class:`ExportError` naming what is missing, unknown or of another shape."""
        state = model.state_dict()
        weights = {n: t for n, t in self.weights.items() if n not in ("d2t", "t2d", "embed_tokens.weight")}
        wanted = state.keys() - {"d2t", "t2d"}
        problems = [f"{n} is missing" for n in sorted(wanted - weights.keys())]
        problems += [
            f"{n} has no place in draft={parts.architecture.name} strategy={parts.strategy.name}" for n in sorted(weights.keys() - wanted)
        ]
        problems += [
            f"{n} is {list(weights[n].shape)}, this draft has {list(state[n].shape)}"
            for n in sorted(wanted & weights.keys())
            if weights[n].shape != state[n].shape
        ]
        if problems:
            raise ExportError(
                f"{self.folder} does not fit this configuration: {'; '.join(problems)}. Set draft and strategy to its config.json: "
                f"{json.dumps({'draft': self.draft_node(), 'strategy': self.strategy_node()})}"
            )
        model.load_state_dict({**state, **{n: t.to(state[n].dtype) for n, t in weights.items()}})


def read_published(folder: Path) -> PublishedDraft:
    """Raises :class:`ExportError` for a folder that is no draft in a layout of SGLang that is known here."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ExportError(f"{folder}: no readable config.json ({error}). Give the folder of a draft in the SGLang layout.") from None
    serving_class = (config.get("architectures") or ["?"])[0]
    if serving_class not in LAYOUTS:
        raise ExportError(f"{folder}: architectures is {serving_class}; drafts that can be read are {', '.join(LAYOUTS)}.")
    layout = LAYOUTS[serving_class]
    weights: dict[str, torch.Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            weights.update(load_file(file))
        for file in sorted(folder.glob("pytorch_model*.bin")) if not weights else []:
            weights.update(torch.load(file, map_location="cpu", weights_only=True))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ExportError(f"{folder}: its weights cannot be read ({error}).") from None
    if not weights:
        raise TargetError(f"{folder}: no *.safetensors or pytorch_model.bin weights.")
    return PublishedDraft(folder, config, {_our_name(n, layout): t for n, t in weights.items()}, layout)


def _our_name(name: str, layout: Layout) -> str:
    name = name.removeprefix("model.")
    for theirs, ours in layout.renames.items():
        name = name.replace(theirs, ours)
    return name
