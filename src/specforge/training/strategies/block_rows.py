"""Alignment of the block algorithms: from a batch of documents to anchors, slots, labels and weights (conventions.md §2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specforge.modeling.wiring.block import BlockInputs
from specforge.modeling.wiring.rows import RaggedRows
from specforge.ops.block_attention import BlockMask
from specforge.runtime import contracts
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.sampling import choose


@dataclass(frozen=True)
class BlockRows:
    """N anchors and, for offsets j = 1 … J after each, what is predicted there.

    ``anchors`` [N] flat places b·S + a, ascending; ``labels`` [N, J] = tok[a+j]; ``valid`` bool [N, J] = ∏ m[i], i = a … a+j, inside one
    document; ``before`` [N, J] = flat place of a+j−1, where the target's own choice for the label stands.
    """

    inputs: BlockInputs
    anchors: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor
    before: torch.Tensor

    def previous_tokens(self) -> torch.Tensor:
        """The true token before each label, tok[a+j−1]: [N, J]."""
        return torch.cat((self.inputs.anchor_tokens.unsqueeze(-1), self.labels[:, :-1]), dim=-1)

    def choices(self, batch: TrainBatch) -> torch.Tensor:
        """The target's argmax for every label [N, J]; the label itself where the engine gave none."""
        known = batch.tensors.get(contracts.TARGET_ARGMAX)
        return self.labels if known is None else known.flatten()[self.before]


def legal_anchors(batch: TrainBatch) -> torch.Tensor:
    """bool [B, S]: m[a] = m[a+1] = 1 in one document."""
    mask, documents = batch.tensors[contracts.LOSS_MASK].bool(), batch.tensors["document_ids"]
    legal = torch.zeros_like(mask)
    legal[:, :-1] = mask[:, :-1] & mask[:, 1:] & (documents[:, :-1] == documents[:, 1:]) & (documents[:, :-1] >= 0)
    return legal


def drawn_anchors(batch: TrainBatch, num_anchors: int | None, seed: int, epoch: int) -> torch.Tensor:
    """Flat places of at most ``num_anchors`` legal anchors of each document, drawn by (seed, epoch, sample id): int64 [N], ascending.

    null draws nothing: every legal anchor is taken.
    """
    flat = legal_anchors(batch).flatten().nonzero().squeeze(-1)
    if num_anchors is None:
        return flat
    documents = batch.tensors["document_ids"].flatten()[flat].cpu().numpy()
    numbers, starts, counts = np.unique(documents, return_index=True, return_counts=True)
    if not (counts > num_anchors).any():
        return flat
    kept = [
        start + choose(count, num_anchors, seed, epoch, batch.sample_ids[number], "anchors")
        for number, start, count in zip(numbers.tolist(), starts.tolist(), counts.tolist(), strict=True)
    ]
    # A document's anchors are neighbours in flat order, so the ranges of the documents follow each other too.
    return flat[torch.from_numpy(np.sort(np.concatenate(kept))).to(flat.device)]


def align_blocks(batch: TrainBatch, anchors: torch.Tensor, block_size: int, num_labels: int, by_document: bool = False) -> BlockRows:
    """Everything that blocks of ``block_size`` slots at ``anchors`` read, and ``num_labels`` labels after each. No anchor is legal.

    ``by_document`` lays attention out with one document a padded row, which is what materialised scores want (:func:`eagle3_rows.align`).
    """
    t = batch.tensors
    tokens, documents, positions = (t[n].flatten() for n in (contracts.INPUT_IDS, "document_ids", "position_ids"))
    shape = t["document_ids"].shape
    num_documents = max(len(batch.sample_ids), 1)
    if by_document:
        groups, num_groups = t["document_ids"].clamp(min=0), num_documents
    else:
        groups, num_groups = torch.arange(shape[0], device=tokens.device).unsqueeze(1).expand(shape), shape[0]
    chosen = torch.zeros(shape, dtype=torch.bool, device=tokens.device)
    chosen.view(-1)[anchors] = True
    anchor_rows = RaggedRows.from_mask(chosen, groups, num_groups)
    context = RaggedRows.from_mask(_before_last_anchor(t, anchors, num_documents), groups, num_groups)

    def padded(rows: RaggedRows, values: torch.Tensor, empty: int) -> torch.Tensor:
        return torch.where(rows.valid, rows.pad(values[rows.flat]), empty)

    mask = BlockMask(
        query_document=padded(anchor_rows, documents, -1),
        anchor_position=padded(anchor_rows, positions, 0),
        key_document=padded(context, documents, -1),
        key_position=padded(context, positions, 0),
        block_size=block_size,
    )
    inputs = BlockInputs(
        features=t[contracts.AUX_HIDDEN_STATES].flatten(0, 1)[context.flat],
        context=context,
        context_positions=positions[context.flat],
        anchors=anchor_rows,
        anchor_tokens=tokens[anchors],
        anchor_positions=positions[anchors],
        mask=mask,
    )
    after = anchors.unsqueeze(-1) + 1 + torch.arange(num_labels, device=tokens.device)  # [N, J] flat places a+j
    row_end = (anchors // shape[1] + 1).unsqueeze(-1) * shape[1]
    inside = after < row_end
    after = torch.where(inside, after, anchors.unsqueeze(-1))
    supervised = inside & (documents[after] == documents[anchors].unsqueeze(-1)) & t[contracts.LOSS_MASK].bool().flatten()[after]
    valid = supervised.long().cumprod(-1).bool() & t[contracts.LOSS_MASK].bool().flatten()[anchors].unsqueeze(-1)
    return BlockRows(inputs, anchors, tokens[after], valid, (after - 1).clamp(min=0))


def _before_last_anchor(t: dict[str, torch.Tensor], anchors: torch.Tensor, num_documents: int) -> torch.Tensor:
    """bool [B, S]: positions that some anchor of their document sees; the rest of the context costs nothing."""
    documents, positions = t["document_ids"], t["position_ids"]
    last = positions.new_zeros(num_documents)
    last.scatter_reduce_(0, documents.flatten()[anchors], positions.flatten()[anchors], "amax")
    return (documents >= 0) & (positions < last[documents.clamp(min=0)])


def slot_weights(valid: torch.Tensor, gamma: float | None) -> torch.Tensor:
    """valid bool [N, J] -> float32 [N, J]: times decay(j − 1) = exp(−(j − 1)/γ), or 1 when γ is null."""
    if gamma is None:
        return valid.float()
    offsets = torch.arange(valid.shape[-1], device=valid.device, dtype=torch.float32)
    return valid * torch.exp(-offsets / gamma)
