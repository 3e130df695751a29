"""Read a published EAGLE-3 draft in the SGLang layout: to evaluate it as a baseline or to start training from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specforge.data.vocabulary_map import VocabularyMap
from specforge.errors import ExportError, TargetError
from specforge.modeling.target_facts import resolve_rope

if TYPE_CHECKING:
    from specforge.training.assembly import Parts

# Serving class -> (architecture, strategy) choices that read it.
_READERS = {"LlamaForCausalLMEagle3": ("llama", "eagle3")}
_LEGACY_NAMES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2", "layers.0.": "midlayer."}


@dataclass(frozen=True)
class PublishedDraft:
    """config.json and weights of a draft folder, under our names."""

    folder: Path
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    architecture: str
    strategy: str

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

    def draft_node(self) -> dict[str, Any]:
        """Dimensions as the keys of ``conf/draft/<architecture>.yaml``."""
        c = self.config
        heads = c["num_attention_heads"]
        return {
            "num_layers": 1,
            "hidden_size": c["hidden_size"],
            "intermediate_size": c["intermediate_size"],
            "num_heads": heads,
            "num_kv_heads": c.get("num_key_value_heads") or heads,
            "head_dim": c.get("head_dim") or c["hidden_size"] // heads,
            "rms_norm_eps": c.get("rms_norm_eps", 1e-6),
            "max_position_embeddings": c.get("max_position_embeddings", 2048),
            "rope": resolve_rope(c, str(self.folder)),
        }

    def strategy_node(self) -> dict[str, Any]:
        """Flags and layer ids as the keys of ``conf/strategy/eagle3.yaml``."""
        c, eagle = self.config, self.config.get("eagle_config") or {}
        own = (c.get("specforge") or {}).get("aux_layer_ids_output_side")
        return {
            "draft_vocab_size": self.weights["lm_head.weight"].shape[0],
            "aux_hidden_state_layer_ids": own or eagle.get("eagle_aux_hidden_state_layer_ids") or c.get("eagle_aux_hidden_state_layer_ids"),
            "fc_norm": bool(c.get("fc_norm", c.get("use_aux_norm", False))),
            "norm_before_fc": bool(eagle.get("norm_before_fc", c.get("norm_before_fc", False))),
            "norm_output": bool(c.get("norm_output", False)),
            "norm_before_residual": bool(c.get("norm_before_residual", False)),
        }

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
    """Raises :class:`ExportError` for a folder that is no EAGLE-3 draft in the SGLang layout."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ExportError(f"{folder}: no readable config.json ({error}). Give the folder of a draft in the SGLang layout.") from None
    serving_class = (config.get("architectures") or ["?"])[0]
    if serving_class not in _READERS:
        raise ExportError(f"{folder}: architectures is {serving_class}; drafts that can be read are {', '.join(_READERS)}.")
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
    return PublishedDraft(folder, config, {_our_name(n): t for n, t in weights.items()}, *_READERS[serving_class])


def _our_name(name: str) -> str:
    name = name.removeprefix("model.")
    for theirs, ours in _LEGACY_NAMES.items():
        name = name.replace(theirs, ours)
    return name
