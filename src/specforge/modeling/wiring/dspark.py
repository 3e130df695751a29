"""DSpark's draft: the block backbone plus a low-rank Markov head and a confidence head (arXiv 2607.05147)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from specforge.modeling.draft.base import DraftArchitecture
from specforge.modeling.wiring.block import BlockDraft

MarkovType = Literal["vanilla", "gated", "rnn"]
_INITIAL_SCALE = 0.02


class MarkovHead(nn.Module):
    """Bias of a slot's logits from the token before it: W₂ · latent, with latent from W₁[previous token] [r].

    ``vanilla``: latent = W₁[prev]. ``gated``: times sigmoid(gate_proj([h ; W₁[prev]])). ``rnn``: a state of width r runs along the block;
    joint_proj([state ; W₁[prev] ; h]) gives gate, candidate and output, latent = tanh(output).
    """

    def __init__(self, kind: MarkovType, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        for weight in (self.markov_w1.weight, self.markov_w2.weight):
            nn.init.normal_(weight, std=_INITIAL_SCALE)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def start(self, like: torch.Tensor) -> torch.Tensor:
        """The state before slot 0: zeros [N, r] for ``like`` [N, H]."""
        return like.new_zeros(like.shape[0], self.rank)

    def step(self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedded previous token [N, r], slot state [N, H], own state [N, r] -> (latent [N, r], the next own state)."""
        if self.kind == "vanilla":
            return previous, state
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat((hidden, previous), dim=-1))) * previous, state
        gate, candidate, output = self.joint_proj(torch.cat((state, previous, hidden), dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate)

    def latent(self, previous: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The latents of whole blocks: embedded previous tokens [N, J, r], slot states [N, J, H] -> [N, J, r]."""
        if self.kind != "rnn":  # no state: every slot at once
            return self.step(previous, slots, previous)[0]
        state, latents = self.start(slots[:, 0]), []
        for k in range(slots.shape[1]):
            latent, state = self.step(previous[:, k], slots[:, k], state)
            latents.append(latent)
        return torch.stack(latents, dim=1)


class ConfidenceHead(nn.Module):
    """Logit of the chance that a slot is accepted, from its state and, if asked, W₁ of the token before it."""

    def __init__(self, hidden_size: int, markov_rank: int, with_markov: bool) -> None:
        super().__init__()
        self.with_markov = with_markov
        self.proj = nn.Linear(hidden_size + (markov_rank if with_markov else 0), 1)

    def forward(self, slots: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """[..., H], embedded previous token [..., r] -> logits [...] float32."""
        features = torch.cat((slots, previous), dim=-1) if self.with_markov else slots
        return self.proj(features.to(self.proj.weight.dtype)).squeeze(-1).float()


class DSparkDraft(BlockDraft):
    """``markov_head`` corrects each slot by the token before it; ``confidence_head``, if any, only schedules verification in serving."""

    def __init__(
        self,
        architecture: DraftArchitecture,
        *,
        markov_head_type: MarkovType,
        markov_rank: int,
        confidence_head: bool,
        confidence_head_with_markov: bool,
        **backbone: Any,
    ) -> None:
        super().__init__(architecture, **backbone)
        width = architecture.hidden_size
        self.markov_head = MarkovHead(markov_head_type, self.embedding.shape[0], width, markov_rank)
        self.confidence_head = ConfidenceHead(width, markov_rank, confidence_head_with_markov) if confidence_head else None
