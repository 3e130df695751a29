"""What vLLM's EAGLE-3 Llama class reads of a P-EAGLE draft (its name there: PEagleDraftModel), derived from config.json alone.

From the class's loader: ``layers.0`` takes the two-fold width, names get the prefix ``model.``, ``mask_hidden`` goes into a buffer of three
captured layers, ``t2d`` is skipped, and an absent embedding is the target's.
"""

from __future__ import annotations

from specforge.export.loaders.eagle3 import eagle3_problems
from specforge.export.loaders.registry import Config, Loader, Shapes
from specforge.modeling.target_facts import TargetFacts


def peagle_shapes(config: Config) -> Shapes:
    """Every tensor by name."""
    hidden, target_hidden, k = config["hidden_size"], config["target_hidden_size"], config["num_aux_hidden_states"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    inner = config["intermediate_size"]
    shapes: Shapes = {}
    for i in range(config["num_hidden_layers"]):
        width = hidden if i else 2 * hidden
        shapes |= {
            f"layers.{i}.self_attn.q_proj.weight": (heads * head_dim, width),
            f"layers.{i}.self_attn.k_proj.weight": (kv_heads * head_dim, width),
            f"layers.{i}.self_attn.v_proj.weight": (kv_heads * head_dim, width),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
        }
    shapes |= {
        "layers.0.hidden_norm.weight": (hidden,),
        "fc.weight": (hidden, k * target_hidden),
        "mask_hidden": (1, 1, k * target_hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        "d2t": (config["draft_vocab_size"],),
        "t2d": (config["vocab_size"],),
    }
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(k)}
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (k * target_hidden,)
    return shapes


def peagle_problems(config: Config, target: TargetFacts) -> list[str]:
    """As for EAGLE-3, and the keys of parallel drafting."""
    problems = eagle3_problems(config, target)
    mask = config.get("pard_token")
    if not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        problems.append(f"pard_token is {mask}, which is no id of the target's embedding (0 to {target.vocab_size - 1})")
    if len(config.get("eagle_aux_hidden_state_layer_ids") or ()) != config["num_aux_hidden_states"]:
        problems.append("eagle_aux_hidden_state_layer_ids does not name one layer for each captured state")
    return problems


LOADERS = {"PEagleDraftModel": Loader(peagle_shapes, peagle_problems)}
