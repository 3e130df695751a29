"""A server without our plug-in: what SGLang itself gives (0.5.23 and newer: auxiliary states, no final hidden), checked by comparison.

Such a server says its model's path and its flags, not its files. So a prompt's features are compared with those of the first layers of
``target.path``, loaded here for the purpose: another model differs in every row, a quantised one only a little.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specforge.errors import FeatureError, TargetError
from specforge.inference.layer_ids import sglang_setter_ids
from specforge.inference.sglang_client.calls import capture_body, check_features, check_finished
from specforge.inference.sglang_client.endpoint import Endpoint
from specforge.inference.sglang_client.handshake import Expected
from specforge.inference.sglang_http import ServerRefused
from specforge.inference.sglang_plugin.marks import Transport
from specforge.inference.sglang_plugin.plugin import version_numbers
from specforge.inference.sglang_plugin.settings import ENVIRONMENT_VARIABLE, CaptureSettings
from specforge.inference.sglang_process import command_line
from specforge.runtime.contracts import AUX_HIDDEN_STATES, INPUT_IDS, CapturedFeatures, CaptureSpec, PromptTask

# Rows of the same model in another precision have a cosine above this, rows of another model are near 0.
LEAST_COSINE = 0.97
_BUILTIN_SINCE = (0, 5, 23)
_PROBE_TOKENS = 24
_ANSWER_SECONDS = 120.0


def why_plugin(spec: CaptureSpec, transport: Transport, version: str | None) -> str | None:
    """Why SGLang's own answers do not suffice for ``spec``; None when they do. A ``version`` of None is not looked at."""
    if spec.final_hidden or spec.target_argmax or not spec.aux_layer_ids:
        return "SGLang itself gives no final hidden states"
    if transport == "store":
        return "SGLang itself answers inline only"
    if version is not None and version_numbers(version) < _BUILTIN_SINCE:
        return f"SGLang {version} gives no hidden states of layers itself"
    return None


def check(endpoint: Endpoint, expected: Expected, folder: Path, trust_remote_code: bool) -> None:
    """Raise :class:`TargetError` unless this server, which has no plug-in, can give what ``expected`` needs and is that model."""
    said = endpoint.information("model_info") or {}
    path = str(said.get("model_path"))
    if Path(path).name not in (folder.name, Path(expected.target.path).name):
        raise TargetError(f"{endpoint.name} serves {path}, this run's target is {expected.target.path} (target.path)")
    spec = expected.spec
    if spec is None:
        return
    if why_plugin(spec, "inline", None) is not None:
        variable = CaptureSettings(spec.aux_layer_ids, spec.final_hidden, spec.target_argmax).to_json()
        raise TargetError(f"{endpoint.name}: the plug-in specforge_capture did not answer, and SGLang itself gives no final hidden "
                          "states. Install "
                          f"specforge beside SGLang and start the server with {ENVIRONMENT_VARIABLE}='{variable}'; its log says if that "
                          "was refused")
    wanted = builtin_arguments(spec, expected)
    flags = endpoint.information("server_info") or {}
    # The algorithm only names the convention of the ids; SGLang moves it to a field of its own.
    method = str(flags.get("aux_hidden_state_capture") or flags.get("speculative_algorithm")).upper()
    given = (method, flags.get("return_aux_hidden_state_layer_ids"))
    needed = (wanted["speculative_algorithm"], wanted["return_aux_hidden_state_layer_ids"])
    if not flags.get("enable_return_aux_hidden_states") or given != needed:
        raise TargetError(f"{endpoint.name} returns auxiliary layers {given[1]} ({given[0]}), this run needs output-side layers "
                          f"{list(spec.aux_layer_ids)}. Start it with {' '.join(command_line(wanted))}")
    _compare(endpoint, spec, folder, trust_remote_code)


def builtin_arguments(spec: CaptureSpec, expected: Expected) -> dict[str, Any]:
    """Server arguments with which SGLang itself returns ``spec``; no draft is loaded. Cached and chunked rows would be left out."""
    ids = sglang_setter_ids(spec.aux_layer_ids, expected.num_layers, expected.architecture)
    return {"enable_return_aux_hidden_states": True, "speculative_algorithm": "EAGLE3", "return_aux_hidden_state_layer_ids": ids,
            "disable_radix_cache": True, "chunked_prefill_size": -1}


def capture(endpoint: Endpoint, task: PromptTask, spec: CaptureSpec, timeout: float) -> CapturedFeatures:
    """Features of one prompt out of ``meta_info.hidden_states``; numbers as text, so for small targets and tests."""
    body = capture_body(task, f"bare-{uuid.uuid4().hex}") | {"return_hidden_states": True}
    answer = endpoint.generate(body, timeout)
    check_finished(answer, f"sample {task.sample_id}")
    rows = (answer.get("meta_info") or {}).get("hidden_states") or [[]]
    states = torch.tensor(rows[0], dtype=getattr(torch, spec.dtype))
    if states.dim() != 2 or len(states) != len(task.input_ids):
        raise FeatureError(f"{endpoint.name}, sample {task.sample_id}: {len(states)} rows of hidden states for {len(task.input_ids)} "
                           "tokens. "
                           "Start the server with --disable-radix-cache --chunked-prefill-size -1")
    tensors = {INPUT_IDS: torch.tensor(task.input_ids, dtype=torch.int64), AUX_HIDDEN_STATES: states}
    return CapturedFeatures(task.sample_id, check_features(tensors, task, spec, endpoint.name))


def _compare(endpoint: Endpoint, spec: CaptureSpec, folder: Path, trust_remote_code: bool) -> None:
    from specforge.modeling.target_facts import TargetFacts

    facts = TargetFacts.from_folder(folder)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(facts.vocab_size, (_PROBE_TOKENS,), generator=generator).tolist()
    try:
        features = capture(endpoint, PromptTask("probe", tuple(ids), tuple(0 for _ in ids)), spec, _ANSWER_SECONDS)
    except ServerRefused as error:
        raise TargetError(f"{endpoint.name} does not return hidden states: {error}") from error
    given = features.tensors[AUX_HIDDEN_STATES][:, : facts.hidden_size].float()
    own = _first_layers(folder, spec.aux_layer_ids[0], ids, trust_remote_code)
    # The first row of many models is one huge outlier whatever the input is.
    cosine = nn.functional.cosine_similarity(given[1:], own[1:], dim=-1).median().item()
    if not cosine >= LEAST_COSINE:
        raise TargetError(f"{endpoint.name}: the output of layer {spec.aux_layer_ids[0]} is not that of {folder} (median cosine "
                          f"{cosine:.3f} over "
                          f"{_PROBE_TOKENS - 1} tokens, at least {LEAST_COSINE} expected): another model, or other layers")


@torch.no_grad()
def _first_layers(folder: Path, layer_id: int, ids: Sequence[int], trust_remote_code: bool) -> Tensor:
    """Output [S, H] of decoder layer ``layer_id``, with no later layer loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layer_id + 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: layer_id + 1]
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the later layers' weights are left out on purpose
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    finally:
        logging.set_verbosity(level)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layer_id + 1)
    kept: list[Tensor] = []
    layers[-1].register_forward_hook(lambda _module, _inputs, output: kept.append(output[0] if isinstance(output, tuple) else output))
    model.eval()(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return kept[0][0].float()

