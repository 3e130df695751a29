"""P-EAGLE drafting as vLLM serves it: one forward over the newly committed rows and n − 1 mask rows gives all n tokens.

The row of the last committed position proposes the first token; the d-th mask row behind it, d positions further on, proposes the one
after d others. Mask rows leave nothing in the cache.
"""

from __future__ import annotations

import torch

from specforge.evaluation.proposer import Proposal, Proposer, draw
from specforge.modeling.wiring.peagle import PEagleDraft
from specforge.ops.attention import plain_attention

KeysValues = tuple[torch.Tensor, torch.Tensor]


class PEagleProposer(Proposer):
    """Committed rows wait until the next proposal and enter the cache by its forward."""

    def __init__(self, draft: PEagleDraft) -> None:
        self.draft = draft
        self.start()

    def start(self) -> None:
        self._cache: list[KeysValues] = []  # of each layer, positions 0 … cached − 1
        self._cached = 0
        self._tokens: list[int] = []
        self._aux: torch.Tensor | None = None
        self._computed: list[KeysValues] = []  # the cache with the rows of the last forward behind it

    @torch.no_grad()
    def observe(self, aux: torch.Tensor, next_tokens: list[int]) -> None:
        aux = aux.to(self.draft.d2t.device)
        if self._computed:  # what the last proposal's forward made of its committed rows is kept, its mask rows are not
            self._cached += len(self._tokens)
            self._cache = [(k[: self._cached], v[: self._cached]) for k, v in self._computed]
            self._tokens, self._aux = [], None
        self._computed = []
        self._tokens = [*self._tokens, *next_tokens]
        self._aux = aux if self._aux is None else torch.cat((self._aux, aux))

    @torch.no_grad()
    def propose(self, num_tokens: int, temperature: float, generator: torch.Generator | None) -> Proposal:
        logits = self.draft.logits(self._forward(num_tokens))
        drawn = [draw(row, temperature, generator) for row in logits]
        kept = torch.tensor([token for token, _ in drawn], device=logits.device)
        tokens = (kept + self.draft.d2t[kept]).tolist()
        if generator is not None:
            probabilities = torch.zeros(num_tokens, self.draft.t2d.numel())
            probabilities[:, self.draft.t2d.cpu()] = torch.stack([p for _, p in drawn if p is not None])
            return Proposal(tokens, probabilities)
        best = logits.topk(min(2, logits.shape[-1]), dim=-1).values
        return Proposal(tokens, margins=best[:, 0] - best[:, -1])

    def _forward(self, num_tokens: int) -> torch.Tensor:
        """Normed states [n, H] of the last committed row and n − 1 mask rows."""
        draft, device = self.draft, self.draft.d2t.device
        assert self._aux is not None, "observe comes before propose"
        u, x = draft.first_input(torch.tensor(self._tokens, device=device), self._aux, num_tokens - 1)
        # A row's place is its position: mask rows follow the committed ones, so what each sees is plain causality.
        positions = torch.arange(self._cached, self._cached + u.shape[0], device=device)
        distance = positions.unsqueeze(-1) - torch.arange(self._cached + u.shape[0], device=device)
        rope = draft.rotary(positions, u.dtype)
        self._computed = []
        for i, layer in enumerate(draft.layers):
            if i > 0:
                u = draft.layer_input(i, x)
            attention = layer.self_attn
            k, v = attention.keys_values(u, rope)
            if self._cache:
                k, v = torch.cat((self._cache[i][0], k)), torch.cat((self._cache[i][1], v))
            self._computed.append((k, v))
            window = attention.facts.window
            seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            o, _ = plain_attention(attention.queries(u, rope)[None], k[None], v[None], seen[None], attention.facts.scale)
            x = layer.finish(x, o[0])
        return draft.norm(x[-num_tokens:])
