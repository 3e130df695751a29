"""The contract of a feature store, and the checks that every store applies before a feature reaches a batch."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from specforge.errors import FeatureError
from specforge.runtime.contracts import (
    AUX_HIDDEN_STATES,
    FINAL_HIDDEN_STATES,
    INPUT_IDS,
    LOSS_MASK,
    TARGET_ARGMAX,
    CaptureSpec,
    FeatureSpec,
    SampleRef,
    TargetIdentity,
)


class FeatureStore(ABC):
    """Tensors of samples by reference. A sample is pinned from ``put`` or ``pin`` until its ``release``; only others may be evicted.

    Methods may be called from several threads.
    """

    @abstractmethod
    def put(
        self, sample_id: str, tensors: Mapping[str, Tensor], target: TargetIdentity, capture: CaptureSpec, attempt: int = 0
    ) -> SampleRef:
        """Store one sample's unpadded tensors and pin it. Raises :class:`FeatureError` when they are not what ``capture`` says,
        :class:`StoreFullError` when pinned samples leave no room."""

    @abstractmethod
    def get(self, ref: SampleRef) -> dict[str, Tensor]:
        """The tensors of ``ref``, views where the store can give them; read only.

        Raises :class:`FeatureError` when the sample is gone, damaged, or not what ``ref`` says.
        """

    @abstractmethod
    def find(self, sample_id: str) -> SampleRef | None:
        """The reference of a stored sample, or None."""

    def contains(self, sample_id: str) -> bool:
        return self.find(sample_id) is not None

    @abstractmethod
    def pin(self, ref: SampleRef) -> bool:
        """Keep a stored sample from eviction until one more ``release``; False when it is not there any more."""

    @abstractmethod
    def release(self, ref: SampleRef) -> None:
        """Take one pin away; unknown samples are ignored, so that a replayed acknowledgement does no harm."""

    @property
    @abstractmethod
    def bytes_used(self) -> int: ...

    def close(self) -> None:  # noqa: B027 - most stores hold nothing but memory
        """Give back memory and files; refs are void afterwards."""


class StoreFullError(FeatureError):
    """Pinned samples leave no room; more room comes with the next ``release``."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checksum(tensor: Tensor) -> str:
    """Hex of blake2b-128 over the raw bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data if flat.numel() else b"", digest_size=16).hexdigest()


def specs_of(tensors: Mapping[str, Tensor], checksums: bool) -> tuple[FeatureSpec, ...]:
    return tuple(
        FeatureSpec(name, tuple(t.shape), dtype_name(t.dtype), checksum(t) if checksums else None) for name, t in sorted(tensors.items())
    )


def expected_dtypes(capture: CaptureSpec) -> dict[str, str]:
    """Feature name → dtype of everything that ``capture`` asks for."""
    names = {INPUT_IDS: "int64", LOSS_MASK: "bool"}
    if capture.aux_layer_ids:
        names[AUX_HIDDEN_STATES] = capture.dtype
    if capture.final_hidden:
        names[FINAL_HIDDEN_STATES] = capture.dtype
    if capture.target_argmax:
        names[TARGET_ARGMAX] = "int64"
    return names


def check_tensors(sample_id: str, tensors: Mapping[str, Tensor], capture: CaptureSpec) -> int:
    """Names, dtypes and lengths against ``capture``; returns the number of tokens. Raises :class:`FeatureError`."""
    expected = expected_dtypes(capture)
    if set(tensors) != set(expected):
        raise FeatureError(f"sample {sample_id}: features {sorted(tensors)}, but the capture spec asks for {sorted(expected)}")
    length = tensors[INPUT_IDS].shape[0]
    for name, dtype in expected.items():
        tensor = tensors[name]
        if dtype_name(tensor.dtype) != dtype:
            raise FeatureError(f"sample {sample_id}, {name}: dtype {dtype_name(tensor.dtype)}, expected {dtype}")
        if tensor.shape[0] != length:
            raise FeatureError(f"sample {sample_id}, {name}: {tensor.shape[0]} rows, but input_ids has {length}")
    if capture.aux_layer_ids and tensors[AUX_HIDDEN_STATES].shape[1] % len(capture.aux_layer_ids):
        width = tensors[AUX_HIDDEN_STATES].shape[1]
        raise FeatureError(f"sample {sample_id}, aux_hidden_states: width {width} is no multiple of {len(capture.aux_layer_ids)} layers")
    return length


def check_ref(ref: SampleRef, target: TargetIdentity, capture: CaptureSpec, where: str) -> None:
    """Refuse features of another target or another capture, with both values."""
    problems = [f"target {line}" for line in target.differences(ref.target)]
    problems += [
        f"{name}: {getattr(capture, name)} versus {getattr(ref.capture, name)}"
        for name in ("aux_layer_ids", "final_hidden", "target_argmax", "dtype", "post_norm")
        if getattr(capture, name) != getattr(ref.capture, name)
    ]
    if problems:
        raise FeatureError(f"{where} do not belong to this run (this run versus the features): {'; '.join(problems)}")


def check_stored(ref: SampleRef, tensors: Mapping[str, Tensor], checksums: bool) -> None:
    """Refuse tensors that are not those that ``ref`` describes, naming the sample, the tensor and both values."""
    where = f"sample {ref.sample_id} in {ref.store_uri}"
    for spec in ref.specs:
        tensor = tensors.get(spec.name)
        if tensor is None:
            raise FeatureError(f"{where}: {spec.name} is missing")
        if tuple(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
            found = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
            raise FeatureError(f"{where}: {spec.name} is {found}, expected {spec.dtype} {spec.shape}")
        if checksums and spec.checksum is not None and (actual := checksum(tensor)) != spec.checksum:
            raise FeatureError(f"{where}: {spec.name} has checksum {actual}, expected {spec.checksum}; the file is damaged, capture again")
