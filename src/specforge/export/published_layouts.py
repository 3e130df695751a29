"""How the config.json and tensor names of a published draft become keys of ``conf/draft`` and ``conf/strategy``, class by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specforge.modeling.target_facts import resolve_rope

Config = Mapping[str, Any]
Weights = Mapping[str, torch.Tensor]
_EAGLE3_NAMES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2", "layers.0.": "midlayer."}


@dataclass(frozen=True)
class Layout:
    """One serving class. ``strategy`` reads the choice of ``strategy=`` off the config; ``renames`` are their names -> ours."""

    architecture: str
    strategy: Callable[[Config], str]
    renames: Mapping[str, str]
    draft_node: Callable[[Config], dict[str, Any]]
    strategy_node: Callable[[Config, Weights], dict[str, Any]]


def _llama_node(c: Config) -> dict[str, Any]:
    heads = c["num_attention_heads"]
    return {
        "num_layers": c.get("num_hidden_layers", 1),
        "hidden_size": c["hidden_size"],
        "intermediate_size": c["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": c.get("head_dim") or c["hidden_size"] // heads,
        "rms_norm_eps": c.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": c.get("max_position_embeddings", 2048),
        "rope": resolve_rope(dict(c), "the published draft"),
    }


def _qwen3_node(c: Config) -> dict[str, Any]:
    sliding = "sliding_attention" in (c.get("layer_types") or ())
    return {
        **_llama_node(c),
        "layer_types": c.get("layer_types") if sliding else None,
        "sliding_window": c.get("sliding_window") if sliding else None,
    }


def _mla_node(c: Config) -> dict[str, Any]:
    own = {k: c[k] for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    shared = {k: v for k, v in _llama_node({"head_dim": 1, **c}).items() if k not in ("num_kv_heads", "head_dim")}
    return {**shared, **own, "q_lora_rank": c.get("q_lora_rank") or 0}


def _own_ids(c: Config) -> list[int] | None:
    return (c.get("specforge") or {}).get("aux_layer_ids_output_side")


def _eagle3_node(c: Config, weights: Weights) -> dict[str, Any]:
    eagle = c.get("eagle_config") or {}
    ids = _own_ids(c) or eagle.get("eagle_aux_hidden_state_layer_ids") or c.get("eagle_aux_hidden_state_layer_ids")
    return {
        "draft_vocab_size": weights["lm_head.weight"].shape[0],
        "aux_hidden_state_layer_ids": ids,
        "fc_norm": bool(c.get("fc_norm", c.get("use_aux_norm", False))),
        "norm_before_fc": bool(eagle.get("norm_before_fc", c.get("norm_before_fc", False))),
        "norm_output": bool(c.get("norm_output", False)),
        "norm_before_residual": bool(c.get("norm_before_residual", False)),
    }


def _block_node(c: Config, weights: Weights) -> dict[str, Any]:
    nested = c.get("dflash_config") or {}

    def fact(key: str, default: Any = None) -> Any:
        return nested.get(key, c.get(key, default))

    node = {
        "block_size": fact("block_size", 16),
        "mask_token_id": fact("mask_token_id"),
        "aux_hidden_state_layer_ids": _own_ids(c) or fact("target_layer_ids"),
    }
    if fact("projector_type") == "domino":
        node |= {"gru_hidden_size": fact("gru_hidden_dim"), "correction_size": fact("emb_dim")}
    return node


def _dspark_node(c: Config, weights: Weights) -> dict[str, Any]:
    return {
        **_block_node(c, weights),
        "markov_head_type": c.get("markov_head_type", "vanilla"),
        "markov_rank": c["markov_rank"],
        "confidence_head": "confidence_head.proj.weight" in weights,
        "confidence_head_with_markov": bool(c.get("confidence_head_with_markov", True)),
    }


def _eagle3_name(c: Config) -> str:
    return "eagle3"


def _dflash_name(c: Config) -> str:
    return "domino" if (c.get("dflash_config") or {}).get("projector_type", c.get("projector_type")) == "domino" else "dflash"


def _dspark_name(c: Config) -> str:
    return "dspark"


# Serving class -> layout. A plug-in may add its own.
LAYOUTS: dict[str, Layout] = {
    "LlamaForCausalLMEagle3": Layout("llama", _eagle3_name, _EAGLE3_NAMES, _llama_node, _eagle3_node),
    "Eagle3DeepseekV2ForCausalLM": Layout("deepseek_mla", _eagle3_name, _EAGLE3_NAMES, _mla_node, _eagle3_node),
    "DFlashDraftModel": Layout("qwen3", _dflash_name, {}, _qwen3_node, _block_node),
    "Qwen3DSparkModel": Layout("qwen3", _dspark_name, {}, _qwen3_node, _dspark_node),
}
