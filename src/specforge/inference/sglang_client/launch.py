"""How a server of our own is started: its arguments, its environment, and whether it needs the plug-in at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specforge.errors import ConfigError
from specforge.inference.sglang_client import bare_server
from specforge.inference.sglang_installation import sglang_version
from specforge.inference.sglang_plugin.environment import plugin_environment
from specforge.inference.sglang_plugin.plugin import check_version
from specforge.inference.sglang_plugin.settings import CaptureSettings
from specforge.runtime.contracts import CaptureSpec
from specforge.runtime.data_plane.local import parse_bytes

if TYPE_CHECKING:
    from specforge.inference.target_engine.sglang_base import SGLangTarget

# Decided by other keys of the configuration, or impossible while features are captured.
_OWN = {
    "model_path": "target.path",
    "dtype": "target_backend.dtype",
    "revision": "target.revision",
    "trust_remote_code": "target.trust_remote_code",
    "port": "a free port is taken",
    "host": "servers that we start listen on this machine only",
    "base_gpu_id": "device or target_backend.first_gpu",
}
_IMPOSSIBLE = ("speculative_algorithm", "speculative_draft_model_path", "pp_size", "enable_return_aux_hidden_states", "is_embedding")


def check_server_arguments(arguments: Any, where: str) -> None:
    """Raise :class:`ConfigError` for arguments that other keys decide or that capture cannot work with."""
    if not isinstance(arguments, Mapping):
        return
    problems = []
    for name in arguments:
        plain = str(name).replace("-", "_")
        if plain in _OWN:
            problems.append(f"{where}.{name}: is decided elsewhere ({_OWN[plain]}). Remove it.")
        elif plain in _IMPOSSIBLE:
            problems.append(f"{where}.{name}: features cannot be captured with it; the target serves without a draft, on tensor-parallel "
                            "ranks "
                            "only. Remove it.")
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True)
class LaunchPlan:
    """``server_args`` and ``environment`` are the user's, ``device`` is the trainer's."""

    engine: SGLangTarget
    server_args: Mapping[str, Any]
    user_environment: Mapping[str, str]
    store_bytes: int | str
    device: torch.device

    def arguments(self, spec: CaptureSpec | None, gpu: int | None) -> dict[str, Any]:
        """SGLang's arguments by name, without model path and port. ``gpu`` is the first device that it may take."""
        engine = self.engine
        found: dict[str, Any] = {"dtype": str(engine.dtype).removeprefix("torch."), "trust_remote_code": engine.trust_remote_code or None}
        if self.device.type == "cpu":
            found["device"] = "cpu"
        elif gpu:
            found["base_gpu_id"] = gpu
        if self.device.type == "cuda" and spec is not None:
            found["disable_prefill_cuda_graph"] = True  # its replay runs no hook and drops what a hook would answer
        if self.by_itself(spec):
            assert spec is not None
            found |= bare_server.builtin_arguments(spec, engine.expected(spec))
        return {name: value for name, value in {**found, **self.server_args}.items() if value is not None}

    def environment(self, spec: CaptureSpec | None, folder: Path) -> dict[str, str]:
        """Variables to add to the server's environment; ``folder`` is private to it and holds the store."""
        if self.by_itself(spec):
            return dict(self.user_environment)
        settings = CaptureSettings(
            aux_layer_ids=spec.aux_layer_ids if spec else (),
            final_hidden=bool(spec and spec.final_hidden),
            target_argmax=bool(spec and spec.target_argmax),
            store_path=str(folder / "store") if self.engine.transport == "store" else None,
            store_bytes=parse_bytes(self.store_bytes),
            revision=self.engine.identity.revision,
            ignore_interrupt=True,
        )
        return {**self.user_environment, **plugin_environment(settings, folder, {**os.environ, **self.user_environment})}

    def by_itself(self, spec: CaptureSpec | None) -> bool:
        """Whether SGLang gives ``spec`` without the plug-in. Raises :class:`ConfigError` for an SGLang that is too old."""
        version = check_version(sglang_version(self.user_environment))
        return spec is not None and bare_server.why_plugin(spec, self.engine.transport, version) is None
