"""Tokenized samples in flat arrays, so that millions of them cost no Python object and can be memory-mapped."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from specforge.data.report import DataReport
from specforge.runtime.contracts import PromptTask


@dataclass(frozen=True)
class TokenizedSample:
    """``input_ids`` [S] int32, ``loss_mask`` [S] bool (m of conventions §1); ``line`` and ``reply`` say where it came from."""

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    line: int
    reply: int


def content_id(input_ids: np.ndarray, loss_mask: np.ndarray) -> str:
    """Id that depends on the sample's content alone, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.ascontiguousarray(input_ids, dtype=np.int32).tobytes())
    digest.update(np.ascontiguousarray(loss_mask, dtype=bool).tobytes())
    return digest.hexdigest()


class TokenizedDataset:
    """Samples in file order. ``arrays`` are the flat arrays named in :data:`ARRAYS`; ``report`` says what was skipped."""

    # tokens int32 [T], mask bool [T], offsets int64 [n+1], lines int32 [n], replies int32 [n], sample_ids bytes [n]
    ARRAYS = ("tokens", "mask", "offsets", "lines", "replies", "sample_ids")

    def __init__(self, arrays: dict[str, np.ndarray], report: DataReport, digest: str) -> None:
        self.arrays = arrays
        self.report = report
        self.digest = digest
        self._tokens, self._mask, self._offsets = arrays["tokens"], arrays["mask"], arrays["offsets"]
        self._supervised: np.ndarray | None = None
        self._index: dict[str, int] | None = None

    @classmethod
    def build(cls, parts: Iterable[tuple[np.ndarray, np.ndarray, int, int]], report: DataReport) -> TokenizedDataset:
        """From (ids, mask, line, reply) of each sample. Equal samples get the suffixes -1, -2, … so that every id is unique."""
        ids, masks, lines, replies, names = [], [], [], [], []
        seen: Counter[str] = Counter()
        for input_ids, mask, line, reply in parts:
            name = content_id(input_ids, mask)
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name}-{seen[name] - 1}")
            ids.append(np.asarray(input_ids, dtype=np.int32))
            masks.append(np.asarray(mask, dtype=bool))
            lines.append(line)
            replies.append(reply)
        arrays = {
            "tokens": np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32),
            "mask": np.concatenate(masks) if masks else np.zeros(0, dtype=bool),
            "offsets": np.concatenate([[0], np.cumsum([len(i) for i in ids], dtype=np.int64)]).astype(np.int64),
            "lines": np.asarray(lines, dtype=np.int32),
            "replies": np.asarray(replies, dtype=np.int32),
            "sample_ids": np.asarray([name.encode() for name in names], dtype="S48"),
        }
        report.samples = len(ids)
        report.tokens = int(arrays["offsets"][-1])
        report.supervised_tokens = int(arrays["mask"].sum())
        report.duplicates = sum(count - 1 for count in seen.values())
        return cls(arrays, report, cls.digest_of(arrays))

    @classmethod
    def digest_of(cls, arrays: dict[str, np.ndarray]) -> str:
        """Hex digest over all arrays, names and types included."""
        digest = hashlib.blake2b(digest_size=16)
        for name in cls.ARRAYS:
            array = np.ascontiguousarray(arrays[name])
            digest.update(f"{name}:{array.dtype.str}:{array.shape}".encode())
            digest.update(array.data if array.dtype.kind != "S" else array.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> PromptTask:
        sample = self.sample(index)
        return PromptTask(sample.sample_id, tuple(sample.input_ids.tolist()), tuple(sample.loss_mask.astype(int).tolist()))

    def _range(self, index: int) -> slice:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index}: the dataset has {len(self)} samples")
        index %= len(self)
        return slice(int(self._offsets[index]), int(self._offsets[index + 1]))

    def sample(self, index: int) -> TokenizedSample:
        """Sample ``index`` with views of the flat arrays."""
        where = self._range(index)
        line, reply = int(self.arrays["lines"][index]), int(self.arrays["replies"][index])
        return TokenizedSample(self.sample_id(index), self._tokens[where], self._mask[where], line, reply)

    def sample_id(self, index: int) -> str:
        return self.arrays["sample_ids"][index].decode()

    def index_of(self, sample_id: str) -> int:
        """Index of a sample id; ``KeyError`` if it is not here."""
        if self._index is None:
            self._index = {name.decode(): i for i, name in enumerate(self.arrays["sample_ids"].tolist())}
        return self._index[sample_id]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [n]."""
        return np.diff(self._offsets)

    @property
    def supervised(self) -> np.ndarray:
        """Supervised tokens of each sample, int64 [n]."""
        if self._supervised is None:
            self._supervised = np.add.reduceat(self._mask.astype(np.int64), self._offsets[:-1]) if len(self) else np.zeros(0, np.int64)
        return self._supervised

    def num_tokens(self, index: int) -> int:
        where = self._range(index)
        return where.stop - where.start

    def num_supervised(self, index: int) -> int:
        return int(self.supervised[index])

    def supervised_ids(self) -> np.ndarray:
        """All supervised token ids in order, int32."""
        return self._tokens[self._mask]

    def reply_spans(self, index: int) -> list[tuple[int, int]]:
        """Token ranges [start, end) that are supervised in a row. ``input_ids[:start]`` is what serving was sent before that reply."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self._mask[self._range(index)].astype(np.int8), [0]])))
        return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
