"""Exports of the block strategies: what SGLang's loaders read, nothing missing, nothing unknown, and read back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specforge.data.vocabulary_map import VocabularyMap
from specforge.errors import ExportError
from specforge.export.published import read_published
from specforge.export.verify import verify_folder
from specforge.export.write import write_export
from specforge.modeling.draft.llama import LlamaDraft
from specforge.modeling.draft.qwen3 import Qwen3Draft
from specforge.modeling.target_facts import TargetFacts
from specforge.training.strategies.dflash import DFlash
from specforge.training.strategies.domino import Domino
from specforge.training.strategies.dpace import DPace
from specforge.training.strategies.dspark import DSpark

COMMON = {"num_anchors": 8, "mask_token_id": 5, "aux_hidden_state_layer_ids": [1, 3]}
DFLASH = {**COMMON, "block_size": 4, "loss_decay_gamma": 7.0}
STRATEGIES = {
    "dflash": lambda: DFlash(**DFLASH),
    "dpace": lambda: DPace(**COMMON, block_size=4, weighting="full", alpha=0.5),
    "domino": lambda: Domino(**DFLASH, gru_hidden_size=8, correction_size=6, base_loss_fraction=0.5, candidate_pool_size=0),
    **{
        f"dspark-{kind}": lambda kind=kind: DSpark(
            **DFLASH, markov_head_type=kind, markov_rank=6, confidence_head=kind != "vanilla", confidence_head_with_markov=kind == "rnn",
            ce_weight=0.1, l1_weight=0.9, confidence_weight=1.0,
        )
        for kind in ("vanilla", "gated", "rnn")
    },
}  # fmt: skip


def build(name: str, facts: TargetFacts, cls=Qwen3Draft, **changes):
    node = {"num_layers": 2, "hidden_size": None, "intermediate_size": None, "num_heads": None, "num_kv_heads": None, "head_dim": None,
            "rms_norm_eps": None, "max_position_embeddings": None, "rope": None, "init_from": "random", **changes}  # fmt: skip
    if cls is Qwen3Draft:
        node = {"layer_types": None, "sliding_window": None, **node}
    architecture, strategy = cls(**cls.fill_from_target(node, facts)), STRATEGIES[name]()
    embedding = torch.randn(facts.vocab_size, facts.hidden_size)
    model = strategy.build_model(architecture, facts, VocabularyMap.identity(facts.vocab_size), embedding)
    return strategy, architecture, model


@pytest.fixture
def facts(tiny_target_folder) -> TargetFacts:
    return TargetFacts.from_folder(tiny_target_folder)


def export(folder: Path, name: str, facts: TargetFacts, **changes):
    strategy, architecture, model = build(name, facts, **changes)
    config = write_export(folder, model, strategy, architecture, facts, export_format="sglang", dtype=torch.float32, card={})
    return strategy, model, config


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_export_holds_what_the_loader_reads_and_reads_back(name, facts, tmp_path) -> None:
    strategy, model, config = export(tmp_path / "draft", name, facts)
    assert config["architectures"] == ["Qwen3DSparkModel" if name.startswith("dspark") else "DFlashDraftModel"]
    assert config["dflash_config"]["target_layer_ids"] == [1, 3] and config["dflash_config"]["mask_token_id"] == 5
    assert config["num_target_layers"] == facts.num_layers and config["vocab_size"] == facts.vocab_size
    published = read_published(tmp_path / "draft")
    assert published.strategy == {"dpace": "dflash"}.get(name, name.split("-")[0])
    wanted = {n: t for n, t in model.state_dict().items() if n not in ("d2t", "t2d")}
    assert published.weights.keys() == wanted.keys()
    assert all(torch.equal(published.weights[n], t) for n, t in wanted.items())
    node = published.strategy_node()
    assert (node["block_size"], node["mask_token_id"], node["aux_hidden_state_layer_ids"]) == (4, 5, [1, 3])
    assert published.draft_node()["num_layers"] == 2


def test_sliding_layers_are_stated(facts, tmp_path) -> None:
    _, _, config = export(tmp_path / "draft", "dflash", facts, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    assert (config["layer_types"], config["sliding_window"]) == (["sliding_attention", "full_attention"], 16)


@pytest.mark.parametrize("name", ["dflash", "domino", "dspark-rnn"])
def test_missing_unknown_and_misshaped_tensors_are_named(name, facts, tmp_path) -> None:
    export(tmp_path / "draft", name, facts)
    file = tmp_path / "draft" / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = torch.zeros(2, 2)
    del weights["layers.1.self_attn.q_norm.weight"]
    weights["fc.weight"] = weights["fc.weight"][:, :-1].contiguous()
    save_file(weights, file)
    with pytest.raises(ExportError) as error:
        verify_folder(tmp_path / "draft", facts)
    for part in ("layers.1.self_attn.q_norm.weight is missing", "lm_head.weight [2, 2] is unknown", "fc.weight has shape"):
        assert part in str(error.value)


def test_facts_that_a_server_misreads_are_named(facts, tmp_path) -> None:
    export(tmp_path / "draft", "domino", facts)
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"] |= {"mask_token_id": facts.vocab_size, "target_layer_ids": [1, 77], "shift_label": False}
    path.write_text(json.dumps({**config, "vocab_size": facts.vocab_size}))
    with pytest.raises(ExportError, match=r"mask_token_id 300 lies outside.*target_layer_ids \[77\].*shift_label=true"):
        verify_folder(tmp_path / "draft", facts)


def test_an_architecture_without_a_loader_and_the_last_layer_are_refused(facts, tmp_path) -> None:
    with pytest.raises(ExportError, match="no block loader reads draft=llama strategy=dflash"):
        export(tmp_path / "draft", "dflash", facts, cls=LlamaDraft)
    strategy, architecture, model = build("dflash", facts)
    strategy._layer_ids = [1, facts.num_layers - 1]
    with pytest.raises(Exception, match="is the last of"):
        write_export(tmp_path / "x", model, strategy, architecture, facts, export_format="sglang", dtype=torch.float32, card={})
    assert not (tmp_path / "x").exists()
