"""EAGLE-3 exports of every architecture and depth: what is served is read back bit for bit, the rest is refused with the reason."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest
import torch
from safetensors.torch import load_file, save_file

from specforge.config.rules import RULES, Facts
from specforge.data.vocabulary_map import VocabularyMap
from specforge.errors import ExportError
from specforge.export.loaders.registry import Loader, find_loader, register_loader
from specforge.export.published import read_published
from specforge.export.verify import verify_folder
from specforge.export.write import write_export
from specforge.modeling.draft.deepseek_mla import DeepseekMlaDraft
from specforge.modeling.draft.llama import LlamaDraft
from specforge.modeling.draft.qwen3 import Qwen3Draft
from specforge.modeling.target_facts import TargetFacts, resolve_rope

COMMON = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
          "rope": {"rope_type": "default", "rope_theta": 10000.0}, "init_from": "random"}  # fmt: skip
GROUPED = {**COMMON, "num_kv_heads": 2, "head_dim": 4}
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0}
LATENT = {**COMMON, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "rope": YARN}
SERVED = {
    "llama 1": (LlamaDraft(**GROUPED), {}),
    "llama 3": (LlamaDraft(**{**GROUPED, "num_layers": 3}), {"norm_before_fc": True}),
    "mla": (DeepseekMlaDraft(**LATENT), {}),
    "mla 3.1": (DeepseekMlaDraft(**{**LATENT, "rope": COMMON["rope"]}), {"fc_norm": True, "norm_output": True}),
}
served = pytest.mark.parametrize("name", SERVED)


@pytest.fixture
def written(tmp_path, make_strategy, tiny_target_facts):
    """``written(architecture, **strategy keys)`` exports a random draft: (folder, strategy, draft, config)."""

    def write(architecture, export_format="sglang", **changes):
        torch.manual_seed(0)
        strategy = make_strategy(**changes)
        draft = strategy.build_model(architecture, tiny_target_facts, VocabularyMap.identity(40), torch.randn(40, 16))
        config = write_export(tmp_path / "draft", draft, strategy, architecture, tiny_target_facts, export_format=export_format,
                              dtype=torch.float32, card={})  # fmt: skip
        return tmp_path / "draft", strategy, draft, config

    return write


@served
@pytest.mark.parametrize("export_format", ["sglang", "hf"])
def test_what_is_served_is_read_back(name, export_format, written, tiny_target_facts) -> None:
    architecture, flags = SERVED[name]
    folder, strategy, draft, config = written(architecture, export_format, **flags)
    assert config["architectures"] == [strategy.serving_classes[architecture.name]]
    published = read_published(folder)
    assert published.layout.architecture == architecture.name and published.strategy == "eagle3"
    assert published.draft_node() == {k: v for k, v in architecture.plain_config().items() if k != "init_from"}
    other = strategy.build_model(architecture, tiny_target_facts, VocabularyMap.identity(40), draft.embedding)
    published.load_into(other, types.SimpleNamespace(architecture=architecture, strategy=strategy))
    assert all(a.equal(b) for a, b in zip(other.state_dict().values(), draft.state_dict().values(), strict=True))


def test_later_layers_have_the_names_and_widths_of_the_server(written) -> None:
    """SGLang builds layers.1 on the state alone and norms it by hidden_norm; an input_layernorm there would be read into nothing."""
    folder, *_ = written(SERVED["llama 3"][0])
    weights = load_file(folder / "model.safetensors")
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (16, 32) and weights["layers.1.self_attn.q_proj.weight"].shape == (16, 16)
    assert {n for n in weights if n.startswith("layers.2.") and "norm" in n} == {
        "layers.2.hidden_norm.weight",
        "layers.2.post_attention_layernorm.weight",
    }
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3


def test_a_latent_export_states_what_the_server_reads(written, tiny_target_facts) -> None:
    folder, *_, config = written(SERVED["mla"][0], fc_norm=True)
    keys = (
        "model_type",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "num_hidden_layers",
        "fc_norm",
    )
    assert [config[k] for k in keys] == ["deepseek_v3", 12, 10, 6, 4, 5, 1, True]
    assert config["rope_theta"] == config["rope_scaling"]["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e4
    assert resolve_rope(config) == YARN and config["max_position_embeddings"] == 64 and config["eagle_config"]["use_aux_hidden_state"]
    weights = load_file(folder / "model.safetensors")
    # Rows of the fused projections: latent before rope key; per head nope before rope, key before value.
    assert weights["midlayer.self_attn.kv_a_proj_with_mqa.weight"].shape == (10 + 4, 32)
    assert weights["midlayer.self_attn.q_b_proj.weight"].shape == (4 * (6 + 4), 12)
    assert weights["midlayer.self_attn.kv_b_proj.weight"].shape == (4 * (6 + 5), 10)
    save_file({n: t for n, t in weights.items() if "q_a_proj" not in n}, folder / "model.safetensors")
    with pytest.raises(ExportError, match=r"midlayer.self_attn.q_a_proj.weight is missing \(expected \[12, 32\]\)"):
        verify_folder(folder, tiny_target_facts)


def test_an_exported_latent_config_builds_the_target_familys_own_attention(written) -> None:
    """transformers reads the config.json; its attention on the exported weights gives our scores (layer input 2H wide)."""
    from transformers import AutoConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    from specforge.ops.attention import plain_attention

    folder, _, draft, _ = written(SERVED["mla"][0])
    config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
    theirs = DeepseekV3Attention(config, 0)
    theirs.q_a_proj, theirs.kv_a_proj_with_mqa = torch.nn.Linear(32, 12, bias=False), torch.nn.Linear(32, 14, bias=False)
    prefix = "midlayer.self_attn."
    weights = load_file(folder / "model.safetensors")
    theirs.load_state_dict({n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)})
    x, positions = torch.randn(1, 7, 32), torch.arange(30, 37)[None]
    ours = draft.midlayer.self_attn
    rope, visible = draft.rotary(positions, torch.float32), torch.ones(7, 7, dtype=torch.bool).tril()
    o, _ = plain_attention(ours.queries(x, rope), *ours.keys_values(x, rope), visible[None], ours.facts.scale)
    mask = torch.where(visible, 0.0, float("-inf"))[None, None]
    expected = theirs(x, DeepseekV3RotaryEmbedding(config)(x, positions), mask)[0]
    torch.testing.assert_close(ours.output(o), expected, rtol=1e-4, atol=1e-4)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
REFUSED = {
    "qwen3": (Qwen3Draft(**GROUPED, layer_types=None, sliding_window=None), {}, "would drop the norms on queries and keys"),
    "mla direct": (DeepseekMlaDraft(**{**LATENT, "q_lora_rank": 0}), {}, "draft.q_lora_rank=0 .* is not read by SGLang's MLA draft"),
    "mla 2": (DeepseekMlaDraft(**{**LATENT, "num_layers": 2}), {}, "has one layer, this one draft.num_layers=2"),
    "mla llama3": (DeepseekMlaDraft(**{**LATENT, "rope": LLAMA3}), {}, "rope_type=llama3 would be served as YaRN"),
    "mla norm": (DeepseekMlaDraft(**LATENT), {"norm_before_fc": True}, "norm_before_fc=true is read by SGLang for draft=llama only"),
    "residual": (LlamaDraft(**GROUPED), {"norm_before_residual": True}, "norm_before_residual=true is not read by SGLang"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_and_said_at_composition(name, written, make_strategy, tmp_path, tiny_target_facts) -> None:
    architecture, changes, reason = REFUSED[name]
    with pytest.raises(ExportError, match=reason):
        written(architecture, **changes)
    assert list(tmp_path.iterdir()) == []
    strategy = make_strategy(**changes)
    node = {"_target_": "specforge.training.strategies.eagle3.Eagle3", **dataclasses.asdict(strategy.flags)}
    config = {"draft": architecture.plain_config(), "strategy": node, "target": {}}
    choices = {"draft": architecture.name, "strategy": "eagle3"}
    (warning,) = _warnings(config, choices, tiny_target_facts)
    assert "export format=sglang" in warning


@served
def test_what_is_served_composes_without_a_warning(name, make_strategy, tiny_target_facts) -> None:
    architecture, changes = SERVED[name]
    flags = dataclasses.asdict(make_strategy(**changes).flags)
    config = {"draft": architecture.plain_config(), "strategy": {"_target_": "specforge.training.strategies.eagle3.Eagle3", **flags}}
    assert _warnings(config, {"draft": architecture.name, "strategy": "eagle3"}, tiny_target_facts) == []


def _warnings(config: dict, choices: dict, facts: TargetFacts) -> list[str]:
    served_rule = next(r for r in RULES if r.id == "served_by_sglang")
    message = served_rule.find(Facts(config, choices, facts))
    return [message] if message else []


def test_a_plug_in_registers_its_own_loader(monkeypatch) -> None:
    from specforge.export.loaders import registry

    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(ExportError, match="no loader table for MyDraft; known: DFlashDraftModel, Eagle3DeepseekV2ForCausalLM, Llama"):
        find_loader("MyDraft")
    mine = Loader(lambda config: {"w": (config["hidden_size"],)})
    register_loader("MyDraft", mine)
    assert find_loader("MyDraft") is mine and mine.problems({}, None) == [] and mine.shapes({"hidden_size": 3}) == {"w": (3,)}
