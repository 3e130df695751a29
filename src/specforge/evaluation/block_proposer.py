"""Block drafting as SGLang 0.5.23 serves it: context keys of committed positions are cached, a block's own keys are thrown away.

A verify step of n drafts runs a block whose size follows n (``BlockStrategy.served_block``), not the block that was trained: SGLang's
verify window sets it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from specforge.evaluation.proposer import Proposal, Proposer
from specforge.modeling.target import TargetHead
from specforge.modeling.wiring.block import BlockDraft
from specforge.ops.attention import plain_attention
from specforge.ops.block_attention import BlockMask, block_attention

if TYPE_CHECKING:
    from specforge.training.strategies.block import BlockStrategy


class BlockProposer(Proposer):
    """The anchor is the last token that the target has not read; the context are the features of everything before it."""

    def __init__(self, draft: BlockDraft, head: TargetHead, strategy: BlockStrategy) -> None:
        self.draft, self.head, self.strategy = draft, head, strategy
        self.start()

    def start(self) -> None:
        self._cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._committed = 0

    @torch.no_grad()
    def observe(self, aux: torch.Tensor, next_tokens: list[int]) -> None:
        draft = self.draft
        context = draft.fuse(aux.to(draft.d2t.device))
        positions = torch.arange(self._committed, self._committed + len(next_tokens), device=context.device)
        rope = draft.rotary(positions, context.dtype)
        fresh = [layer.self_attn.keys_values(context, rope) for layer in draft.layers]
        if self._cache:
            fresh = [(torch.cat((k, new_k)), torch.cat((v, new_v))) for (k, v), (new_k, new_v) in zip(self._cache, fresh, strict=True)]
        self._cache = fresh
        self._committed += len(next_tokens)
        self._anchor = next_tokens[-1]

    @torch.no_grad()
    def propose(self, num_tokens: int, temperature: float, generator: torch.Generator | None) -> Proposal:
        slots = self.strategy.slots(self._block(self.strategy.served_block(num_tokens)))[0]
        return self.from_slots(slots, temperature, generator)

    @abstractmethod
    def from_slots(self, slots: torch.Tensor, temperature: float, generator: torch.Generator | None) -> Proposal:
        """States [n, H] of the slots that propose -> n tokens."""

    def base_logits(self, slots: torch.Tensor) -> torch.Tensor:
        """The bare head without scale, bias or soft-cap, as SGLang applies it to draft states: [..., H] -> float32 [..., V]."""
        return linear(slots.to(self.head.weight.dtype), self.head.weight).float()

    def _block(self, size: int) -> torch.Tensor:
        """States [1, bs, H] of one block at the anchor."""
        draft, at = self.draft, self._committed
        device = draft.d2t.device
        x = draft.embed(draft.block_tokens(torch.tensor([self._anchor], device=device), size))
        rope = draft.rotary(torch.arange(at, at + size, device=device).unsqueeze(0), x.dtype)
        zeros = torch.zeros(1, 1, dtype=torch.int64, device=device)
        mask = BlockMask(zeros, zeros + at, zeros.expand(1, at), torch.arange(at, device=device).unsqueeze(0), size)
        for layer, (keys, values) in zip(draft.layers, self._cache, strict=True):
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            own_keys, own_values = attention.keys_values(normed, rope)
            seen = replace(mask, window=attention.facts.window).prepare(plain_attention)
            o = block_attention(
                attention.queries(normed, rope), keys[None], values[None], own_keys, own_values, seen, attention.facts.scale
            )
            x = layer.finish(x, o)
        return draft.norm(x)


class DFlashProposer(BlockProposer):
    """Every slot's argmax at once. Above temperature 0 too: SGLang's DFlash drafts are always greedy, a distribution of one token."""

    def from_slots(self, slots: torch.Tensor, temperature: float, generator: torch.Generator | None) -> Proposal:
        return greedy_proposal(self.base_logits(slots), sampled=generator is not None)


def greedy_proposal(logits: torch.Tensor, sampled: bool) -> Proposal:
    """argmax of logits [n, V] with its margins; when the caller samples, the point masses that it came from."""
    best = logits.topk(min(2, logits.shape[-1]), dim=-1)
    tokens = logits.argmax(-1)
    one_hot = torch.nn.functional.one_hot(tokens, logits.shape[-1]).float().cpu() if sampled else None
    return Proposal(tokens.tolist(), one_hot, best.values[:, 0] - best.values[:, -1])
