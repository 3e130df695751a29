"""EAGLE-3 drafting with a key-value cache: a chain whose first step reads true target features (conventions.md §4)."""

from __future__ import annotations

import torch

from specforge.evaluation.proposer import Proposal, Proposer, draw
from specforge.modeling.wiring.eagle3 import Eagle3Draft
from specforge.ops.attention import plain_attention


class Eagle3Proposer(Proposer):
    """Row i reads embed(tok[i+1]) and fc(aux[i]) at pos[i]; a chain step k reads the drafted token and its own last state at pos[i]+k."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self.draft = draft
        self.start()

    def start(self) -> None:
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._committed = 0

    @torch.no_grad()
    def observe(self, aux: torch.Tensor, next_tokens: list[int]) -> None:
        draft = self.draft
        tokens = torch.tensor(next_tokens, device=draft.d2t.device)
        g = draft.fuse(aux.to(draft.d2t.device))
        h = self._layer(tokens, g, self._committed, self._committed)
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
                h = self._layer(last, state, self._committed - 1 + k, self._committed - 1 + k)
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

    def _layer(self, tokens: torch.Tensor, g: torch.Tensor, position: int, cached: int) -> torch.Tensor:
        """Run the layer on T rows from ``position`` on, after the first ``cached`` keys; returns the last row's output [1, H]."""
        layer, attention = self.draft.midlayer, self.draft.midlayer.self_attn
        u, residual = layer.attention_input(self.draft.embed(tokens), g)
        positions = torch.arange(position, position + tokens.numel(), device=tokens.device)
        cos, sin = self.draft.rotary(positions, u.dtype)
        keys, values = attention.keys_values(u, (cos, sin))
        self._keys = keys if self._keys is None else torch.cat((self._keys[:cached], keys))
        self._values = values if self._values is None else torch.cat((self._values[:cached], values))
        # Only the last row's output is read: earlier rows exist for their keys.
        q = attention.queries(u[-1:], (cos[-1:], sin[-1:]))
        o, _ = plain_attention(q[None], self._keys[None], self._values[None], None, attention.facts.scale)
        return layer.finish(residual[-1:], o[0])
