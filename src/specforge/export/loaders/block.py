"""SGLang's block drafts: ``DFlashDraftModel`` (DFlash, D-PACE, Domino) and ``Qwen3DSparkModel``. Embedding and head are the target's."""

from __future__ import annotations

from specforge.export.loaders.registry import Config, Loader, Shapes
from specforge.modeling.target_facts import TargetFacts


def _backbone(config: Config) -> Shapes:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: Shapes = {
        "fc.weight": (hidden, len(config["dflash_config"]["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        layer: Shapes = {
            "self_attn.q_proj.weight": (heads * head_dim, hidden),
            "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            "self_attn.o_proj.weight": (hidden, heads * head_dim),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {f"layers.{i}.{n}": s for n, s in layer.items()}
    return shapes


def dflash_shapes(config: Config) -> Shapes:
    """With ``projector_type: domino`` the correction head is read too."""
    shapes, nested = _backbone(config), config["dflash_config"]
    if nested.get("projector_type") == "domino":
        hidden, gru, e = config["hidden_size"], nested["gru_hidden_dim"], nested["emb_dim"]
        shapes |= {
            "prefix_gru.weight_ih_l0": (3 * gru, hidden),
            "prefix_gru.weight_hh_l0": (3 * gru, gru),
            "embed_proj.0.weight": (e, hidden + gru),
            "embed_proj.2.weight": (config["vocab_size"], e),
        }
    return shapes


def dspark_shapes(config: Config) -> Shapes:
    """The head builder reads rank and type from the top level of the config."""
    hidden, rank, vocab = config["hidden_size"], config["markov_rank"], config["vocab_size"]
    shapes = _backbone(config)
    shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (vocab, rank)}
    if config["markov_head_type"] == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    elif config["markov_head_type"] == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden), "markov_head.joint_proj.bias": (3 * rank,)}
    if config["enable_confidence_head"]:
        width = hidden + (rank if config["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def block_problems(config: Config, target: TargetFacts) -> list[str]:
    """Facts that end a server's start or, worse, do not."""
    nested, problems = config["dflash_config"], []
    if config["hidden_size"] != target.hidden_size:
        problems.append(
            f"hidden_size {config['hidden_size']} must be the target's {target.hidden_size}, whose embedding and head it shares"
        )
    if config["vocab_size"] != target.vocab_size:
        problems.append(f"vocab_size {config['vocab_size']} must be the target's {target.vocab_size}")
    if not 0 <= nested["mask_token_id"] < target.vocab_size:
        problems.append(f"mask_token_id {nested['mask_token_id']} lies outside the target's {target.vocab_size} embeddings")
    far = [i for i in nested["target_layer_ids"] if not 0 <= i < target.num_layers]
    if far:
        problems.append(f"target_layer_ids {far} are no layers of a target with {target.num_layers}")
    if nested.get("projector_type") == "domino" and not (nested.get("shift_label") is True and nested.get("pure_draft_prefix_len") == 1):
        problems.append("a Domino draft needs shift_label=true and pure_draft_prefix_len=1")
    if "sliding_attention" in (config.get("layer_types") or ()) and config.get("sliding_window") is None:
        problems.append("layer_types has sliding_attention and sliding_window is missing")
    return problems


LOADERS = {"DFlashDraftModel": Loader(dflash_shapes, block_problems), "Qwen3DSparkModel": Loader(dspark_shapes, block_problems)}
