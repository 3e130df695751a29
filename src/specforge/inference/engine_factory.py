"""From a frozen run to a target engine on a device."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from specforge.errors import ConfigError
from specforge.inference.target_engine.base import TargetEngine, resolve_dtype
from specforge.modeling.target_facts import TargetFacts
from specforge.runtime.contracts import TargetIdentity


def resolve_device(name: str) -> torch.device:
    """``auto`` is this process's CUDA device if there is one, else the CPU; raises :class:`ConfigError` for a device that is absent."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name}: not a device; allowed are auto, cpu, cuda, cuda:<index>") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", "0")) % max(1, count)
        if index >= count:
            raise ConfigError(f"device={name}: this machine shows {count} CUDA devices. Use device=cpu or device=auto")
        return torch.device("cuda", index)
    return device


def configured_identity(config: dict[str, Any]) -> TargetIdentity:
    """The target of a run, with the chat template and the template's arguments that the run uses: the one home of this digest."""
    import json

    from specforge.data.chat_template import read_template
    from specforge.modeling.target import target_identity

    data = config["data"]
    template, arguments = read_template(data.get("chat_template")), data.get("template_arguments")
    folder = config["target"]["resolved_path"]
    identity = target_identity(folder, config["target"].get("revision"), template)
    told = (config.get("target_backend") or {}).get("server_args") or {}
    identity = dataclasses.replace(identity, quantization=told_quantization(TargetFacts.from_folder(folder).raw, told.get("quantization")))
    if not arguments:
        return identity
    digest = hashlib.blake2b((identity.template_digest + json.dumps(arguments, sort_keys=True)).encode(), digest_size=16).hexdigest()
    return dataclasses.replace(identity, template_digest=digest)


def told_quantization(model_config: dict[str, Any], argument: str | None) -> str | None:
    """The quantization that an engine's argument adds; None for a model whose own config.json states one, since that is in its digest."""
    return None if model_config.get("quantization_config") or argument is None else str(argument)


def build_engine(config: dict[str, Any], device: torch.device) -> TargetEngine:
    """The engine of ``config['target_backend']`` for the target that the front end resolved (``target.resolved_path``)."""
    from specforge.config.build import build

    folder = Path(config["target"]["resolved_path"])
    return build(
        config["target_backend"],
        expects=TargetEngine,  # type: ignore[type-abstract]
        plugins=config.get("plugins") or (),
        target_folder=folder,
        device=device,
        identity=configured_identity(config),
        trust_remote_code=bool(config["target"].get("trust_remote_code")),
    )


def capture_dtype(config: dict[str, Any], device: torch.device) -> str:
    """The dtype that features are captured in: the engine's own, so that capturing loses nothing and offline equals colocated."""
    return str(resolve_dtype(config["target_backend"].get("dtype", "auto"), device)).removeprefix("torch.")
