"""The mark of a request: its ``rid``, the one field that reaches the model runner of every SGLang release unchanged.

    specforge:1:<transport>:<attempt>:<nonce>:<tokens>:<supervised runs>:<name>     capture this prompt
    specforge:1:identity:<nonce>                                                    say what you are

A mark holds all that the server's side must know of a sample, so no other field of SGLang's interface is needed. Health probes have
rids of their own and are never marked.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PREFIX = "specforge:"
_VERSION = "1"
_IDENTITY = f"{PREFIX}{_VERSION}:identity:"

Transport = Literal["store", "inline"]
_CODES: dict[str, Transport] = {"s": "store", "i": "inline"}


@dataclass(frozen=True)
class Mark:
    """One capture: ``name`` is the sample id in the store, ``runs`` where the loss mask is 1 (half-open)."""

    transport: Transport
    attempt: int
    num_tokens: int
    runs: tuple[tuple[int, int], ...]
    name: str

    @classmethod
    def of(cls, name: str, loss_mask: Sequence[int], attempt: int, transport: Transport) -> Mark:
        return cls(transport, attempt, len(loss_mask), tuple(_runs(loss_mask)), name)

    def rid(self) -> str:
        """A request id that no other request has, also not a repetition of this one."""
        runs = ".".join(f"{start}-{end}" for start, end in self.runs)
        return f"{PREFIX}{_VERSION}:{self.transport[0]}:{self.attempt}:{secrets.token_hex(4)}:{self.num_tokens}:{runs}:{self.name}"

    def loss_mask(self) -> list[bool]:
        mask = [False] * self.num_tokens
        for start, end in self.runs:
            mask[start:end] = [True] * (end - start)
        return mask

    def argmax_rows(self) -> list[int]:
        """Rows whose next token is supervised."""
        return [i - 1 for start, end in self.runs for i in range(max(1, start), end)]


def is_marked(rid: object) -> bool:
    return isinstance(rid, str) and rid.startswith(PREFIX)


def is_identity(rid: str) -> bool:
    return rid.startswith(_IDENTITY)


def identity_rid() -> str:
    return _IDENTITY + secrets.token_hex(8)


def read_mark(rid: str) -> Mark:
    """The mark in a request id. Raises ``ValueError`` for another version or a damaged one."""
    parts = rid.removeprefix(PREFIX).split(":", 6)
    if len(parts) != 7 or parts[0] != _VERSION or parts[1] not in _CODES:
        raise ValueError(f"the request id {rid[:80]!r} is no mark of version {_VERSION}; use the same specforge release on both sides")
    runs = tuple((int(start), int(end)) for start, _, end in (run.partition("-") for run in parts[5].split(".") if run))
    return Mark(_CODES[parts[1]], int(parts[2]), int(parts[4]), runs, parts[6])


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    start: int | None = None
    for i, supervised in enumerate((*mask, 0)):
        if supervised and start is None:
            start = i
        elif not supervised and start is not None:
            runs.append((start, i))
            start = None
    return runs
