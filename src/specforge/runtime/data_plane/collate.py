"""Unpadded features of several samples become one :class:`TrainBatch`: one sample a row, or several packed into a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specforge.runtime.contracts import (
    AUX_HIDDEN_STATES,
    FINAL_HIDDEN_STATES,
    INPUT_IDS,
    LOSS_MASK,
    TARGET_ARGMAX,
    CaptureSpec,
    TrainBatch,
)
from specforge.runtime.data_plane.feature_store import expected_dtypes

POSITION_IDS = "position_ids"
DOCUMENT_IDS = "document_ids"
_PADDING = {TARGET_ARGMAX: -1, DOCUMENT_IDS: -1}


@dataclass(frozen=True)
class FeatureLayout:
    """Trailing shape and dtype of each feature, so that a batch without any sample has the same tensors as one with."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    @classmethod
    def of(cls, capture: CaptureSpec, hidden_size: int) -> FeatureLayout:
        widths: dict[str, tuple[int, ...]] = {
            AUX_HIDDEN_STATES: (len(capture.aux_layer_ids) * hidden_size,),
            FINAL_HIDDEN_STATES: (hidden_size,),
        }
        dtypes = {name: getattr(torch, dtype) for name, dtype in expected_dtypes(capture).items()}
        return cls({name: widths.get(name, ()) for name in dtypes}, dtypes)


def collate(
    samples: Sequence[tuple[str, Mapping[str, Tensor]]], rows: Sequence[Sequence[int]], layout: FeatureLayout, epoch: int
) -> TrainBatch:
    """Lay ``samples`` (id, tensors) out in ``rows`` of indices into them; every tensor is [B, S, ...] with S the longest row.

    Documents are numbered through the whole batch in row order. Without any sample the batch is one row of one padding token.
    """
    device = samples[0][1][INPUT_IDS].device if samples else torch.device("cpu")
    lengths = [len(tensors[INPUT_IDS]) for _, tensors in samples]
    num_rows = max(1, len(rows))
    width = max((sum(lengths[i] for i in row) for row in rows), default=0) or 1
    shapes = {**layout.shapes, POSITION_IDS: (), DOCUMENT_IDS: ()}
    dtypes = {**layout.dtypes, POSITION_IDS: torch.int64, DOCUMENT_IDS: torch.int64}
    batch = {
        name: torch.full((num_rows, width, *shapes[name]), _PADDING.get(name, 0), dtype=dtypes[name], device=device) for name in dtypes
    }
    sample_ids: list[str] = []
    for row, indices in enumerate(rows):
        start = 0
        for index in indices:
            sample_id, tensors = samples[index]
            end = start + lengths[index]
            for name in layout.dtypes:
                batch[name][row, start:end] = tensors[name]
            batch[POSITION_IDS][row, start:end] = torch.arange(lengths[index], device=device)
            batch[DOCUMENT_IDS][row, start:end] = len(sample_ids)
            sample_ids.append(sample_id)
            start = end
    batch[LOSS_MASK] = batch[LOSS_MASK].bool()
    return TrainBatch(batch, tuple(sample_ids), epoch)
