"""Alignment of EAGLE-3: from a batch of documents to rows, step tokens, teacher rows and weights (conventions.md §2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specforge.modeling.wiring.eagle3 import UnrollInputs
from specforge.modeling.wiring.rows import RaggedRows
from specforge.ops.attention import CausalDocumentMask
from specforge.runtime import contracts
from specforge.runtime.contracts import TrainBatch


@dataclass(frozen=True)
class Eagle3Rows:
    """Rows of one micro-batch. Row r sits at flat place ``inputs.rows.flat[r]`` = b·S + i.

    ``weights`` float32 [L, R]: ∏ m[j], j = i+1 … i+2+k, inside one document; ``teacher_places`` int64 [P]: flat places i+1+k whose
    teacher is needed, ascending; ``teacher_rows`` int64 [L, R]: where row (i, k) finds its teacher among them.
    """

    inputs: UnrollInputs
    weights: torch.Tensor
    teacher_places: torch.Tensor
    teacher_rows: torch.Tensor


def ahead(x: torch.Tensor, shift: int) -> torch.Tensor:
    """x[..., i + shift] at place i, the last entry repeated past the end: [B, S, ...] -> the same shape."""
    if shift == 0:
        return x
    place = torch.arange(x.shape[1], device=x.device) + shift
    return x[:, place.clamp(max=x.shape[1] - 1)]


def row_weights(loss_mask: torch.Tensor, document_ids: torch.Tensor, num_steps: int) -> torch.Tensor:
    """∏ m[j] for j = i+1 … i+2+k, all of the document of i: bool [B, S] twice -> float32 [L, B, S]."""
    length = loss_mask.shape[1]
    place = torch.arange(length, device=loss_mask.device)

    def supervised(shift: int) -> torch.Tensor:  # is tok[i + shift] generated in the same document as i?
        inside = place + shift < length
        return inside & (ahead(document_ids, shift) == document_ids) & (document_ids >= 0) & ahead(loss_mask, shift)

    weight = supervised(1)
    steps = []
    for k in range(num_steps):
        weight = weight & supervised(2 + k)
        steps.append(weight)
    return torch.stack(steps).float()


def align(batch: TrainBatch, num_steps: int, by_document: bool = False) -> Eagle3Rows:
    """Everything the unroll and its loss read. A batch without a supervised row gives R = 0 and P = 0.

    ``by_document`` lays attention out with one document a padded row, which is what materialised scores want; otherwise rows stay as
    the batch packs them, which is what a kernel with block masks wants. The result of the unroll is the same.
    """
    t = batch.tensors
    input_ids, documents, positions = t[contracts.INPUT_IDS], t["document_ids"], t["position_ids"]
    batch_size, length = input_ids.shape
    weights = row_weights(t[contracts.LOSS_MASK].bool(), documents, num_steps)
    # Rows with weight at step 0 contain those of every later step, since the weight is a growing product.
    if by_document:
        groups, num_groups = documents.clamp(min=0), max(len(batch.sample_ids), 1)
    else:
        groups, num_groups = torch.arange(batch_size, device=documents.device).unsqueeze(1).expand(-1, length), batch_size
    rows = RaggedRows.from_mask(weights[0].bool(), groups, num_groups)
    context = RaggedRows.from_mask(documents >= 0, groups, num_groups)
    in_context = torch.zeros(batch_size * length, dtype=torch.int64, device=input_ids.device)
    in_context[context.flat] = torch.arange(context.flat.numel(), device=input_ids.device)

    def flat(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)[places]

    padded_index = context.slot % context.gather.shape[1]
    key_document = torch.where(context.valid, context.pad(flat(documents, context.flat)), -1)
    mask = CausalDocumentMask(
        query_document=torch.where(rows.valid, rows.pad(flat(documents, rows.flat)), -1),
        query_index=rows.pad(padded_index[in_context[rows.flat]]),
        key_document=key_document,
    )
    inputs = UnrollInputs(
        aux=flat(t[contracts.AUX_HIDDEN_STATES], context.flat),
        context=context,
        rows=rows,
        context_tokens=flat(ahead(input_ids, 1), context.flat),
        context_positions=flat(positions, context.flat),
        row_in_context=in_context[rows.flat],
        step_tokens=torch.stack([flat(ahead(input_ids, 1 + k), rows.flat) for k in range(num_steps)]),
        mask=mask,
    )
    row_weight = weights.flatten(1)[:, rows.flat]
    wanted = rows.flat + 1 + torch.arange(num_steps, device=input_ids.device).unsqueeze(1)  # [L, R] flat places of i+1+k
    wanted = torch.where(row_weight > 0, wanted, rows.flat + 1)  # a row without weight reads its step-0 teacher, times zero
    places, teacher_rows = torch.unique(wanted, return_inverse=True)
    return Eagle3Rows(inputs, row_weight, places, teacher_rows)
