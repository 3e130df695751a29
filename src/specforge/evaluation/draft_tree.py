"""Trees of drafted tokens: grown by cumulative probability, cut to the best nodes, accepted along the target's own choices.

The rule is SGLang's (EAGLE with topk > 1; EAGLE-2, arXiv 2406.16858): each step extends the topk best branches by their topk best tokens,
and of all tokens seen the ``num_tokens`` with the largest product of draft probabilities along their path are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specforge.errors import ConfigError


@dataclass(frozen=True)
class TreeShape:
    """``depth`` draft steps, ``topk`` branches, ``num_tokens`` drafted tokens kept (the root is not counted, as n is for a chain)."""

    depth: int
    topk: int
    num_tokens: int

    @property
    def num_candidates(self) -> int:
        """Tokens that the draft looks at: topk in the first step, topk² in each further one."""
        return self.topk + (self.depth - 1) * self.topk**2


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens as nodes 1 … N; node 0 is the last token of the text. ``parents[i]`` is the node that node i + 1 hangs on.

    A parent always comes before its children, and nodes of a smaller depth before those of a larger one.
    """

    tokens: list[int]
    parents: list[int]

    def children(self, node: int) -> list[int]:
        return [i + 1 for i, parent in enumerate(self.parents) if parent == node]


class BranchDrafter(Protocol):
    """A draft that runs several branches of one request at once."""

    def root(self) -> torch.Tensor:
        """Draft logits [1, Vd] after the committed text."""

    def extend(self, tokens: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """One step: branch j says target token ``tokens[j]`` and continues branch ``sources[j]`` of the step before -> [topk, Vd]."""

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft vocabulary to target vocabulary, any shape."""


@torch.no_grad()
def grow(drafter: BranchDrafter, shape: TreeShape) -> DraftTree:
    """The tree that SGLang would verify for ``shape``.

    Ties of the product go to the candidate that was found first, so a kept node's parent is always kept too.
    """
    topk = shape.topk
    scores, ids = _best(drafter.root(), topk)
    scores, tokens = scores[0], drafter.target_ids(ids[0])
    all_scores, all_tokens, all_parents = [scores], [tokens], [torch.full_like(tokens, -1)]
    branches, sources = torch.arange(topk, device=tokens.device), torch.zeros_like(tokens)
    for step in range(1, shape.depth):
        probabilities, ids = _best(drafter.extend(tokens, sources), topk)
        expanded = (scores.unsqueeze(-1) * probabilities).flatten()  # a product, not a sum of logarithms: rounded as the server rounds
        found = drafter.target_ids(ids).flatten()
        all_scores.append(expanded)
        all_tokens.append(found)
        all_parents.append(branches.repeat_interleave(topk))
        best = _first_largest(expanded, topk)
        scores, tokens, sources = expanded[best], found[best], best // topk
        branches = topk + (step - 1) * topk**2 + best
    kept = _first_largest(torch.cat(all_scores), shape.num_tokens).sort().values.tolist()
    node = {candidate: i + 1 for i, candidate in enumerate(kept)} | {-1: 0}
    flat_tokens, flat_parents = torch.cat(all_tokens).tolist(), torch.cat(all_parents).tolist()
    return DraftTree([flat_tokens[c] for c in kept], [node[flat_parents[c]] for c in kept])


def _best(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and draft ids [rows, topk] of the likeliest words of logits [rows, Vd]."""
    best = torch.softmax(logits.float(), dim=-1).topk(topk, dim=-1)
    return best.values, best.indices


def _first_largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest of scores [N], largest first, equal ones in their order."""
    return scores.sort(descending=True, stable=True).indices[:count]


def accept_greedy_tree(best: Sequence[int], tree: DraftTree) -> list[int]:
    """The nodes from the root along the target's choices, the root included; ``best[i]`` is the target's token after node i."""
    path = [0]
    while True:
        following = [child for child in tree.children(path[-1]) if tree.tokens[child - 1] == best[path[-1]]]
        if not following:
            return path
        path.append(following[0])


def tree_problems(num_draft_tokens: int, topk: int, num_tokens: int | None, temperature: float) -> list[str]:
    """What is wrong with these keys of the evaluator, each a sentence that names the override to change."""
    if topk == 1:
        if num_tokens in (None, num_draft_tokens):
            return []
        return [
            f"evaluator.tree_num_tokens: {num_tokens} — evaluator.tree_topk=1 is a chain of evaluator.num_draft_tokens={num_draft_tokens}. "
            "Set evaluator.tree_num_tokens=null, or evaluator.tree_topk to 2 or more."
        ]
    problems = []
    if temperature > 0:
        problems.append(
            f"evaluator.tree_topk: {topk} — trees are verified at temperature 0 only, and evaluator.temperature is {temperature}. "
            "Set evaluator.tree_topk=1 or evaluator.temperature=0."
        )
    candidates = TreeShape(num_draft_tokens, topk, 0).num_candidates
    if num_tokens is not None and num_tokens > candidates:
        problems.append(
            f"evaluator.tree_num_tokens: {num_tokens} — a tree of evaluator.num_draft_tokens={num_draft_tokens} steps with "
            f"evaluator.tree_topk={topk} has {candidates} candidates. Set evaluator.tree_num_tokens={candidates} or less."
        )
    return problems


def tree_shape(num_draft_tokens: int, topk: int, num_tokens: int | None, temperature: float) -> TreeShape | None:
    """The tree that these keys describe, or None for a chain. Raises :class:`ConfigError`."""
    problems = tree_problems(num_draft_tokens, topk, num_tokens, temperature)
    if problems:
        raise ConfigError(problems)
    return None if topk == 1 else TreeShape(num_draft_tokens, topk, num_tokens or topk * num_draft_tokens)
