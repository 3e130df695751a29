"""Rows of P-EAGLE: which (anchor, depth) pairs are kept (COD sampling, arXiv 2602.01469) and what each reads (conventions.md §2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from specforge.modeling.wiring.peagle import ParallelInputs, Queries
from specforge.modeling.wiring.rows import RaggedRows
from specforge.ops.chain_attention import AnchorMask
from specforge.runtime import contracts
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.eagle3_rows import ahead, row_weights
from specforge.training.strategies.sampling import choose


@dataclass(frozen=True)
class ParallelRows:
    """The rows of one micro-batch. Scored row r is (``anchors[r]``, ``depths[r]``), a flat place b·S + a and a depth: int64 [R].

    Those of depth 0 come first, then the chain rows anchor by anchor. ``teacher_places`` int64 [P]: flat places a+1+d whose teacher is
    needed, ascending; ``teacher_rows`` int64 [R]: where each row finds its own among them.
    """

    inputs: ParallelInputs
    anchors: torch.Tensor
    depths: torch.Tensor
    teacher_places: torch.Tensor
    teacher_rows: torch.Tensor


def legal_rows(batch: TrainBatch, num_depths: int) -> torch.Tensor:
    """bool [D, B, S]: row (a, d) has weight 1, which implies that (a, d − 1) has it too."""
    return row_weights(batch.tensors[contracts.LOSS_MASK].bool(), batch.tensors["document_ids"], num_depths).bool()


def sampled_rows(legal: torch.Tensor, batch: TrainBatch, ratio: float, ratio_min: float, seed: int, epoch: int) -> torch.Tensor:
    """The part of ``legal`` [D, B, S] that is trained: all of depth 0, and of depth d a draw among the survivors of depth d − 1.

    A sample that has c legal rows at depth d keeps min(⌈c · max(ratio^d, ratio_min)⌉, survivors that are legal at d) of them, drawn by
    (seed, epoch, sample id) alone.
    """
    flat = legal.flatten(1).cpu().numpy()
    kept = np.zeros_like(flat)
    kept[0] = flat[0]
    anchors = np.flatnonzero(flat[0])
    documents = batch.tensors["document_ids"].flatten().cpu().numpy()[anchors]
    # A document's places are neighbours in flat order, so each document is one stretch of the anchors.
    numbers, starts, counts = np.unique(documents, return_index=True, return_counts=True)
    for number, start, count in zip(numbers.tolist(), starts.tolist(), counts.tolist(), strict=True):
        of_sample = survivors = anchors[start : start + count]
        for depth in range(1, len(flat)):
            candidates = survivors[flat[depth, survivors]]
            wanted = math.ceil(flat[depth, of_sample].sum() * max(ratio**depth, ratio_min) - 1e-9)
            drawn = choose(len(candidates), wanted, seed, epoch, batch.sample_ids[number], f"depth {depth}")
            survivors = candidates[drawn]
            if not len(survivors):
                break
            kept[depth, survivors] = True
    return torch.from_numpy(kept).view_as(legal).to(legal.device)


def align(batch: TrainBatch, kept: torch.Tensor, by_document: bool = False) -> ParallelRows:
    """Everything that the forward and its loss read for the rows ``kept`` bool [D, B, S] (nested: d only where d − 1 is).

    ``by_document`` lays attention out with one document a padded row, as :func:`eagle3_rows.align` does. No row at all is legal.
    """
    t = batch.tensors
    documents, positions = t["document_ids"], t["position_ids"]
    batch_size, length = documents.shape
    num_deeper = kept.shape[0] - 1
    num_documents = max(len(batch.sample_ids), 1)
    if by_document:
        groups, num_groups = documents.clamp(min=0), num_documents
    else:
        groups, num_groups = torch.arange(batch_size, device=documents.device).unsqueeze(1).expand(-1, length), batch_size
    context = RaggedRows.from_mask(_up_to_last_anchor(kept[0], documents, positions, num_documents), groups, num_groups)
    shared = RaggedRows.from_mask(kept[0], groups, num_groups)
    # Chain rows live on a [B, S·(D−1)] grid, anchor-major; depth d of place a is a·(D−1) + d−1.
    grid = kept[1:].permute(1, 2, 0)
    chains = RaggedRows.from_mask(grid.flatten(1), groups.repeat_interleave(num_deeper, dim=1), num_groups)
    chained = grid.any(-1) if num_deeper else torch.zeros_like(kept[0])
    ordinal = (chained.flatten().cumsum(0) - 1).clamp(min=0).view(batch_size, length)
    own = RaggedRows.from_mask(grid.flatten(1), ordinal.repeat_interleave(num_deeper, dim=1), max(int(chained.sum()), 1))

    chain_anchors, chain_depths = chains.flat // max(num_deeper, 1), chains.flat % max(num_deeper, 1) + 1
    in_context = torch.zeros(batch_size * length, dtype=torch.int64, device=documents.device)
    in_context[context.flat] = torch.arange(context.flat.numel(), device=documents.device)
    place = context.slot % context.gather.shape[1]  # of each context row in its padded row

    def queries(rows: RaggedRows, chosen: torch.Tensor | None) -> Queries:
        zero = torch.zeros_like(rows.flat)
        pairs = ((rows, rows.flat, zero), (chains, chain_anchors, chain_depths))
        document = [torch.where(r.valid, r.pad(documents.flatten()[a]), -1) for r, a, _ in pairs]
        anchor = [r.pad(place[in_context[a]]) for r, a, _ in pairs]
        depth = [r.pad(d) for r, _, d in pairs]
        key_document = torch.where(context.valid, context.pad(documents.flatten()[context.flat]), -1)
        return Queries(rows, chosen, AnchorMask(torch.cat(document, 1), torch.cat(anchor, 1), torch.cat(depth, 1), key_document))

    inputs = ParallelInputs(
        aux=t[contracts.AUX_HIDDEN_STATES].flatten(0, 1)[context.flat],
        tokens=ahead(t[contracts.INPUT_IDS], 1).flatten()[context.flat],
        positions=torch.cat((positions.flatten()[context.flat], positions.flatten()[chain_anchors] + chain_depths)),
        context=context,
        chains=chains,
        own=own,
        everything=queries(context, None),
        scored=queries(shared, in_context[shared.flat]),
    )
    anchors, depths = torch.cat((shared.flat, chain_anchors)), torch.cat((torch.zeros_like(shared.flat), chain_depths))
    places, teacher_rows = torch.unique(anchors + 1 + depths, return_inverse=True)
    return ParallelRows(inputs, anchors, depths, places, teacher_rows)


def _up_to_last_anchor(anchors: torch.Tensor, documents: torch.Tensor, positions: torch.Tensor, num_documents: int) -> torch.Tensor:
    """bool [B, S]: positions that some anchor of their document sees; the rest of the context costs nothing."""
    last = positions.new_full((num_documents,), -1)
    last.scatter_reduce_(0, documents[anchors], positions[anchors], "amax")
    return (documents >= 0) & (positions <= last[documents.clamp(min=0)])
