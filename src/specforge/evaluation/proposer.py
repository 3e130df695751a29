"""The contract of a proposer: how a draft guesses the next tokens of one request, as the serving engine runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from specforge.errors import ConfigError
from specforge.evaluation.draft_tree import DraftTree, TreeShape


@dataclass
class Proposal:
    """n drafted tokens and, when they were sampled, the distribution [n, V] each was drawn from (over the target vocabulary).

    ``margins`` [n], where a proposer gives them: how far each argmax's logit lies above the next one (0 is a tie).
    """

    tokens: list[int]
    probabilities: torch.Tensor | None = None
    margins: torch.Tensor | None = None


class Proposer(ABC):
    """State of one draft for one request: committed features in, proposals out."""

    @abstractmethod
    def start(self) -> None:
        """Forget the previous request."""

    @abstractmethod
    def observe(self, aux: torch.Tensor, next_tokens: list[int]) -> None:
        """Commit T new positions: their true target features aux [T, K·H] and tok[i+1] of each; the last one is not yet in the target.

        Anything that earlier proposals left in the draft's caches is dropped first.
        """

    @abstractmethod
    def propose(self, num_tokens: int, temperature: float, generator: torch.Generator | None) -> Proposal:
        """Draft ``num_tokens``: argmax when ``generator`` is None, else sampled at ``temperature``."""

    def propose_tree(self, shape: TreeShape) -> DraftTree:
        """Draft a tree of likeliest tokens. Raises :class:`ConfigError` for a draft that proposes one chain only."""
        raise ConfigError(f"evaluator.tree_topk: {shape.topk} — this draft proposes one chain and no tree. Set evaluator.tree_topk=1.")


def draw(logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> tuple[int, torch.Tensor | None]:
    """One token of logits [V]: the argmax without a generator, else a sample and the distribution [V] it came from."""
    if generator is None:
        return int(logits.argmax()), None
    probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)  # the generator lives on the CPU
    return int(torch.multinomial(probabilities, 1, generator=generator)), probabilities
