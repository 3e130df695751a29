"""Domino's draft: the block backbone plus a causal correction head over the tokens before each slot (arXiv 2605.29707)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specforge.modeling.draft.base import DraftArchitecture
from specforge.modeling.wiring.block import BlockDraft

# Small, so that the corrected logits start near the base logits.
_INITIAL_SCALE = 0.02


class DominoDraft(BlockDraft):
    """``prefix_gru`` reads the target's embeddings of a block's tokens; ``embed_proj`` turns [slot state ; GRU state] into a correction.

    correction = W₂ · silu(W₁ · [h ; g]) with W₁ [e, H + G] = ``embed_proj.0`` and W₂ [V, e] = ``embed_proj.2``, all without biases.
    """

    def __init__(self, architecture: DraftArchitecture, *, gru_hidden_size: int, correction_size: int, **backbone: Any) -> None:
        super().__init__(architecture, **backbone)
        width = architecture.hidden_size
        self.prefix_gru = nn.GRU(width, gru_hidden_size, num_layers=1, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + gru_hidden_size, correction_size, bias=False),
            nn.SiLU(),
            nn.Linear(correction_size, self.embedding.shape[0], bias=False),
        )
        nn.init.normal_(self.embed_proj[2].weight, std=_INITIAL_SCALE)

    @property
    def correction_weight(self) -> torch.Tensor:
        """W₂ [V, e]."""
        return self.embed_proj[2].weight

    def prefix_states(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [N, J] -> GRU states [N, J, G]; state j has read tokens 0 … j."""
        # Cell by cell: blocks are short, and the fused GRU wants its weights in one piece of memory, which a backend may move.
        state, states = self.embedding.new_zeros(tokens.shape[0], self.prefix_gru.hidden_size, dtype=self.fc.weight.dtype), []
        for j in range(tokens.shape[1]):
            state = self.next_state(tokens[:, j], state)
            states.append(state)
        return torch.stack(states, dim=1)

    def latent(self, slots: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[..., H], [..., G] -> silu(W₁ · [h ; g]) [..., e]."""
        return self.embed_proj[1](self.embed_proj[0](torch.cat((slots, states), dim=-1)))

    def next_state(self, token: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """One more token [N] read: [N, G] -> [N, G]."""
        return torch.gru_cell(self.embed(token), state, self.prefix_gru.weight_ih_l0, self.prefix_gru.weight_hh_l0)
