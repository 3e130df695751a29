"""What `show-sample` and `prepare` print and write."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specforge.commands import prepare, show_sample
from specforge.data.dataset import TokenizedSample
from specforge.data.show import sample_text, token_pieces
from specforge.errors import ConfigError

ROWS = [
    {"messages": [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "I am fine 😀."}]},
    {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]},
    {"messages": []},
]


@pytest.fixture
def config(write_jsonl, tokenizer_folder, tmp_path, new_tokenizer, templates):
    folder = new_tokenizer(tmp_path / "target", templates["CHATML"])
    facts = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    (folder / "config.json").write_text(json.dumps(facts))
    node = {
        "_target_": "specforge.data.chat_data.ChatData",
        "train_path": str(write_jsonl(ROWS, "train.jsonl")),
        "eval_path": str(write_jsonl(ROWS[:1], "held.jsonl")),
        "format": "auto",
        "chat_template": None,
        "template_arguments": None,
        "max_length": 64,
        "turns": "all",
        "max_samples": None,
        "eval_max_samples": None,
        "cache": True,
        "num_workers": 0,
    }
    groups = {"data": node, "target": {"resolved_path": str(folder)}, "strategy": {"draft_vocab_size": 10}}
    return {**groups, "cache_dir": str(tmp_path / "cache"), "index": 0, "count": 2}


def test_brackets_hold_exactly_what_is_supervised(templated):
    tokenizer = templated().tokenizer
    ids = tokenizer("hello\nI am fine 😀.", add_special_tokens=False)["input_ids"]
    mask = np.arange(len(ids)) >= 4
    sample = TokenizedSample("x", np.asarray(ids, dtype=np.int32), mask, 1, 1)
    plain = sample_text(tokenizer, sample).plain
    inside = plain[plain.index("⟦") + 1 : plain.index("⟧")]
    assert inside.replace("·", "") == tokenizer.decode(ids[4:])
    assert plain.replace("·", "").replace("⟦", "").replace("⟧", "").replace("↵", "") == "hello\nI am fine 😀."
    assert "↵\n" in plain


def test_pieces_keep_the_tokens_of_one_character_together(templated):
    tokenizer = templated().tokenizer
    ids = tokenizer("a😀b", add_special_tokens=False)["input_ids"]
    pieces = token_pieces(tokenizer, ids, [True] * len(ids))
    assert [text for text, _, _ in pieces] == ["a", "😀", "b"] and sum(n for _, _, n in pieces) == len(ids)
    assert pieces[1][2] > 1


def test_show_sample_prints_samples_and_writes_nothing(config, tmp_path, capsys):
    assert show_sample.run(config, tmp_path / "run") == 0
    out = capsys.readouterr().out
    assert "sample 0" in out and "train.jsonl:1" in out and "sample 1" in out and "⟦" in out and "<|im_start|>" in out
    assert not (tmp_path / "run").exists()


def test_show_sample_refuses_an_index_out_of_range(config, tmp_path):
    with pytest.raises(ConfigError, match="index=2 count=2: the dataset has samples 0 to 1"):
        show_sample.run({**config, "index": 2}, tmp_path)


def test_prepare_prints_counts_and_writes_the_skipped_rows(config, tmp_path, capsys):
    assert prepare.run(config, tmp_path / "run") == 0
    out = capsys.readouterr().out
    assert "3 rows, 2 samples" in out and "train.jsonl:3: messages is empty" in out
    assert "supervised share" in out and "coverage" in out and "strategy.draft_vocab_size" in out
    summary = json.loads((tmp_path / "run" / "prepare.json").read_text())
    assert (summary["train"]["samples"], summary["train"]["skipped"], summary["eval"]["samples"]) == (2, 1, 1)
    assert [entry["draft_vocab_size"] for entry in summary["coverage"]] == [10]
    assert json.loads((tmp_path / "run" / "skipped_rows.jsonl").read_text()) == {"where": "train.jsonl:3", "reason": "messages is empty"}
    assert len(list((tmp_path / "cache" / "tokenized").iterdir())) == 2


def test_length_histogram_counts_every_sample():
    lengths = np.array([1, 2, 3, 4, 40, 50, 50])
    rows = prepare.length_histogram(lengths, 50)
    assert rows == [(1, 1, 1), (2, 3, 2), (4, 7, 1), (8, 15, 0), (16, 31, 0), (32, 50, 3)]
