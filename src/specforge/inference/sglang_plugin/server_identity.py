"""What a server says about itself when a client asks: which model, which layers, which limits; the other half of the handshake."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specforge import __version__
from specforge.errors import SpecForgeError
from specforge.inference.sglang_plugin.settings import CaptureSettings
from specforge.runtime.contracts import CaptureSpec, TargetIdentity


def loaded_target(model_path: str, revision: str | None) -> TargetIdentity | None:
    """The identity of the model that the server loaded, None when its files cannot be found (a remote loader)."""
    from specforge.modeling.target import target_identity

    folder = Path(model_path)
    try:
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model_path, revision=revision, local_files_only=True))
        # The chat template is the client's: features depend on token ids alone.
        return target_identity(folder, revision, "")
    except (SpecForgeError, OSError, ValueError, ImportError):
        return None


def describe(runner: Any, settings: CaptureSettings, capture: CaptureSpec, target: TargetIdentity | None, version: str,
             how: str) -> dict[str, Any]:
    """Plain JSON types. ``runner`` is SGLang's ModelRunner, ``how`` says how the layers were set."""
    config = runner.model_config
    arguments = runner.server_args
    return {
        "specforge": __version__,
        "sglang": version,
        "model_path": str(arguments.model_path),
        "target": None if target is None else {key: value for key, value in asdict(target).items() if key != "template_digest"},
        "architecture": type(runner.model).__name__,
        "aux_layer_ids": list(capture.aux_layer_ids),
        "final_hidden": capture.final_hidden,
        "target_argmax": capture.target_argmax,
        "dtype": capture.dtype,
        "quantization": told_quantization(runner),
        "num_layers": int(config.num_hidden_layers),
        "hidden_size": int(config.hidden_size),
        "context_length": int(config.context_len),
        "deterministic": bool(getattr(arguments, "enable_deterministic_inference", False)),
        "layers_set_by": how,
        "store_path": settings.store_path,
        "inline_bytes": settings.inline_bytes,
    }


def told_quantization(runner: Any) -> str | None:
    """The server's --quantization, None for a model whose own configuration states one: that is in its digest."""
    own = getattr(getattr(runner.model_config, "hf_config", None), "quantization_config", None)
    argument = getattr(runner.server_args, "quantization", None)
    return None if own or argument is None else str(argument)


def probe_store(folder: Path) -> dict[str, str]:
    """A file with a random content in the store's folder: who can read it shares the folder."""
    content = uuid.uuid4().hex
    path = folder / f".probe-{content[:8]}"
    path.write_text(content, encoding="utf-8")
    return {"probe_file": path.name, "probe_content": content}
