"""From a frozen run to a target engine on a device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from specforge.errors import ConfigError
from specforge.inference.target_engine.base import TargetEngine, resolve_dtype


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


def build_engine(config: dict[str, Any], device: torch.device) -> TargetEngine:
    """The engine of ``config['target_backend']`` for the target that the front end resolved (``target.resolved_path``)."""
    from specforge.config.build import build
    from specforge.data.chat_template import read_template
    from specforge.modeling.target import target_identity

    folder = Path(config["target"]["resolved_path"])
    template = read_template(config["data"].get("chat_template"))
    return build(
        config["target_backend"],
        expects=TargetEngine,  # type: ignore[type-abstract]
        plugins=config.get("plugins") or (),
        target_folder=folder,
        device=device,
        identity=target_identity(folder, config["target"].get("revision"), template),
        trust_remote_code=bool(config["target"].get("trust_remote_code")),
    )


def capture_dtype(config: dict[str, Any], device: torch.device) -> str:
    """The dtype that features are captured in: the engine's own, so that capturing loses nothing and offline equals colocated."""
    return str(resolve_dtype(config["target_backend"].get("dtype", "auto"), device)).removeprefix("torch.")
