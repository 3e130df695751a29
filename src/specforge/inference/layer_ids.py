"""Layer ids at an engine's border: output-side ids (conventions §1) become what each engine's own interface counts.

Configs, feature files and exports only ever hold output-side ids: ``l`` names the residual stream that decoder layer ``l``
(0 … N−1) gives out. The tables below are read by capture and by export alike, so that the two can never disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from specforge.errors import TargetError

SglangRule = Literal["output_side", "plus_one_if_first_is_one", "raw_if_max_is_num_layers"]
DraftFamily = Literal["eagle3", "dflash"]

# What ``set_eagle3_layers_to_capture`` of a target class does with the list it is given. SGLang counts inputs inside: layer l's
# output is its internal l + 1. Classes that are not listed add 1 to every id, that is, they take output-side ids.
SGLANG_EAGLE3_EXCEPTIONS: dict[str, SglangRule] = {
    "DeepseekV2ForCausalLM": "plus_one_if_first_is_one",
    "DeepseekV3ForCausalLM": "plus_one_if_first_is_one",
    "DeepseekV32ForCausalLM": "plus_one_if_first_is_one",
    "GlmMoeDsaForCausalLM": "plus_one_if_first_is_one",
    "MistralLarge3ForCausalLM": "plus_one_if_first_is_one",
    "KimiK25ForConditionalGeneration": "plus_one_if_first_is_one",
    "Glm4MoeLiteForCausalLM": "plus_one_if_first_is_one",
    "GptOssForCausalLM": "raw_if_max_is_num_layers",
}


def check_layer_ids(layer_ids: Sequence[int], num_layers: int, where: str = "strategy.aux_hidden_state_layer_ids") -> tuple[int, ...]:
    """The ids as a tuple; :class:`TargetError` unless they are ascending, distinct and within 0 … ``num_layers`` − 1."""
    ids = tuple(int(i) for i in layer_ids)
    if any(not 0 <= i < num_layers for i in ids):
        raise TargetError(
            f"{where}={list(ids)}: the target has {num_layers} layers; allowed are output-side ids 0 … {num_layers - 1} "
            "(the output of layer l has id l). Change the list or leave it null for the default of the strategy"
        )
    if list(ids) != sorted(set(ids)):
        raise TargetError(f"{where}={list(ids)}: ids must be distinct and ascending, for example {sorted(set(ids))}")
    return ids


def hf_hidden_states_index(layer_id: int, num_layers: int) -> int:
    """Index into the ``hidden_states`` tuple of transformers; layer N−1 has none, since the last entry is post-norm."""
    check_layer_ids([layer_id], num_layers)
    if layer_id == num_layers - 1:
        raise TargetError(f"layer {layer_id} is the last one: hidden_states of transformers hold it only after the final norm; use a hook")
    return layer_id + 1


def vllm_ids(layer_ids: Sequence[int], num_layers: int) -> list[int]:
    """vLLM counts layer inputs."""
    return [i + 1 for i in check_layer_ids(layer_ids, num_layers)]


def sglang_setter_ids(layer_ids: Sequence[int], num_layers: int, target_class: str, family: DraftFamily = "eagle3") -> list[int]:
    """The list to give to SGLang (setter, or ``eagle_aux_hidden_state_layer_ids`` of an export) so that exactly these layers are hit.

    ``target_class`` is the target's entry in ``architectures``. Raises :class:`TargetError` for ids that SGLang cannot express:
    the last layer, whose output exists only as the input of the final norm, and those that a class's exception swallows.
    """
    ids = list(check_layer_ids(layer_ids, num_layers))
    if num_layers - 1 in ids:
        raise TargetError(
            f"layer {num_layers - 1} is the last of {num_layers}: SGLang cannot capture its output. "
            f"Use ids up to {num_layers - 2} in strategy.aux_hidden_state_layer_ids"
        )
    rule = SGLANG_EAGLE3_EXCEPTIONS.get(target_class, "output_side") if family == "eagle3" else "output_side"
    if rule != "plus_one_if_first_is_one" or not ids or ids[0] == 1:
        return ids
    if ids[0] == 0:
        raise TargetError(
            f"strategy.aux_hidden_state_layer_ids={ids}: SGLang's {target_class} would read the input-side form {[i + 1 for i in ids]} as "
            "output-side ids, because it begins with 1. Begin with any layer but 0"
        )
    return [i + 1 for i in ids]
