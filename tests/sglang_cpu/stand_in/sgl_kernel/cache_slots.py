"""Bookkeeping of cache slots: which row of the key-value pool holds which position of which request.

``req_to_token`` [R, L] maps (request slot, position) to a pool row. Arguments named "out" are written in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from torch import Tensor, arange, zeros


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy rows ``src_loc`` to ``tgt_loc`` in each buffer, given by raw address and bytes a row; all reads before any write."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for base, row in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(base + source * row, row) for source in sources]
        for target, data in zip(targets, held, strict=True):
            ctypes.memmove(base + target * row, data, row)


def _spans(requests: Tensor, starts: Tensor, ends: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(request, start, end, place in the packed list) of every request with at least one position."""
    place = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if end > start:
            yield request, start, end, place
            place += end - start


def assign_req_to_token_pool_cpu(
    requests: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, packed: Tensor, pool_len: int
) -> None:
    """``packed`` rows, request after request, into ``req_to_token[request, start:end]``."""
    for request, start, end, place in _spans(requests, starts, ends):
        req_to_token[request, start:end] = packed[place : place + end - start].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(requests: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, out: Tensor, pool_len: int) -> None:
    """The inverse: ``req_to_token[request, start:end]`` of each request, packed into ``out``."""
    for request, start, end, place in _spans(requests, starts, ends):
        out[place : place + end - start] = req_to_token[request, start:end].to(out.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, req_to_token: Tensor, seq_lens: Tensor, out: Tensor, pool_len: int, topk: int, num_steps: int
) -> None:
    """The ``topk * num_steps`` rows behind each request's committed ones, packed into ``out``."""
    width = topk * num_steps
    for i, (request, length) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        out[i * width : (i + 1) * width] = req_to_token[request, length : length + width].to(out.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, requests: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """[B * topk, pool_len]: for each branch of each request the committed rows, then the branch's own ``num_steps`` rows."""
    table = zeros((seq_lens.numel() * topk, pool_len), dtype=req_to_token.dtype)
    for i, (request, length) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        for branch in range(topk):
            row = table[i * topk + branch]
            row[:length] = req_to_token[request, :length]
            own = length + branch * num_steps
            row[length : length + num_steps] = req_to_token[request, own : own + num_steps]
    return table


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, cache_loc: Tensor, out: Tensor) -> None:
    """``cache_loc[accept_index]`` without the entries −1, at the front of ``out``."""
    kept = accept_index.reshape(-1)
    kept = kept[kept != -1].long()
    out[: kept.numel()] = cache_loc[kept].to(out.dtype)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, out: Tensor, stride: int) -> None:
    """The last accepted token of each request; ``accept_lens`` counts it."""
    lengths = accept_lens.reshape(-1).long()
    last = arange(lengths.numel()) * stride + lengths - 1
    out[: lengths.numel()] = accept_tokens.reshape(-1)[last].to(out.dtype)


def rotate_input_ids_cpu(ids: Tensor, starts: Tensor, lengths: Tensor, new_ids: Tensor, select_index: Tensor | None = None) -> None:
    """Shift each request's ids left by one, in place; its last place, or the one that ``select_index`` names, takes its new id."""
    places = [s + n - 1 for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    if select_index is not None:
        places = select_index.reshape(-1).tolist()
    for place, start, length, new in zip(places, starts.tolist(), lengths.tolist(), new_ids.reshape(-1).tolist(), strict=False):
        if length > 0:
            ids[start : start + length - 1] = ids[start + 1 : start + length].clone()
            ids[place] = new
