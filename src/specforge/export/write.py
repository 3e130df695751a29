"""Write a draft as a folder that a server or transformers-style code loads, then check the folder before it gets its name."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from specforge import __version__
from specforge.errors import ExportError, RunError
from specforge.export.verify import verify_folder
from specforge.export.weight_map import exported_tensors
from specforge.modeling.draft.base import DraftArchitecture
from specforge.modeling.target_facts import TargetFacts
from specforge.training.strategies.base import DraftTrainStrategy

ExportFormat = Literal["sglang", "hf", "vllm"]
FORMATS: tuple[str, ...] = ("sglang", "hf", "vllm")
EMBEDDING = "embed_tokens.weight"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_export(
    folder: Path,
    model: nn.Module,
    strategy: DraftTrainStrategy,
    architecture: DraftArchitecture,
    target: TargetFacts,
    *,
    export_format: str,
    dtype: torch.dtype,
    card: dict[str, Any],
    tokenizer_folder: Path | None = None,
) -> dict[str, Any]:
    """Write and verify; the folder appears only when all checks passed. An existing export of ours is replaced.

    ``sglang``, ``vllm``: the weights a server reads. ``hf``: those and the embedding and tokenizer, so that the folder stands alone.
    Raises :class:`ExportError`; :class:`RunError` when the disk is full.
    """
    check_output(folder, export_format)
    if export_format == "vllm" and architecture.name not in strategy.vllm_classes:
        known = ", ".join(strategy.vllm_classes) or "none"
        raise ExportError(
            f"format=vllm: no class of vLLM is known for draft={architecture.name} strategy={strategy.name}. Served architectures: {known}."
        )
    outer = strategy.outer_export(architecture, target, export_format)
    tensors = exported_tensors(model, outer, architecture, dtype)
    if export_format == "hf":
        tensors[EMBEDDING] = model.embedding.to(dtype).cpu().contiguous()  # type: ignore[union-attr,operator]
    config = {
        "architectures": [outer.serving_class],
        **architecture.config_fields(),
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids) if len(target.eos_token_ids) > 1 else next(iter(target.eos_token_ids), None),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **outer.config,
    }
    staging = folder.parent / f".partial-{folder.name}-{uuid.uuid4().hex[:8]}"
    try:
        staging.mkdir(parents=True)
        _write(staging, tensors, config, {"format": export_format, "specforge": __version__, **card})
        if export_format == "hf" and tokenizer_folder is not None:
            _copy_tokenizer(tokenizer_folder, staging)
        try:
            verify_folder(staging, target, allowed_extra=(EMBEDDING,) if export_format == "hf" else ())
        except ExportError as error:
            raise ExportError(str(error).replace(str(staging), str(folder))) from None
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(staging, folder)
    except OSError as error:
        what = "disk full" if error.errno in _FULL else f"{error.filename or 'a file'} could not be written ({error.strerror or error})"
        raise RunError(
            f"{what} while exporting to {folder}; nothing half-written is left and an earlier export is as it was. "
            "Free some space or name another output, and start the same command again."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return config


def check_output(folder: Path, export_format: str) -> None:
    """Raise :class:`ExportError` for an unknown format or a folder that holds something else than an export of ours."""
    if export_format not in FORMATS:
        raise ExportError(f"format={export_format}: unknown; allowed are {', '.join(FORMATS)}.")
    if folder.is_dir() and not (folder / "specforge_export.json").is_file() and any(folder.iterdir()):
        raise ExportError(f"output={folder}: exists and is not an export of ours; name another folder.")
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"output={folder}: is a file; name a folder.")


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], card: dict[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # it hides the operating system's error in its text
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "specforge_export.json").write_text(json.dumps(card, indent=2, default=str) + "\n")


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in (
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    ):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
