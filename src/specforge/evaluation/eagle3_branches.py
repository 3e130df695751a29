"""Several branches of an EAGLE-3 draft at once, for trees, with the keys that SGLang's branches read.

A branch is a numbered slot. When the best branches of a step come from other slots than before, a slot's state follows its new parent
but its earlier keys stay those that the slot made itself: SGLang gives every slot a stretch of the cache and moves nothing there while it
drafts. So from the third level on a branch may attend to a cousin's keys. It costs a little acceptance and is reproduced here.
"""

from __future__ import annotations

import torch

from specforge.modeling.wiring.eagle3 import Eagle3Draft
from specforge.ops.attention import plain_attention


class Eagle3Branches:
    """Starts from each layer's committed keys and values [C, hk, ·] and the last committed row's ``state`` and ``normed``, both [1, H]."""

    def __init__(
        self, draft: Eagle3Draft, cache: list[tuple[torch.Tensor, torch.Tensor]], state: torch.Tensor, normed: torch.Tensor
    ) -> None:
        self.draft, self._cache, self._state, self._normed = draft, list(cache), state, normed
        self._committed, self._steps = cache[0][0].shape[0], 0

    def root(self) -> torch.Tensor:
        return self.draft.logits(self._normed)

    def extend(self, tokens: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        draft = self.draft
        self._steps += 1
        embedded, x = draft.embed(tokens), self._state[sources]
        rope = draft.rotary(torch.full_like(tokens, self._committed - 1 + self._steps), embedded.dtype)
        for i, layer in enumerate(draft.stack):
            attention = layer.self_attn
            u, residual = layer.attention_input(embedded, x)
            keys, values = (torch.cat(pair) for pair in zip(self._cache[i], attention.keys_values(u, rope), strict=True))
            self._cache[i] = (keys, values)
            seen = self._seen(tokens.numel(), attention.facts.window, tokens.device)
            o, _ = plain_attention(attention.queries(u, rope)[None], keys[None], values[None], seen[None], attention.facts.scale)
            x = layer.finish(residual, o[0])
        self._state, self._normed = draft.next_state(x)
        return draft.logits(self._normed)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids + self.draft.d2t[draft_ids]

    def _seen(self, topk: int, window: int | None, device: torch.device) -> torch.Tensor:
        """bool [topk, C + steps·topk]: the committed keys and the slot's own."""
        committed = self._committed
        own = torch.eye(topk, dtype=torch.bool, device=device).repeat(1, self._steps)
        seen = torch.cat((torch.ones(topk, committed, dtype=torch.bool, device=device), own), dim=1)
        if window is None:
            return seen
        # Places of the keys: step s of every branch lies s places behind the last committed row, which it hangs on.
        behind = torch.arange(1, self._steps + 1, device=device).repeat_interleave(topk)
        place = torch.cat((torch.arange(committed, device=device), committed - 1 + behind))
        return seen & (committed - 1 + self._steps - place < window)
