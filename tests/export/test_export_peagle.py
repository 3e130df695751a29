"""P-EAGLE exports for vLLM: every tensor and key that its loader reads, the slot convention, every refusal."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from specforge.data.vocabulary_map import VocabularyMap
from specforge.errors import ExportError
from specforge.export.verify import verify_folder
from specforge.export.write import write_export
from specforge.modeling.draft.llama import LlamaDraft
from specforge.training.strategies.peagle import PEagle


def strategy(**changes):
    flags = dict.fromkeys(("fc_norm", "norm_before_fc", "norm_before_residual"), False)
    arguments = {
        "num_depths": 5,
        "down_sample_ratio": 0.8,
        "down_sample_ratio_min": 0.2,
        "mask_token_id": 39,
        "draft_vocab_size": 20,
        "aux_hidden_state_layer_ids": [1, 2, 4],
        **flags,
    }
    return PEagle(**{**arguments, **changes})


def export(tmp_path, architecture, facts, export_format="vllm", num_layers=2, **changes):
    chosen = strategy(**changes)
    layered = LlamaDraft(**{**architecture.plain_config(), "num_layers": num_layers})
    layered.name = architecture.name
    ids = torch.arange(0, 40, 2)
    vocabulary = VocabularyMap(ids - torch.arange(20), torch.zeros(40, dtype=torch.bool).index_fill(0, ids, True), 1.0)
    draft = chosen.build_model(layered, facts, vocabulary, torch.randn(40, 16))
    arguments = {"export_format": export_format, "dtype": torch.float32, "card": {"run": "r"}}
    return draft, write_export(tmp_path / "draft", draft, chosen, layered, facts, **arguments)


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_before_residual": True}, {"norm_before_fc": True}])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_an_export_holds_what_vllm_reads(tmp_path, tiny_architecture, tiny_target_facts, flags, num_layers):
    draft, config = export(tmp_path, tiny_architecture, tiny_target_facts, num_layers=num_layers, **flags)
    assert config == json.loads((tmp_path / "draft/config.json").read_text())
    assert config["architectures"] == ["PEagleDraftModel"] and config["model_type"] == "llama" and config["num_hidden_layers"] == num_layers
    # vLLM counts what enters a layer; ours count what leaves it.
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5] and config["specforge"]["aux_layer_ids_output_side"] == [1, 2, 4]
    assert config["pard_token"] == config["mask_token_id"] == 39 and config["parallel_drafting"] is True and config["num_depths"] == 5
    assert config["specforge"]["slot_convention"]["first_proposal"] == "last_committed_row"
    for key in ("fc_norm", "norm_before_fc", "norm_before_residual"):
        assert config[key] is flags.get(key, False)
    weights = load_file(tmp_path / "draft/model.safetensors")
    assert weights.keys() == draft.state_dict().keys() and "embed_tokens.weight" not in weights
    assert all(weights[name].equal(tensor) for name, tensor in draft.state_dict().items())
    assert weights["mask_hidden"].shape == (1, 1, 48) and weights["layers.0.self_attn.q_proj.weight"].shape[1] == 32
    assert (weights["d2t"] + torch.arange(20)).tolist() == list(range(0, 40, 2))


def test_hf_format_stands_alone(tmp_path, tiny_architecture, tiny_target_facts):
    draft, _ = export(tmp_path, tiny_architecture, tiny_target_facts, export_format="hf")
    assert load_file(tmp_path / "draft/model.safetensors")["embed_tokens.weight"].equal(draft.embedding)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pard_token": 40}, "pard_token is 40, which is no id of the target's embedding .0 to 39"),
        ({"pard_token": None}, "pard_token is None"),
        ({"eagle_aux_hidden_state_layer_ids": [2]}, "does not name one layer for each captured state"),
        ({"num_hidden_layers": 3}, "layers.2.self_attn.q_proj.weight is missing"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be false"),
    ],
)
def test_a_damaged_vllm_export_is_refused_by_name(tmp_path, tiny_architecture, tiny_target_facts, change, message):
    _, config = export(tmp_path, tiny_architecture, tiny_target_facts)
    (tmp_path / "draft/config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ExportError, match=message):
        verify_folder(tmp_path / "draft", tiny_target_facts)


def test_what_no_server_reads_is_refused_with_the_reason(tmp_path, tiny_architecture, tiny_target_facts):
    with pytest.raises(ExportError, match="SGLang 0.5.23 has no loader for P-EAGLE drafts; use format=vllm"):
        export(tmp_path, tiny_architecture, tiny_target_facts, export_format="sglang")
    with pytest.raises(ExportError, match=r"vLLM reads 3 captured layers, this draft has 2: \[1, 3\]"):
        export(tmp_path, tiny_architecture, tiny_target_facts, aux_hidden_state_layer_ids=[1, 3])
    tiny_architecture.name = "unheard_of"
    with pytest.raises(ExportError, match="no class of vLLM is known for draft=unheard_of strategy=peagle. Served architectures: llama"):
        export(tmp_path, tiny_architecture, tiny_target_facts)
    with pytest.raises(ExportError, match="no class that reads draft=unheard_of"):
        export(tmp_path, tiny_architecture, tiny_target_facts, export_format="hf")
    assert list(tmp_path.iterdir()) == []


def test_eagle3_for_vllm_counts_layers_as_vllm_does(tmp_path, make_strategy, make_draft, tiny_architecture, tiny_target_facts):
    chosen = make_strategy(norm_before_residual=True)  # SGLang does not read this flag, vLLM does
    arguments = {"export_format": "vllm", "dtype": torch.float32, "card": {}}
    config = write_export(tmp_path / "e", make_draft(chosen), chosen, tiny_architecture, tiny_target_facts, **arguments)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["norm_before_residual"] is True
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5] and config["specforge"]["aux_layer_ids_output_side"] == [1, 2, 4]
