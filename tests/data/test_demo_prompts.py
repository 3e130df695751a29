"""The demo prompts: the committed files are what make_prompts writes, and nothing held out has a twin in training."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from specforge.data.demo import make_prompts

DEMO = Path(make_prompts.__file__).parent


def stored(name: str) -> list[dict]:
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


def test_committed_files_are_reproduced():
    train, held = make_prompts.split_rows(make_prompts.make_rows())
    assert stored("prompts_train.jsonl") == train
    assert stored("prompts_heldout.jsonl") == held


def test_ids_and_texts_are_unique():
    rows = make_prompts.make_rows()
    assert 2000 <= len(rows) <= 3000
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({tuple(m["content"] for m in row["messages"]) for row in rows}) == len(rows)


def test_split_is_spread_over_families_and_shares_no_slot_word():
    train, held = make_prompts.split_rows(make_prompts.make_rows())
    families = Counter(row["family"] for row in held)
    assert set(families) == {row["family"] for row in train} and len(families) >= 20
    assert min(families.values()) >= 3 and 100 <= len(held) <= 150
    assert not {row["slot"] for row in train} & {row["slot"] for row in held}


def test_rows_are_usable_prompts_and_some_have_two_turns():
    from specforge.data.report import DataReport
    from specforge.data.sources import read_conversations

    for name in ("prompts_train.jsonl", "prompts_heldout.jsonl"):
        report = DataReport()
        rows = list(read_conversations(DEMO / name, "messages", report, prompts_only=True))
        assert not report.skipped and len(rows) == report.rows
        assert {len(row.prompt_turns()) for row in rows} == {1, 2}
        assert all(1 <= len(m["content"]) < 400 and "{" not in m["content"] for row in rows for m in row.messages)
