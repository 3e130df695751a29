"""What SGLang's loaders expect, derived from an exported config.json alone: tensor names and shapes of each serving class.

SGLang drops unknown names and leaves missing ones uninitialised without a word, so an export is checked against this second account
of the layout, which shares no code with the modules that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Shapes = dict[str, tuple[int, ...]]


def _llama_eagle3(config: dict[str, Any]) -> Shapes:
    hidden, target_hidden, k = config["hidden_size"], config["target_hidden_size"], config["num_aux_hidden_states"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    inner, kept = config["intermediate_size"], config["draft_vocab_size"]
    layer: Shapes = {
        "self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "hidden_norm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes: Shapes = {f"midlayer.{n}": s for n, s in layer.items()}
    shapes |= {
        "fc.weight": (hidden, k * target_hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (kept, hidden),
        "d2t": (kept,),
        "t2d": (config["vocab_size"],),
    }
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(k)}
    if config["eagle_config"]["norm_before_fc"]:
        shapes["input_norm.weight"] = (k * target_hidden,)
    return shapes


# Serving class -> its tensors. A class that is not here cannot be checked and is not exported for a server.
LOADERS: dict[str, Callable[[dict[str, Any]], Shapes]] = {"LlamaForCausalLMEagle3": _llama_eagle3}
