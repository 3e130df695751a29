"""One sample's features as one safetensors file: written in a single pass, read as memory-mapped views, its reference in the header."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specforge.errors import FeatureError, RunError
from specforge.runtime.contracts import FEATURE_FORMAT_VERSION, SampleRef, sample_ref_from_json, to_json

_DTYPES = {torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.bool: "BOOL"}
_REFERENCE, _VERSION = "reference", "format_version"


def write_sample(path: Path, ref: SampleRef, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` (host memory) to ``path``. Raises :class:`RunError` when the disk is full; what was written is removed."""
    # The widest elements first keeps every tensor aligned, as readers that map the file expect.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    flat = {name: tensors[name].detach().contiguous().reshape(-1).view(torch.uint8) for name in order}
    header: dict[str, object] = {
        "__metadata__": {_VERSION: str(FEATURE_FORMAT_VERSION), _REFERENCE: json.dumps(to_json(ref))},
    }
    offset = 0
    for name in order:
        end = offset + flat[name].numel()
        header[name] = {"dtype": _DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb", buffering=0) as file:
            _write_all(file.fileno(), len(text).to_bytes(8, "little") + text)
            for name in order:
                if flat[name].numel():
                    _write_all(file.fileno(), flat[name].numpy().data)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        raise RunError(f"disk full while writing features of sample {ref.sample_id} to {path.parent}. Free some space or name another "
                       "folder, and start again") from error


def read_reference(path: Path) -> SampleRef | None:
    """The reference in a file's header, ``None`` when there is no such file. Raises :class:`FeatureError` for a damaged one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        if metadata.get(_VERSION) != str(FEATURE_FORMAT_VERSION):
            raise FeatureError(f"{path}: feature format version {metadata.get(_VERSION)}, this release reads {FEATURE_FORMAT_VERSION}; "
                               "remove the folder and capture again")
        return sample_ref_from_json(json.loads(metadata[_REFERENCE]))
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise FeatureError(f"{path} is damaged or cut short ({error}); remove it and capture again") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors as views of the mapped file, which stay valid when the file is removed. Raises :class:`FeatureError`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError:
        raise FeatureError(f"{path} is gone: evicted, released by another process, or never written; capture again") from None
    except (SafetensorError, OSError) as error:
        raise FeatureError(f"{path} is damaged or cut short ({error}); remove it and capture again") from error


def _write_all(file: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        # A single call writes at most 2 GiB.
        rest = rest[os.write(file, rest[: 1 << 30]) :]
