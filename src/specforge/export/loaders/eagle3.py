"""SGLang's EAGLE-3 classes: ``LlamaForCausalLMEagle3`` and, for latent attention, ``Eagle3DeepseekV2ForCausalLM``."""

from __future__ import annotations

from specforge.export.loaders.registry import Config, Loader, Shapes
from specforge.modeling.target_facts import TargetFacts


def _mlp(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {"mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden), "mlp.down_proj.weight": (hidden, inner)}


def _norms(config: Config) -> Shapes:
    return {f"{name}.weight": (config["hidden_size"],) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}


def _outside(config: Config) -> Shapes:
    """What is not in a layer: fc, norms, head and vocabulary map."""
    hidden, target_hidden, k = config["hidden_size"], config["target_hidden_size"], config["num_aux_hidden_states"]
    kept = config["draft_vocab_size"]
    shapes: Shapes = {"fc.weight": (hidden, k * target_hidden), "norm.weight": (hidden,), "lm_head.weight": (kept, hidden)}
    shapes |= {"d2t": (kept,), "t2d": (config["vocab_size"],)}
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(k)}
    return shapes


def llama_shapes(config: Config) -> Shapes:
    """Layer 0 reads [embedding ; state], later layers the state alone, through ``hidden_norm``: they have no ``input_layernorm``."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["head_dim"]
    shapes: Shapes = {}
    for i in range(config["num_hidden_layers"]):
        width = hidden if i else 2 * hidden
        layer: Shapes = {
            "self_attn.q_proj.weight": (heads * head_dim, width),
            "self_attn.k_proj.weight": (kv_heads * head_dim, width),
            "self_attn.v_proj.weight": (kv_heads * head_dim, width),
            "self_attn.o_proj.weight": (hidden, heads * head_dim),
            **_mlp(config),
            **{n: s for n, s in _norms(config).items() if i == 0 or n != "input_layernorm.weight"},
        }
        shapes |= {f"{f'layers.{i}' if i else 'midlayer'}.{n}": s for n, s in layer.items()}
    shapes |= _outside(config)
    if config["eagle_config"]["norm_before_fc"]:
        shapes["input_norm.weight"] = (config["num_aux_hidden_states"] * config["target_hidden_size"],)
    return shapes


def mla_shapes(config: Config) -> Shapes:
    """Query and latent projections are fused at load, so both must be there; exactly one layer."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    layer: Shapes = {
        "self_attn.q_a_proj.weight": (q_rank, 2 * hidden),
        "self_attn.q_a_layernorm.weight": (q_rank,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, 2 * hidden),
        "self_attn.kv_a_layernorm.weight": (kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
        **_mlp(config),
        **_norms(config),
    }
    return {**{f"midlayer.{n}": s for n, s in layer.items()}, **_outside(config)}


def eagle3_problems(config: Config, target: TargetFacts) -> list[str]:
    """Facts that SGLang takes silently and wrongly."""
    problems = []
    if config.get("tie_word_embeddings") is not False:
        problems.append("tie_word_embeddings must be false, or the server ignores the draft's head")
    if "draft_vocab_size" not in config:
        problems.append("draft_vocab_size is missing")
    return problems


LOADERS = {
    "LlamaForCausalLMEagle3": Loader(llama_shapes, eagle3_problems),
    "Eagle3DeepseekV2ForCausalLM": Loader(mla_shapes, eagle3_problems),
}
