"""Counts of what became of the rows of a chat file, and the reasons of those that were skipped."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class DataReport:
    """What reading and tokenizing one file did. ``skipped`` holds (file:line, reason) of every unusable row."""

    source: str = ""
    rows: int = 0
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    truncated: int = 0  # samples cut at max_length
    unsupervised: int = 0  # samples dropped since no supervised token was left
    split_by_template: int = 0  # rows that gave one sample per reply since the template rewrites history
    inexact_boundary: int = 0  # replies whose first character is not at the start of a token
    retokenized: int = 0  # regenerated replies whose text tokenizes to other ids than were generated
    duplicates: int = 0  # samples equal to an earlier one; kept
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def skip(self, where: str, reason: str) -> None:
        self.skipped.append((where, reason))

    def add(self, other: DataReport) -> None:
        """Add the counts of a part that was worked on elsewhere."""
        for name in ("truncated", "unsupervised", "split_by_template", "inexact_boundary", "retokenized"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped.extend(other.skipped)

    def lines(self, most: int = 20) -> list[str]:
        """The report for people: one line a fact, at most ``most`` skipped rows, then their number by kind."""
        out = [f"{self.source}: {self.rows} rows, {self.samples} samples, {self.tokens} tokens, {self.supervised_tokens} supervised"]
        if self.skipped:
            out.append(f"{len(self.skipped)} malformed rows skipped:")
            out += [f"  {where}: {reason}" for where, reason in self.skipped[:most]]
            if len(self.skipped) > most:
                kinds = Counter(reason.partition(";")[0] for _, reason in self.skipped)
                out.append(f"  … and {len(self.skipped) - most} more; by reason:")
                out += [f"  {count} × {reason}" for reason, count in kinds.most_common(8)]
        facts = {
            "samples truncated at data.max_length": self.truncated,
            "samples dropped, no supervised token left": self.unsupervised,
            "rows split into one sample per reply (the template rewrites history)": self.split_by_template,
            "replies that do not start on a token border (first token left unsupervised)": self.inexact_boundary,
            "regenerated replies whose text tokenizes differently (the generated ids were used)": self.retokenized,
            "samples equal to an earlier one": self.duplicates,
        }
        return out + [f"{count} {what}" for what, count in facts.items() if count] + self.notes

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DataReport:
        data: dict[str, Any] = json.loads(text)
        data["skipped"] = [(where, reason) for where, reason in data["skipped"]]
        return cls(**data)
