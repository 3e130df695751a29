"""The three row forms, and every kind of malformed row with its file, line and reason."""

from __future__ import annotations

import gzip
import json

import pytest

from specforge.data.conversation import RowProblem, parse_row
from specforge.data.report import DataReport
from specforge.data.sources import read_conversations, resolve_path
from specforge.errors import DataError

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
GOOD = {"messages": [USER, REPLY]}


def read(path, row_format="auto", **options):
    report = DataReport(source=path.name)
    return list(read_conversations(path, row_format, report, **options)), report


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, REPLY]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"prompt": "hi", "response": "hello"},
        {"prompt": "hi", "completion": "hello"},
        {"prompt": [USER], "response": "hello"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, REPLY]},
        {"messages": [USER, REPLY, {"role": "user", "content": "a turn without reply"}]},
    ],
)
def test_forms_give_the_same_conversation(row):
    assert parse_row(row, "auto").messages == [USER, REPLY]


def test_system_tools_thinking_and_other_keys():
    call = {"function": {"name": "f", "arguments": {}}}
    row = {
        "id": 7,
        "family": "x",
        "tools": [{"type": "function"}],
        "messages": [
            {"role": "system", "content": "s"},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call], "thinking": "hm"},
            {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
            REPLY,
        ],
    }
    conversation = parse_row(row, "auto")
    assert conversation.row_id == "7" and conversation.extra == {"family": "x"} and conversation.tools == row["tools"]
    assert conversation.messages[2] == {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"}
    assert conversation.messages[3] == {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"}
    assert conversation.reply_indices == [2, 4]


MALFORMED = [
    ("{not json", "not JSON"),
    ("null", "the row is null"),
    ("[1, 2]", "the row is a list"),
    ('"text"', "the row is a string"),
    ("{}", "no key of a known form"),
    ('{"text": "x"}', "no key of a known form (messages, conversations or prompt); the row has: text"),
    ('{"messages": null}', "messages is null"),
    ('{"messages": "hi"}', "messages is a string"),
    ('{"messages": []}', "messages is empty"),
    ('{"messages": ["hi"]}', "messages[0] is a string"),
    ('{"messages": [null]}', "messages[0] is null"),
    ('{"messages": [{"content": "hi"}]}', "messages[0].role is None"),
    ('{"messages": [{"role": "human", "content": "hi"}]}', "messages[0].role is 'human'; allowed are"),
    ('{"messages": [{"role": 3, "content": "hi"}]}', "messages[0].role is 3"),
    ('{"messages": [{"role": "user", "content": null}]}', "messages[0]: the content is null"),
    ('{"messages": [{"role": "user", "content": 5}]}', "messages[0]: the content is a number"),
    ('{"messages": [{"role": "user", "content": {"a": 1}}]}', "messages[0]: the content is an object"),
    ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "content part of type 'image'"),
    ('{"messages": [{"role": "user", "content": []}]}', "messages[0]: the content is a list"),
    ('{"messages": [{"role": "user", "content": "  "}, {"role": "assistant", "content": "x"}]}', "the user message is empty"),
    (json.dumps({"messages": [USER, {"role": "assistant", "content": ""}]}), "the assistant message is empty"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "the first message after the system prompt is of the assistant"),
    ('{"messages": [{"role": "system", "content": "x"}]}', "there is no user message"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "there is no assistant message"),
    (json.dumps({"messages": [USER, REPLY, REPLY]}), "two assistant messages in a row"),
    (json.dumps({"messages": [USER, USER, REPLY]}), "two user messages in a row"),
    (json.dumps({"messages": [USER, {"role": "tool", "content": "x"}, REPLY]}), "a tool message after a user message"),
    (json.dumps({"messages": [USER, {"role": "system", "content": "x"}, REPLY]}), "a system message after a user message"),
    (json.dumps({"messages": [USER, {**REPLY, "reasoning_content": 3}]}), "the reasoning is a number"),
    ('{"conversations": [{"from": "human"}]}', "conversations[0] needs the keys 'from' and 'value'"),
    ('{"conversations": [{"from": "narrator", "value": "x"}]}', "conversations[0].from is 'narrator'"),
    ('{"conversations": [{"from": null, "value": "x"}]}', "conversations[0].from is None"),
    ('{"prompt": null, "response": "x"}', "prompt: the content is null"),
    ('{"prompt": "x"}', "there is no assistant message"),
    (json.dumps({**GOOD, "tools": "x"}), "tools is a string"),
    (json.dumps({**GOOD, "response_ids": []}), "response_ids is empty"),
    (json.dumps({**GOOD, "response_ids": "1 2"}), "response_ids is a string"),
    (json.dumps({**GOOD, "response_ids": [1, "2"]}), "response_ids must hold"),
    (json.dumps({**GOOD, "response_ids": [-1]}), "response_ids must hold"),
    (json.dumps({**GOOD, "response_ids": [[1], [2]]}), "response_ids has 2 lists for 1 assistant messages"),
    ("[" * 100_000, "not usable JSON"),
]


def test_each_malformed_row_is_reported_with_file_line_and_reason(write_jsonl):
    path = write_jsonl([GOOD, *(text for text, _ in MALFORMED), "", GOOD])
    conversations, report = read(path)
    assert [c.line for c in conversations] == [1, len(MALFORMED) + 3]
    assert report.rows == len(MALFORMED) + 2  # the blank line is no row
    assert [where for where, _ in report.skipped] == [f"chats.jsonl:{i + 2}" for i in range(len(MALFORMED))]
    for (_, reason), (text, expected) in zip(report.skipped, MALFORMED, strict=True):
        assert expected in reason, text[:80]


def test_report_names_rows_and_counts_the_rest(write_jsonl):
    _, report = read(write_jsonl([GOOD, *["{bad"] * 30]))
    lines = report.lines(most=5)
    assert "30 malformed rows skipped:" in lines
    assert any(line.strip().startswith("chats.jsonl:2: not JSON") for line in lines)
    assert any("and 25 more" in line for line in lines)


def test_not_utf8_is_one_malformed_row(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "response": "x"}\n' + json.dumps(GOOD).encode() + b"\n")
    conversations, report = read(path)
    assert len(conversations) == 1 and "not UTF-8" in report.skipped[0][1]


def test_byte_order_mark_and_gzip(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + json.dumps(GOOD).encode()))
    assert len(read(path)[0]) == 1
    assert resolve_path(str(tmp_path / "x.jsonl"), "data.train_path") == path


