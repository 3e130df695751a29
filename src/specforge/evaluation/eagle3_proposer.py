"""EAGLE-3 drafting with a key-value cache: a chain whose first step reads true target features (conventions.md §4)."""

from __future__ import annotations

import torch

from specforge.evaluation.draft_tree import DraftTree, TreeShape, grow
from specforge.evaluation.eagle3_branches import Eagle3Branches
from specforge.evaluation.proposer import Proposal, Proposer, draw
from specforge.modeling.wiring.eagle3 import Eagle3Draft
from specforge.ops.attention import plain_attention

KeysValues = tuple[torch.Tensor, torch.Tensor]


class Eagle3Proposer(Proposer):
    """Row i reads embed(tok[i+1]) and fc(aux[i]) at pos[i]; a chain step k reads the drafted token and its own last state at pos[i]+k."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self.draft = draft
        self.start()

    def start(self) -> None:
        self._cache: list[KeysValues] = []  # of each layer; committed rows first, then what the last proposal left
        self._committed = 0

    @torch.no_grad()
    def observe(self, aux: torch.Tensor, next_tokens: list[int]) -> None:
        draft = self.draft
        tokens = torch.tensor(next_tokens, device=draft.d2t.device)
        g = draft.fuse(aux.to(draft.d2t.device))
        h = self._run(tokens, g, self._committed)
        self._committed += len(next_tokens)
        self._state, self._normed = draft.next_state(h)

    @torch.no_grad()
    def propose(self, num_tokens: int, temperature: float, generator: torch.Generator | None) -> Proposal:
        draft = self.draft
        tokens: list[int] = []
        distributions: list[torch.Tensor] = []
        margins: list[torch.Tensor] = []
        state, normed = self._state, self._normed
        for k in range(num_tokens):
            if k > 0:
                last = torch.tensor([tokens[-1]], device=draft.d2t.device)
                # The chain hangs on row committed − 1 and its step k sits k places further on.
                h = self._run(last, state, self._committed - 1 + k)
                state, normed = draft.next_state(h)
            logits = draft.logits(normed)[0]
            kept, probabilities = draw(logits, temperature, generator)
            if generator is None:
                best = logits.topk(min(2, logits.numel())).values
                margins.append(best[0] - best[-1])
            tokens.append(kept + int(draft.d2t[kept]))
            if probabilities is not None:
                full = probabilities.new_zeros(draft.t2d.numel())
                full[draft.t2d.cpu()] = probabilities
                distributions.append(full)
        return Proposal(tokens, torch.stack(distributions) if distributions else None, torch.stack(margins) if margins else None)

    def propose_tree(self, shape: TreeShape) -> DraftTree:
        assert self._cache, "observe comes before propose_tree"
        committed = [(keys[: self._committed], values[: self._committed]) for keys, values in self._cache]
        return grow(Eagle3Branches(self.draft, committed, self._state, self._normed), shape)

    def _run(self, tokens: torch.Tensor, g: torch.Tensor, position: int) -> torch.Tensor:
        """Run the layers on T rows from ``position`` on, after as many cached keys; returns the last row's output [1, H]."""
        draft = self.draft
        embedded, x = draft.embed(tokens), g
        places = torch.arange(position + tokens.numel(), device=tokens.device)
        positions = places[position:]
        rope = draft.rotary(positions, embedded.dtype)
        distance = positions.unsqueeze(-1) - places
        cache: list[KeysValues] = []
        for i, layer in enumerate(draft.stack):
            attention = layer.self_attn
            u, residual = layer.attention_input(embedded, x)
            keys, values = attention.keys_values(u, rope)
            if self._cache:
                keys, values = (torch.cat((old[:position], new)) for old, new in zip(self._cache[i], (keys, values), strict=True))
            cache.append((keys, values))
            # Of the last layer only the last row's output is read: earlier rows exist for their keys.
            asking = slice(-1, None) if layer is draft.stack[-1] else slice(None)
            q = attention.queries(u[asking], (rope[0][asking], rope[1][asking]))
            seen = distance[asking] >= 0
            if attention.facts.window is not None:
                seen = seen & (distance[asking] < attention.facts.window)
            o, _ = plain_attention(q[None], keys[None], values[None], seen[None], attention.facts.scale)
            x = layer.finish(residual[asking], o[0])
        self._cache = cache
        return x
