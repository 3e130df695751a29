"""The draft vocabulary: which target tokens the draft's head knows, and the two maps between the vocabularies (conventions §6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specforge.errors import DataError

if TYPE_CHECKING:
    from specforge.data.dataset import TokenizedDataset


@dataclass(frozen=True)
class VocabularyMap:
    """``d2t`` int64 [Vd]: target id of draft id j is j + d2t[j]. ``t2d`` bool [V]: the target id is kept.

    ``coverage`` is the share of supervised training tokens that are kept (1.0 when there are none).
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    coverage: float

    @property
    def target_ids(self) -> torch.Tensor:
        """Kept target ids, ascending, int64 [Vd]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def draft_vocab_size(self) -> int:
        return len(self.d2t)

    @property
    def vocab_size(self) -> int:
        return len(self.t2d)

    @property
    def is_identity(self) -> bool:
        return self.draft_vocab_size == self.vocab_size

    @classmethod
    def identity(cls, vocab_size: int) -> VocabularyMap:
        """Every target id kept: Vd = V."""
        return cls(torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool), 1.0)

    @classmethod
    def count(cls, dataset: TokenizedDataset, vocab_size: int, draft_vocab_size: int | None) -> VocabularyMap:
        """The ``draft_vocab_size`` most frequent supervised ids of ``dataset`` (null: all).

        Raises :class:`DataError` when a token id is not below ``vocab_size``.
        """
        return cls.from_counts(supervised_counts(dataset, vocab_size), draft_vocab_size or vocab_size)

    @classmethod
    def from_counts(cls, counts: np.ndarray, draft_vocab_size: int) -> VocabularyMap:
        """Map from the count of each target id, [V]; ties and fill-up go to the lowest id."""
        vocab_size = len(counts)
        if not 1 <= draft_vocab_size <= vocab_size:
            raise DataError(
                f"draft vocabulary of {draft_vocab_size}: allowed is 1 to the target's vocabulary of {vocab_size}. "
                "Set strategy.draft_vocab_size lower, or null for the whole vocabulary."
            )
        # A stable sort keeps equal counts in ascending id order.
        kept = np.sort(np.argsort(-counts.astype(np.int64), kind="stable")[:draft_vocab_size])
        total = int(counts.sum())
        t2d = np.zeros(vocab_size, dtype=bool)
        t2d[kept] = True
        d2t = kept.astype(np.int64) - np.arange(draft_vocab_size)
        coverage = float(counts[kept].sum()) / total if total else 1.0
        return cls(torch.from_numpy(d2t), torch.from_numpy(t2d), coverage)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """For a checkpoint; the inverse is :meth:`from_tensors`."""
        return {"d2t": self.d2t, "t2d": self.t2d, "coverage": torch.tensor(self.coverage, dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> VocabularyMap:
        """Raises :class:`DataError` when the two maps do not belong together."""
        d2t, t2d = tensors["d2t"].to(torch.int64), tensors["t2d"].to(torch.bool)
        ids = d2t + torch.arange(len(d2t), device=d2t.device)
        if not torch.equal(torch.nonzero(t2d).flatten(), ids):
            raise DataError(f"vocabulary map: d2t ({len(d2t)} ids) and t2d ({int(t2d.sum())} of {len(t2d)} kept) do not belong together.")
        coverage = tensors.get("coverage")
        return cls(d2t, t2d, 1.0 if coverage is None else float(coverage))


def supervised_counts(dataset: TokenizedDataset, vocab_size: int) -> np.ndarray:
    """How often each target id is supervised, int64 [V]."""
    tokens = dataset.supervised_ids()
    largest = int(tokens.max(initial=0))
    if largest >= vocab_size:
        raise DataError(
            f"the tokenizer gave the id {largest}, but the target's vocabulary has {vocab_size} entries. "
            "Use the tokenizer that belongs to the target (target.path)."
        )
    return np.bincount(tokens, minlength=vocab_size)