def test_damaged_gzip_is_one_clear_error(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 100)[:40])
    with pytest.raises(DataError, match="x.jsonl.gz cannot be read"):
        read(path)


def test_fixed_format_refuses_the_other_forms(write_jsonl):
    path = write_jsonl([GOOD, {"prompt": "a", "response": "b"}])
    conversations, report = read(path, "prompt")
    assert len(conversations) == 1 and "the content is null" in report.skipped[0][1]


def test_max_samples_counts_usable_rows(write_jsonl):
    conversations, report = read(write_jsonl(["{bad", GOOD, GOOD, GOOD, "{bad"]), max_samples=2)
    assert [c.line for c in conversations] == [2, 3]
    assert len(report.skipped) == 1


def test_prompts_keep_two_user_turns_and_drop_answers(write_jsonl):
    rows = [
        {"messages": [{"role": "system", "content": "s"}, USER, {"role": "user", "content": "more"}]},
        {"prompt": "alone"},
        GOOD,
    ]
    conversations, _ = read(write_jsonl(rows), prompts_only=True)
    assert [[m["content"] for turn in c.prompt_turns() for m in turn] for c in conversations] == [["s", "hi", "more"], ["alone"], ["hi"]]
    assert [len(turn) for turn in conversations[0].prompt_turns()] == [2, 1]


def test_two_user_messages_are_refused_for_training():
    with pytest.raises(RowProblem, match="two user messages"):
        parse_row({"messages": [USER, USER, REPLY]}, "auto")


def test_missing_path_names_key_path_and_close_matches(tmp_path):
    (tmp_path / "train_chats.jsonl").write_text("")
    with pytest.raises(DataError) as error:
        resolve_path(str(tmp_path / "train_chat.jsonl"), "data.train_path")
    assert f"data.train_path={tmp_path}/train_chat.jsonl" in str(error.value)
    assert "Did you mean train_chats.jsonl" in str(error.value)


def test_missing_folder_folder_instead_of_file_and_missing_package(tmp_path):
    with pytest.raises(DataError, match="does not exist either"):
        resolve_path(str(tmp_path / "no" / "x.jsonl"), "data.eval_path")
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match="is a folder; give one file. It holds: a.jsonl"):
        resolve_path(str(tmp_path), "data.train_path")
    with pytest.raises(DataError, match="the package 'no_such_package_x' is not installed"):
        resolve_path("package://no_such_package_x/a.jsonl", "data.train_path")


def test_package_path():
    assert resolve_path("package://specforge/data/demo/prompts_heldout.jsonl", "data.train_path").is_file()
