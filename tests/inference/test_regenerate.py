"""regenerate: answers are the engine's, turn by turn; a stopped run goes on; other settings are never mixed into one file."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from specforge.commands.regenerate import SamplingOptions, regenerate_file
from specforge.errors import DataError

TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}<s> assistant {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(97)}
    for place, word in enumerate(["<unk>", "<s>", "</s>", "user", "assistant"]):
        del words[f"w{place}"]
        words[word] = place
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(text):
    return {"role": "user", "content": text}


OPTIONS = SamplingOptions(max_new_tokens=6, temperature=0.0, top_p=1.0, seed=0)
ROWS = [
    {"id": "a", "family": "one", "messages": [user("w5 w6")]},
    {"id": "b", "messages": [user("w7"), {"role": "assistant", "content": "w9 w9"}, user("w8 w10")]},
    {"prompt": "w11 w12 w13"},
]


def test_answers_are_the_targets_own_turn_by_turn(tmp_path, make_engine, tokenizer):
    engine = make_engine()
    engine.stop_token_ids = tuple(range(50, 97))
    written = regenerate_file(
        engine, tokenizer, write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl", options=OPTIONS, batch_size=2
    )
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written == 3 and [row["id"] for row in rows[:2]] == ["a", "b"] and rows[0]["family"] == "one"
    for row in rows:
        history, answers = [], list(row["response_ids"])
        for message in row["messages"]:
            if message["role"] == "assistant":
                prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
                expected = engine.generate(
                    [prompt], max_new_tokens=6, temperature=0.0, top_p=1.0, seed=0, stop_token_ids=engine.stop_token_ids
                )[0]
                assert answers.pop(0) == expected
                assert row["finish"] == "length" or expected[-1] in engine.stop_token_ids
            history.append(message)
        assert not answers and row["sampling"]["max_new_tokens"] == 6 and row["target"]["name"] == "tiny"
    assert "w9 w9" not in json.dumps(rows[1]["messages"])


def test_a_stopped_run_goes_on_and_gives_the_same_file(tmp_path, make_engine, tokenizer):
    engine = make_engine()
    sampled = SamplingOptions(6, 1.0, 0.9, 3)
    prompts = write_rows(tmp_path / "in.jsonl", [{"id": f"r{i}", "messages": [user(f"w{i + 5} w{i + 9}")]} for i in range(7)])
    regenerate_file(engine, tokenizer, prompts, tmp_path / "whole.jsonl", options=sampled, batch_size=7)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])
    assert regenerate_file(engine, tokenizer, prompts, tmp_path / "cut.jsonl", options=sampled, batch_size=2) == 4
    assert (tmp_path / "cut.jsonl").read_bytes() == whole
    with pytest.raises(DataError, match=r"line 1 was made with sampling.*'seed': 3.*'seed': 4"):
        regenerate_file(engine, tokenizer, prompts, tmp_path / "cut.jsonl", options=SamplingOptions(6, 1.0, 0.9, 4), batch_size=2)
    (tmp_path / "other.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(DataError, match="is not a row that regenerate wrote"):
        regenerate_file(engine, tokenizer, prompts, tmp_path / "other.jsonl", options=sampled, batch_size=2)


def test_input_without_a_usable_prompt_is_refused(tmp_path, make_engine, tokenizer):
    prompts = write_rows(tmp_path / "in.jsonl", [{"text": "no known form"}])
    with pytest.raises(DataError, match="no usable prompt"):
        regenerate_file(make_engine(), tokenizer, prompts, tmp_path / "out.jsonl", options=OPTIONS, batch_size=2)
