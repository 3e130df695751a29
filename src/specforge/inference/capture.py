"""How samples are cut into forward passes: batches of similar length under a budget of padded tokens."""

from __future__ import annotations

from collections.abc import Sequence


def token_batches(lengths: Sequence[int], budget: int | None) -> list[list[int]]:
    """Indices of ``lengths`` in batches, longest first, so that rows × longest row stays within ``budget`` tokens.

    A sample longer than the budget is a batch of its own. ``budget=None`` gives one sample a batch, in the given order: then a
    sample's features cannot depend on its neighbours.
    """
    if budget is None:
        return [[i] for i in range(len(lengths))]
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def fill_up(missing_tokens: int, candidates: Sequence[int], budget: int) -> int:
    """How many of the announced ``candidates`` (lengths, in order) still fit beside ``missing_tokens`` into ``budget`` tokens."""
    taken = 0
    for length in candidates:
        missing_tokens += length
        if missing_tokens > budget:
            break
        taken += 1
    return taken
