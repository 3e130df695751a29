"""Packs documents into rows of a token budget: first fit in the given order, so that the same lengths give the same rows."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], max_row_tokens: int) -> list[list[int]]:
    """Rows of indices into ``lengths``, each index once; a row's lengths sum to at most ``max_row_tokens``.

    Each document goes into the first row that has room, in order; a document longer than the budget gets a row of its own.
    Raises :class:`ValueError` for a budget below 1.
    """
    if max_row_tokens < 1:
        raise ValueError(f"max_row_tokens must be at least 1, got {max_row_tokens}")
    rows: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        row = next((r for r, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([index])
            room.append(max_row_tokens - length)
        else:
            rows[row].append(index)
            room[row] -= length
    return rows
