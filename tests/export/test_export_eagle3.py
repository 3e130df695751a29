"""Exports against an account of the loader that shares no code with them; import of what was exported; every refusal."""

from __future__ import annotations

import json
import types

import pytest
import torch
from safetensors.torch import load_file, save_file

from specforge.errors import ExportError
from specforge.export.published import read_published
from specforge.export.verify import verify_folder
from specforge.export.write import write_export

KEPT = range(0, 40, 2)


def export(tmp_path, make_strategy, make_draft, architecture, facts, *, export_format="sglang", dtype=torch.float32, name="draft", **flags):
    strategy = make_strategy(draft_vocab_size=len(KEPT), **flags)
    draft = make_draft(strategy, KEPT)
    config = write_export(
        tmp_path / name, draft, strategy, architecture, facts, export_format=export_format, dtype=dtype, card={"run": "r"}
    )
    return strategy, draft, config


FLAGS = [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}]


@pytest.mark.parametrize("flags", FLAGS)
def test_an_export_holds_what_the_loader_reads(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts, flags):
    _, draft, config = export(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts, **flags)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 20
    assert config["tie_word_embeddings"] is False and config["rope_theta"] == 10000.0
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert [config[k] for k in ("fc_norm", "norm_output")] == [flags.get("fc_norm", False), flags.get("norm_output", False)]
    weights = load_file(tmp_path / "draft/model.safetensors")
    ids = weights["d2t"] + torch.arange(20)
    assert ids.tolist() == list(KEPT) and "embed_tokens.weight" not in weights
    assert weights["midlayer.self_attn.q_proj.weight"].equal(draft.midlayer.self_attn.q_proj.weight)


@pytest.mark.parametrize("flags", FLAGS)
def test_what_was_exported_is_read_back_to_the_same_draft(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts, flags):
    strategy, draft, _ = export(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts, **flags)
    published = read_published(tmp_path / "draft")
    node = published.strategy_node()
    assert node == {
        "draft_vocab_size": 20,
        "aux_hidden_state_layer_ids": [1, 2, 4],
        **{k: getattr(strategy.flags, k) for k in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")},
    }
    assert {k: v for k, v in tiny_architecture.plain_config().items() if k != "init_from"} == published.draft_node()
    assert published.vocabulary(40).target_ids.tolist() == list(KEPT)
    other = make_draft(strategy, KEPT, seed=5)
    published.load_into(other, types.SimpleNamespace(architecture=tiny_architecture, strategy=strategy))
    assert all(a.equal(b) for a, b in zip(other.state_dict().values(), draft.state_dict().values(), strict=True))


def test_legacy_names_and_prefixes_are_read(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts):
    strategy, draft, config = export(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts, fc_norm=True)
    weights = load_file(tmp_path / "draft/model.safetensors")
    old = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high", "midlayer.": "layers.0."}
    renamed = {}
    for name, tensor in weights.items():
        for ours, theirs in old.items():
            name = name.replace(ours, theirs)
        renamed[name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}"] = tensor
    save_file(renamed, tmp_path / "draft/model.safetensors")
    assert read_published(tmp_path / "draft").weights.keys() == draft.state_dict().keys()


def test_hf_format_stands_alone_and_dtype_is_written(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts):
    _, draft, config = export(
        tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts, export_format="hf", dtype=torch.bfloat16
    )
    weights = load_file(tmp_path / "draft/model.safetensors")
    assert weights["embed_tokens.weight"].equal(draft.embedding.bfloat16()) and config["torch_dtype"] == "bfloat16"
    assert weights["fc.weight"].dtype == torch.bfloat16 and weights["d2t"].dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, c: w.pop("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
        (
            lambda w, c: w.update({"midlayer.self_attn.q_norm.weight": torch.ones(4)}),
            r"q_norm.weight \[4\] is unknown to LlamaForCausalLMEagle3",
        ),
        (lambda w, c: w.update({"lm_head.weight": torch.ones(40, 16)}), r"lm_head.weight has shape \[40, 16\], .* expects \[20, 16\]"),
        (lambda w, c: c.update(max_position_embeddings=32), "max_position_embeddings 32 is below the target's 64"),
        (lambda w, c: c.update(rope_theta=1.0), "rope theta differs"),
        (lambda w, c: c.update(tie_word_embeddings=True), "tie_word_embeddings must be false"),
    ],
)
def test_a_damaged_export_is_refused_by_name(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts, change, message):
    export(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts)
    folder = tmp_path / "draft"
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(weights, config)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=message):
        verify_folder(folder, tiny_target_facts)


def test_what_sglang_does_not_read_is_refused_and_nothing_is_left(
    tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts
):
    for flags, message in (({"norm_before_residual": True}, "norm_before_residual=true is not read by SGLang"),):
        with pytest.raises(ExportError, match=message):
            export(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts, **flags)
    tiny_architecture.name = "unheard_of"
    with pytest.raises(ExportError, match="no serving class for draft=unheard_of strategy=eagle3"):
        export(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts)
    assert list(tmp_path.iterdir()) == []


def test_an_export_replaces_only_exports(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts):
    for _ in range(2):
        export(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts)
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match="is not an export of ours"):
        export(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts, name="mine")
    assert (other / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ExportError, match="format=gguf: unknown; allowed are sglang, hf"):
        export(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts, export_format="gguf", name="g")


def test_foreign_drafts_are_refused_with_the_keys_to_set(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts):
    export(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts, fc_norm=True)
    strategy = make_strategy(draft_vocab_size=20)
    published = read_published(tmp_path / "draft")
    with pytest.raises(ExportError, match=r"fc_norm.0.weight has no place .*\"fc_norm\": true"):
        published.load_into(make_draft(strategy, KEPT), types.SimpleNamespace(architecture=tiny_architecture, strategy=strategy))
    with pytest.raises(ExportError, match="not ascending ids of the target's 10 tokens"):
        published.vocabulary(10)
    (tmp_path / "draft/config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ExportError, match="architectures is LlamaForCausalLM; drafts that can be read are LlamaForCausalLMEagle3"):
        read_published(tmp_path / "draft")
    with pytest.raises(ExportError, match="no readable config.json"):
        read_published(tmp_path / "nowhere")
