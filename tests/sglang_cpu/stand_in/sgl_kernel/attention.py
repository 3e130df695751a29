"""Attention over the paged key-value pool, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, mask: Tensor | None) -> Tensor:
    """q [T, h, D], k [S, g, D], v [S, g, Dv] -> [T, h, Dv]; ``mask`` [T, S] is true where a key is seen."""
    if cap:
        raise NotImplementedError("soft-capped attention scores")
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k.to(q.dtype), v.to(q.dtype)))
    grouped = q.shape[1] != k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)[0].transpose(0, 1)


def _refuse(is_cross_attn: bool, sinks: Tensor | None) -> None:
    if is_cross_attn or sinks is not None:
        raise NotImplementedError("cross attention" if is_cross_attn else "attention sinks")


def extend_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, k_buffer: Tensor, v_buffer: Tensor, k_scale: float | None, v_scale: float | None,
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, extend_seq_lens: Tensor, extend_start_loc: Tensor,
    max_len_extend: int, sm_scale: float, logit_cap: float, is_cross_attn: bool, window: int, encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None = None, is_causal: bool = True,
) -> None:
    """New tokens attend to the cached prefix and to each other; their keys and values are in the buffers already.

    ``tree_mask`` (flat, n·n a request) takes the place of causality among the new tokens. ``window`` counts the token itself; 0 is none.
    """
    _refuse(is_cross_attn, sinks)
    mask_start = 0
    lists = (t.tolist() for t in (req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc))
    for request, total, n, start in zip(*lists, strict=True):
        if n == 0:
            continue
        new, keys = torch.arange(total - n, total)[:, None], torch.arange(total)[None]
        seen = torch.ones(n, total, dtype=torch.bool)
        if tree_mask is not None:
            seen[:, total - n :] = tree_mask[mask_start : mask_start + n * n].view(n, n)
            mask_start += n * n
        elif is_causal:
            seen = keys <= new
        if window > 0 and tree_mask is None:
            seen = seen & (keys > new - window)
        rows = req_to_token[request, :total].long()
        keys_values = k_buffer[rows], v_buffer[rows]
        if q.shape[-1] != k_buffer.shape[-1]:  # a whole prompt of latent attention: the buffers hold the latent, the arguments the heads
            if total != n:
                raise NotImplementedError("heads of latent attention over a cached prefix")
            keys_values = tuple(x[start : start + n].unflatten(-1, (q.shape[1], -1)) if x.dim() == 2 else x[start : start + n] for x in (k, v))
        o[start : start + n] = _attend(q[start : start + n], *keys_values, sm_scale, logit_cap, seen)


def decode_attention_cpu(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, k_scale: float | None, v_scale: float | None, o: Tensor, k: Tensor | None,
    v: Tensor | None, loc: Tensor, attn_logits: Tensor, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, sm_scale: float,
    logit_cap: float, is_cross_attn: bool, window: int, encoder_lens: Tensor | None, sinks: Tensor | None,
) -> None:
    """One query a request. Unlike its sibling this operator stores the new key and value itself, at ``loc``."""
    _refuse(is_cross_attn, sinks)
    if k is not None and v is not None:
        k_buffer[loc.long()] = k.reshape(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc.long()] = v.reshape(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for i, (request, total) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        rows = req_to_token[request, max(0, total - window) if window > 0 else 0 : total].long()
        o[i : i + 1] = _attend(q[i : i + 1], k_buffer[rows], v_buffer[rows], sm_scale, logit_cap, None)
