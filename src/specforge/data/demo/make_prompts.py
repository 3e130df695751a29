"""Writes the demo prompts: ``python -m specforge.data.demo.make_prompts OUT.jsonl`` (deterministic; no input, no network).

A row is ``{"id", "family", "slot", "messages": [user turns]}``; two user turns in a row mean that each is answered in turn.
With ``--split`` it writes ``<stem>_train.jsonl`` and ``<stem>_heldout.jsonl`` beside OUT instead. A slot word is held out
as a whole, in every family, so that no held-out prompt has a near-duplicate among the training prompts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from specforge.data.demo.prompt_families import FAMILIES

HELDOUT_PER_FAMILY = 3


def _number(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


def slot_key(slot: str) -> str:
    """The slot without its article: the word that must not stand on both sides of the split."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"^(a|an|the|my) ", "", slot.lower())).strip("-")


def _fill(template: str, slot: str, key: str) -> str:
    return template.format(x=slot, X=slot[0].upper() + slot[1:], n=("three", "four", "five")[_number(key) % 3])


def make_rows() -> list[dict[str, Any]]:
    """All prompts, in a fixed order that mixes the families (order of the hash of the row id)."""
    rows = []
    for family in FAMILIES:
        for slot in family.slots:
            draws = [(_number(f"{family.name}/{slot}/{index}"), index) for index in range(len(family.templates))]
            for _, index in sorted(draws)[: family.per_word]:
                template = family.templates[index]
                row_id = f"{family.name}-{slot_key(slot)[:40]}-{index}"
                turns = [template] if isinstance(template, str) else list(template)
                messages = [{"role": "user", "content": _fill(turn, slot, row_id)} for turn in turns]
                rows.append({"id": row_id, "family": family.name, "slot": slot_key(slot), "messages": messages})
    return sorted(rows, key=lambda row: _number(row["id"]))


def heldout_slots(rows: list[dict[str, Any]]) -> set[str]:
    """Slot words held out everywhere: in each family those of lowest hash, until the family has HELDOUT_PER_FAMILY rows."""
    by_family: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        by_family[row["family"]][row["slot"]] += 1
    held: set[str] = set()
    for counts in by_family.values():
        have = sum(count for slot, count in counts.items() if slot in held)
        for slot in sorted(counts, key=lambda s: _number(f"heldout/{s}")):
            if have >= HELDOUT_PER_FAMILY:
                break
            if slot not in held:
                held.add(slot)
                have += counts[slot]
    return held


def split_rows(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(train, held out); together they are ``rows`` in the same order."""
    held = heldout_slots(rows)
    return [r for r in rows if r["slot"] not in held], [r for r in rows if r["slot"] in held]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo prompts.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--split", action="store_true", help="write <stem>_train.jsonl and <stem>_heldout.jsonl")
    arguments = parser.parse_args()
    rows = make_rows()
    parts = {arguments.out: rows}
    if arguments.split:
        names = [arguments.out.with_name(f"{arguments.out.stem}_{part}.jsonl") for part in ("train", "heldout")]
        parts = dict(zip(names, split_rows(rows), strict=True))
    for path, part in parts.items():
        write_rows(path, part)
        print(f"{path.name}: {len(part)} prompts of {len({row['family'] for row in part})} families")


if __name__ == "__main__":
    main()
