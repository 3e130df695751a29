"""Batched generation over a transformers model: prompts of similar length together, left padding, finished rows dropped.

Greedy answers equal those of one prompt at a time (in float32, ties aside). Above temperature 0 every prompt has a stream of
uniform numbers of its own and each token is drawn by inverting the cumulative distribution, so batching changes no draw.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Rows × (prompt + answer) tokens whose keys and values are held at once.
_CACHE_TOKENS = {"cpu": 16384, "cuda": 262144}


def generate_batched(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | Sequence[int],
    stop_token_ids: Sequence[int],
) -> list[list[int]]:
    """Answers in the order of ``prompts``; see :meth:`TargetEngine.generate`."""
    device = next(model.parameters()).device
    seeds = [_mix(seed, i) for i in range(len(prompts))] if isinstance(seed, int) else list(seed)
    limit = _CACHE_TOKENS.get(device.type, _CACHE_TOKENS["cuda"])
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    answers: list[list[int]] = [[] for _ in prompts]
    while order and max_new_tokens > 0:
        rows = max(1, limit // (len(prompts[order[0]]) + max_new_tokens))
        chunk, order = order[:rows], order[rows:]
        uniforms = _uniforms([seeds[i] for i in chunk], max_new_tokens, device) if temperature > 0 else None
        for i, answer in zip(
            chunk, _run_chunk(model, [prompts[i] for i in chunk], max_new_tokens, temperature, top_p, uniforms, stop_token_ids), strict=True
        ):
            answers[i] = answer
    return answers


@torch.no_grad()
def _run_chunk(
    model: nn.Module,
    prompts: list[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    uniforms: Tensor | None,
    stop_token_ids: Sequence[int],
) -> list[list[int]]:
    from transformers import DynamicCache

    device = next(model.parameters()).device
    ids, mask, positions = _left_pad(prompts, device)
    padded = not bool(mask.all())
    stops = torch.tensor(list(stop_token_ids), dtype=torch.int64, device=device)
    chosen = torch.full((len(prompts), max_new_tokens), -1, dtype=torch.int64, device=device)
    active = torch.arange(len(prompts), device=device)  # chunk row of each row still in the cache
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    cache = DynamicCache()
    for step in range(max_new_tokens):
        logits = _forward(model, ids, mask if padded else None, positions, cache)
        token = _choose(logits, temperature, top_p, None if uniforms is None else uniforms[active, step])
        chosen[active, step] = torch.where(done, -1, token)
        done |= torch.isin(token, stops)
        # Looking at ``done`` waits for the device, so it is done every few steps only; a finished row's later tokens are −1.
        if step % 8 == 7 or len(done) <= 8:
            if bool(done.all()):
                break
            if int(done.sum()) * 4 >= len(done):
                keep = (~done).nonzero().squeeze(-1)
                cache.batch_select_indices(keep)
                active, token, mask, positions = active[keep], token[keep], mask[keep], positions[keep]
                done = done[keep]
        ids = token.unsqueeze(-1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
        positions = positions[:, -1:] + 1
    return [[t for t in row if t >= 0] for row in chosen.tolist()]


def _forward(model: nn.Module, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> Tensor:
    cached = {cache_argument(model): cache}
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, return_dict=True, **cached)
    return output.logits[:, -1].float()


def cache_argument(model: nn.Module) -> str:
    """What this release of transformers calls the cache in a causal model's forward."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _left_pad(prompts: list[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """ids, attention mask and positions, each int64 [B, longest]; positions start at 0 with the first real token."""
    longest = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(list(prompt), dtype=torch.int64)
        mask[row, longest - len(prompt) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return ids.to(device), mask.to(device), positions.to(device)


def _choose(logits: Tensor, temperature: float, top_p: float, uniforms: Tensor | None) -> Tensor:
    """logits [B,V] → token [B]: argmax, or the inverse of the cumulative distribution of the smallest set of mass ``top_p``."""
    if uniforms is None:
        return logits.argmax(dim=-1)
    probs, order = (logits / temperature).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probs.double().cumsum(dim=-1) - probs
    probs = probs.double().masked_fill(before >= top_p, 0.0)
    cumulative = probs.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * cumulative[:, -1:], right=True)
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(index, last)).squeeze(-1)


def _uniforms(seeds: Sequence[int], count: int, device: torch.device) -> Tensor:
    """One row of ``count`` uniform numbers a seed, float64 [B, count]; drawn on the CPU so that every device sees the same."""
    rows = [torch.rand(count, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds]
    return torch.stack(rows).to(device)


def _mix(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=7).digest(), "big")
