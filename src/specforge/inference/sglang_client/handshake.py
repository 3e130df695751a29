"""Before a server gets work it says what it is, and a server that is not what this run needs is refused by name.

With the plug-in, the server answers a marked request with its model's digests, its layers and its limits: the answer takes the way that
features take, so it proves that way too. Without it, only the model's path and a comparison of features are left (``bare_server``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specforge.errors import TargetError
from specforge.inference.sglang_client.calls import plugin_answer
from specforge.inference.sglang_client.endpoint import Endpoint
from specforge.inference.sglang_plugin.marks import Transport, identity_rid
from specforge.inference.sglang_plugin.plugin import check_version
from specforge.inference.sglang_plugin.settings import ENVIRONMENT_VARIABLE
from specforge.runtime.contracts import CaptureSpec, TargetIdentity

_IDENTITY_SECONDS = 120.0  # a first request may compile kernels


@dataclass(frozen=True)
class Expected:
    """What this run needs of a server. ``spec`` is None when it only generates."""

    target: TargetIdentity
    architecture: str
    num_layers: int
    hidden_size: int
    spec: CaptureSpec | None
    transport: Transport


def ask(endpoint: Endpoint) -> dict[str, Any] | None:
    """What the plug-in of a server says, None when it has none. Raises :class:`ServerUnreachable`."""
    body = {"input_ids": [1], "rid": identity_rid(), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    said = plugin_answer(endpoint.generate(body, _IDENTITY_SECONDS))
    return said if said is not None and said.get("status") == "identity" else None


def check(said: dict[str, Any], expected: Expected, server: str) -> None:
    """Raise :class:`TargetError` with every difference and both values, unless ``said`` is what ``expected`` needs."""
    problems = _target_problems(said, expected)
    if expected.spec is not None:
        problems += _capture_problems(said, expected.spec) + _transport_problems(said, expected.transport)
    if problems:
        raise TargetError(f"{server} is not the server that this run needs (server versus this run): {'; '.join(problems)}")


def _target_problems(said: dict[str, Any], expected: Expected) -> list[str]:
    check_version(str(said["sglang"]))
    problems = []
    target = said.get("target")
    if target is None:
        if Path(said["model_path"]).name != Path(expected.target.path).name:
            problems.append(f"model path {said['model_path']} versus {expected.target.path} (target.path)")
    else:
        for key, meaning in (("config_digest", "model files"), ("tokenizer_digest", "tokenizer files")):
            if target[key] != getattr(expected.target, key):
                problems.append(f"{meaning} of {said['model_path']}: digest {target[key]} versus {getattr(expected.target, key)} of "
                                f"{expected.target.path} (target.path)")
        if None not in (target["revision"], expected.target.revision) and target["revision"] != expected.target.revision:
            problems.append(f"revision {target['revision']} versus target.revision={expected.target.revision}")
    if said.get("quantization") != expected.target.quantization:
        problems.append(f"quantization {said.get('quantization')} versus {expected.target.quantization} "
                        "(target_backend.server_args.quantization; --quantization of the server)")
    for key in ("num_layers", "hidden_size"):
        if said[key] != getattr(expected, key):
            problems.append(f"{key} {said[key]} versus {getattr(expected, key)}")
    return problems


def _capture_problems(said: dict[str, Any], spec: CaptureSpec) -> list[str]:
    problems = []
    if list(said["aux_layer_ids"]) != list(spec.aux_layer_ids):
        problems.append(f"captured layers {said['aux_layer_ids']} versus {list(spec.aux_layer_ids)} (aux_layer_ids in "
                        f"{ENVIRONMENT_VARIABLE} of "
                        "the server, output-side)")
    if spec.final_hidden and not (said["final_hidden"] and spec.post_norm):
        problems.append(f"final hidden state {'after the norm only' if said['final_hidden'] else 'not captured'} versus wanted "
                        f"{'after' if spec.post_norm else 'before'} the norm")
    if said["dtype"] != spec.dtype:
        problems.append(f"dtype {said['dtype']} versus {spec.dtype} (target_backend.dtype; --dtype of the server)")
    return problems


def _transport_problems(said: dict[str, Any], transport: Transport) -> list[str]:
    if transport == "inline":
        return []
    if said.get("store_path") is None:
        return [f"no store_path in {ENVIRONMENT_VARIABLE} versus target_backend.transport=store; set it there, or use transport=inline"]
    probe = Path(said["store_path"]) / said["probe_file"]
    try:
        seen = probe.read_text(encoding="utf-8")
    except OSError:
        seen = None
    if seen != said["probe_content"]:
        return [f"store_path {said['store_path']} is not the same folder on this machine; name a shared one, or use "
                "target_backend.transport=inline"]
    return []
