"""Facts, embedding, head and identity of a target in every form a checkpoint comes in; RoPE against the target's own module."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from specforge.errors import TargetError
from specforge.modeling.rope import RotaryEmbedding
from specforge.modeling.target import TargetHead, find_tensors, load_embedding, load_final_norm, target_identity
from specforge.modeling.target_facts import TargetFacts, resolve_rope, rope_both_forms


def save_llama(folder, *, tied, shard="5GB", **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
            "tie_word_embeddings": tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
            **changes,
        }
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    return model


@pytest.mark.parametrize(("tied", "shard"), [(True, "5GB"), (False, "5GB"), (False, "12KB")])
def test_embedding_head_and_norm_are_found_and_compute_the_target_logits(tmp_path, tied, shard):
    model = save_llama(tmp_path, tied=tied, shard=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "12KB")
    assert load_embedding(tmp_path, torch.float32).equal(model.get_input_embeddings().weight)
    assert load_final_norm(tmp_path).equal(model.model.norm.weight)
    head, hidden = TargetHead.load(tmp_path, torch.float32), torch.randn(5, 32)
    logits = model.lm_head(hidden)
    assert torch.allclose(head.logits(hidden), logits, atol=1e-6)
    kept = torch.tensor([3, 9, 60])
    assert torch.allclose(head.logits(hidden, kept), logits[:, kept], atol=1e-6)
    assert head.argmax(hidden, tile=7).equal(logits.argmax(-1))


def test_argmax_over_tiles_gives_ties_to_the_lowest_id():
    head = TargetHead(torch.tensor([[0.0], [1.0], [1.0], [1.0]]))
    assert head.argmax(torch.ones(1, 1), tile=2).tolist() == [1]


def test_scale_and_soft_cap_are_the_targets(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        final_logit_softcapping=5.0,
    )
    model = Gemma2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[3, 5, 7]])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        assert torch.allclose(TargetHead.load(tmp_path, torch.float32).logits(hidden), model(ids).logits, atol=1e-5)
    assert torch.allclose(load_embedding(tmp_path, torch.float32), model.get_input_embeddings().weight * 32**0.5)


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(TargetError, match="no config.json"):
        TargetFacts.from_folder(tmp_path)
    save_llama(tmp_path, tied=False)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TargetError, match="model.safetensors cannot be read"):
        load_embedding(tmp_path, torch.float32)
    file.unlink()
    with pytest.raises(TargetError, match="no .*safetensors weights"):
        TargetHead.load(tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in ("hidden_size", "vocab_size")}))
    with pytest.raises(TargetError, match="lacks hidden_size, vocab_size"):
        TargetFacts.from_folder(tmp_path)


def test_identity_sees_config_weights_tokenizer_and_template_and_not_the_place(tmp_path):
    first = tmp_path / "a"
    save_llama(first, tied=True)
    with pytest.raises(TargetError, match="no tokenizer"):
        target_identity(first)
    (first / "tokenizer.json").write_text("{}")
    (first / "chat_template.jinja").write_text("x")
    shutil.copytree(first, tmp_path / "b")
    base = target_identity(first)
    assert base.differences(target_identity(tmp_path / "b")) == []
    (tmp_path / "b/chat_template.jinja").write_text("y")
    assert [d.split(":")[0] for d in base.differences(target_identity(tmp_path / "b"))] == ["template_digest"]
    torch.manual_seed(9)
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(first)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "b")
    assert [d.split(":")[0] for d in base.differences(target_identity(tmp_path / "b"))] == ["config_digest", "template_digest"]


ROPES = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r["rope_type"])
def test_rotation_equals_the_targets_own_module(rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=256, rope_parameters=dict(rope))
    theirs = LlamaRotaryEmbedding(config)
    positions = torch.arange(50)
    cos, sin = theirs(torch.zeros(1), positions[None])
    ours = RotaryEmbedding(resolve_rope(config.to_dict()), 8, 256)(positions, torch.float32)
    assert torch.allclose(ours[0], cos[0, :, :4], atol=1e-6) and torch.allclose(ours[1], sin[0, :, :4], atol=1e-6)


def test_rope_is_resolved_from_both_generations_and_never_guessed():
    scaling = {"rope_type": "yarn", "factor": 4.0}
    old = resolve_rope({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert old == resolve_rope({"rope_parameters": {**scaling, "rope_theta": 1e6}}) == {**scaling, "rope_theta": 1e6}
    assert resolve_rope({"rope_theta": 10000, "rope_scaling": None}) == {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(TargetError, match="states no rope_theta"):
        resolve_rope({"rope_scaling": scaling}, "x")
    both = rope_both_forms(old)
    assert both["rope_theta"] == both["rope_parameters"]["rope_theta"] == 1e6 and both["rope_scaling"] == scaling
    assert resolve_rope(both) == old


def test_text_config_of_a_wrapper_is_found():
    facts = TargetFacts.from_config(
        {
            "model_type": "vlm",
            "text_config": {
                "model_type": "qwen3",
                "hidden_size": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "vocab_size": 10,
                "rope_theta": 1e6,
                "head_dim": 16,
            },
        }
    )
    assert (facts.model_type, facts.head_dim, facts.num_kv_heads) == ("qwen3", 16, 2)


def test_find_tensors_returns_only_what_is_there(tmp_path):
    save_llama(tmp_path, tied=True)
    assert list(find_tensors(tmp_path, ["model.norm.weight", "nothing"])) == ["model.norm.weight"]
