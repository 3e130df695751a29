"""Each engine's setter, written down as the engine behaves, hits exactly the layers that output-side ids name."""

from __future__ import annotations

import itertools

import pytest

from specforge.errors import TargetError
from specforge.inference.layer_ids import check_layer_ids, hf_hidden_states_index, sglang_setter_ids, vllm_ids

N = 12


def plain_setter(ids):
    return [i + 1 for i in ids]


def deepseek_setter(ids):
    return [i + 1 for i in ids] if ids[0] == 1 else list(ids)


def gpt_oss_setter(ids):
    return list(ids) if max(ids) == N else [i + 1 for i in ids]


SETTERS = {
    "LlamaForCausalLM": plain_setter,
    "Qwen3ForCausalLM": plain_setter,
    "DeepseekV2ForCausalLM": deepseek_setter,
    "DeepseekV3ForCausalLM": deepseek_setter,
    "DeepseekV32ForCausalLM": deepseek_setter,
    "GlmMoeDsaForCausalLM": deepseek_setter,
    "MistralLarge3ForCausalLM": deepseek_setter,
    "KimiK25ForConditionalGeneration": deepseek_setter,
    "Glm4MoeLiteForCausalLM": deepseek_setter,
    "GptOssForCausalLM": gpt_oss_setter,
}


@pytest.mark.parametrize("target_class", SETTERS)
def test_sglang_hits_the_layers_or_refuses(target_class):
    refused = 0
    for ids in itertools.combinations(range(N), 3):
        try:
            given = sglang_setter_ids(ids, N, target_class)
        except TargetError:
            refused += 1
            assert ids[-1] == N - 1 or (SETTERS[target_class] is deepseek_setter and ids[0] == 0)
            continue
        # SGLang counts inputs inside: capturing before layer i gives the output of layer i − 1.
        assert [internal - 1 for internal in SETTERS[target_class](given)] == list(ids)
    assert 0 < refused < 150


def test_dflash_setters_have_no_exceptions():
    assert sglang_setter_ids([0, 5], N, "DeepseekV3ForCausalLM", "dflash") == [0, 5]


@pytest.mark.parametrize("ids", [[-1], [N], [3, 1], [2, 2]])
def test_impossible_ids_are_refused(ids):
    with pytest.raises(TargetError, match="aux_hidden_state_layer_ids"):
        check_layer_ids(ids, N)


def test_hf_and_vllm_count_inputs():
    assert hf_hidden_states_index(0, N) == 1 and vllm_ids([0, 11], N) == [1, 12]
    with pytest.raises(TargetError, match="after the final norm"):
        hf_hidden_states_index(N - 1, N)
