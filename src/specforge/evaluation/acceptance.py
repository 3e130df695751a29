"""Which drafted tokens a verify step accepts: greedy, and two rules above temperature 0 that keep the target's distribution.

``target_only`` is SGLang's default; ``rejection`` is speculative sampling (Leviathan et al., arXiv 2211.17192, Chen et al., arXiv
2302.01318). conventions.md §7.
"""

from __future__ import annotations

import torch

from specforge.evaluation.proposer import Proposal


def accept_greedy(logits: torch.Tensor, proposal: Proposal) -> tuple[int, int]:
    """Target logits [n+1, V] after the last token and each draft -> (accepted drafts, next token of the target)."""
    best = logits.argmax(-1).tolist()
    accepted = 0
    while accepted < len(proposal.tokens) and proposal.tokens[accepted] == best[accepted]:
        accepted += 1
    return accepted, best[accepted]


def accept_target_only(logits: torch.Tensor, proposal: Proposal, temperature: float, generator: torch.Generator) -> tuple[int, int]:
    """A drafted token passes with the probability that the target gives it; else the target draws among the others."""
    target = torch.softmax(logits.float() / temperature, dim=-1)
    for i, token in enumerate(proposal.tokens):
        if torch.rand((), generator=generator) < target[i, token].cpu():
            continue
        rest = target[i].clone()
        rest[token] = 0.0
        return i, int(torch.multinomial(rest, 1, generator=generator))
    return len(proposal.tokens), int(torch.multinomial(target[-1], 1, generator=generator))


def accept_rejection(logits: torch.Tensor, proposal: Proposal, temperature: float, generator: torch.Generator) -> tuple[int, int]:
    """A token drawn from q passes with min(1, p/q); else the target draws from max(p − q, 0)."""
    if proposal.probabilities is None:
        raise ValueError("rejection sampling needs the draft's probabilities: sample the drafts")
    target = torch.softmax(logits.float() / temperature, dim=-1)
    for i, token in enumerate(proposal.tokens):
        q = proposal.probabilities[i]
        if torch.rand((), generator=generator) * q[token].cpu() < target[i, token].cpu():
            continue
        rest = (target[i] - q).clamp_min(0.0)
        # p = q up to rounding leaves nothing to draw from; then p itself is the right distribution.
        return i, int(torch.multinomial(rest if rest.sum() > 0 else target[i], 1, generator=generator))
    return len(proposal.tokens), int(torch.multinomial(target[-1], 1, generator=generator))
