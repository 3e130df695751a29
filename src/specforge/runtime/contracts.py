"""The frozen records that cross package borders: what is captured, what a sample's features are, what a batch holds.

Feature names are the same everywhere (design §3): ``input_ids`` [S], ``loss_mask`` [S], ``aux_hidden_states`` [S, K·H],
``final_hidden_states`` [S, H] and, when the engine offers it, ``target_argmax`` [S]. Only :class:`TrainBatch` and
:class:`CapturedFeatures` hold tensors; every other record is metadata and may travel through the control plane.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

INPUT_IDS = "input_ids"
LOSS_MASK = "loss_mask"
AUX_HIDDEN_STATES = "aux_hidden_states"
FINAL_HIDDEN_STATES = "final_hidden_states"
TARGET_ARGMAX = "target_argmax"

FEATURE_FORMAT_VERSION = 1


@dataclass(frozen=True)
class TargetIdentity:
    """Which frozen model made a feature; two identities are equal exactly when features may be mixed."""

    path: str  # as the user named it; provenance only, not compared
    revision: str | None
    config_digest: str
    tokenizer_digest: str
    template_digest: str
    quantization: str | None = None  # what the engine was told to make of the weights; one that the model itself states is in its config

    def differences(self, other: TargetIdentity) -> list[str]:
        """Names and both values of every compared field that differs."""
        return [
            f"{name}: {getattr(self, name)} versus {getattr(other, name)}"
            for name in ("revision", "config_digest", "tokenizer_digest", "template_digest", "quantization")
            if getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True)
class CaptureSpec:
    """What a strategy takes from the target: output-side layer ids (conventions §1), final hidden, dtype."""

    aux_layer_ids: tuple[int, ...]
    final_hidden: bool
    target_argmax: bool
    dtype: str  # "float32", "bfloat16" or "float16"
    post_norm: bool = True  # final hidden is stored after the target's final norm


@dataclass(frozen=True)
class PromptTask:
    """One tokenized sample whose features are wanted. ``loss_mask[i]`` is m[i] of conventions §1."""

    sample_id: str
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


@dataclass(frozen=True)
class FeatureSpec:
    """Name, shape, dtype and checksum (hex of blake2b-128 over the raw bytes) of one stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: str | None


@dataclass(frozen=True)
class SampleRef:
    """Where one sample's features lie and what they are: metadata only, never a tensor."""

    sample_id: str
    store_uri: str
    specs: tuple[FeatureSpec, ...]
    target: TargetIdentity
    capture: CaptureSpec
    num_tokens: int
    num_bytes: int
    attempt: int = 0


@dataclass
class CapturedFeatures:
    """What an engine returns for one sample: unpadded tensors by feature name."""

    sample_id: str
    tensors: dict[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass
class TrainBatch:
    """One micro-batch of one rank.

    ``tensors`` holds, all of leading shape [B, S]: ``input_ids`` (int64), ``loss_mask`` (bool), ``position_ids`` (int64, restarts
    at 0 in each document), ``document_ids`` (int64; −1 is padding; ids are unique within the batch, not only within the row),
    ``aux_hidden_states`` [B, S, K·H], ``final_hidden_states`` [B, S, H] and optionally ``target_argmax`` [B, S] (int64).
    ``sample_ids[d]`` is the sample whose document id is d. A batch without any document is legal: B = 1, S = 1, all padding.
    """

    tensors: dict[str, torch.Tensor]
    sample_ids: tuple[str, ...]
    epoch: int = 0

    def to(self, device: torch.device, non_blocking: bool = False) -> TrainBatch:
        moved = {name: t.to(device, non_blocking=non_blocking) for name, t in self.tensors.items()}
        return TrainBatch(moved, self.sample_ids, self.epoch)


def assert_no_tensors(record: Any, where: str = "control plane") -> None:
    """Raise ``TypeError`` if ``record`` holds a tensor at any depth; called at each entry of the control plane."""
    if isinstance(record, torch.Tensor):
        raise TypeError(f"a tensor of shape {tuple(record.shape)} reached the {where}, which carries metadata only")
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        for f in dataclasses.fields(record):
            assert_no_tensors(getattr(record, f.name), f"{where}, field {f.name}")
    elif isinstance(record, Mapping):
        for key, value in record.items():
            assert_no_tensors(value, f"{where}, key {key}")
    elif isinstance(record, list | tuple | set | frozenset):
        # Token ids are plain integers; looking at the first element keeps this O(1) for long prompts.
        for value in record if len(record) < 64 else list(record)[:1]:
            assert_no_tensors(value, where)


def to_json(record: Any) -> dict[str, Any]:
    """A dataclass of this module as plain JSON types."""
    return dataclasses.asdict(record)


def sample_ref_from_json(data: Mapping[str, Any]) -> SampleRef:
    """The inverse of :func:`to_json` for :class:`SampleRef`."""
    return SampleRef(
        sample_id=data["sample_id"],
        store_uri=data["store_uri"],
        specs=tuple(FeatureSpec(s["name"], tuple(s["shape"]), s["dtype"], s["checksum"]) for s in data["specs"]),
        target=TargetIdentity(**data["target"]),
        capture=capture_spec_from_json(data["capture"]),
        num_tokens=data["num_tokens"],
        num_bytes=data["num_bytes"],
        attempt=data.get("attempt", 0),
    )


def capture_spec_from_json(data: Mapping[str, Any]) -> CaptureSpec:
    """The inverse of :func:`to_json` for :class:`CaptureSpec`."""
    return CaptureSpec(**{**data, "aux_layer_ids": tuple(data["aux_layer_ids"])})


@dataclass(frozen=True)
class StepContext:
    """Where the trainer stands; the only thing besides the batch that a loss may depend on."""

    step: int  # optimizer steps done before this one
    total_steps: int
    epoch: int
    seed: int


@dataclass
class StepOutput:
    """What a strategy returns for one micro-batch (conventions §3).

    ``loss_sum`` is the numerator with gradient, ``weight_sum`` its one denominator (a float64 scalar tensor without gradient).
    ``metrics`` maps a name to (numerator, denominator) tensors of equal shape, summed over micro-batches and ranks before the
    division. ``per_position_accuracy`` and ``step_loss`` have one entry a step, depth or slot.
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
