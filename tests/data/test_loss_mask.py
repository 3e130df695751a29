"""m[i] against hand-built texts whose generated parts are known by construction, and against what serving would be sent."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specforge.data.conversation import Conversation, RowProblem, parse_row
from specforge.data.loss_mask import mask_from_spans, render_samples, token_starts
from specforge.data.report import DataReport
from specforge.data.tokenization import TokenizeOptions, tokenize_conversations

U1, A1, U2, A2 = "How are you today?", "I am fine, thank you.", "What is the capital of France?", "Paris is the capital."


def conversation(*contents: str, system: str | None = None, reasoning: dict[int, str] | None = None) -> Conversation:
    messages = [{"role": "system", "content": system}] if system else []
    for i, content in enumerate(contents):
        message = {"role": ("user", "assistant")[i % 2], "content": content}
        if reasoning and i in reasoning:
            message["reasoning_content"] = reasoning[i]
        messages.append(message)
    return parse_row({"messages": messages}, "messages")


def by_construction(template, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
    """Slow reference: one encoding of the joined pieces, then token by token and character by character."""
    text = "".join(piece for piece, _ in pieces)
    generated = [flag for piece, flag in pieces for _ in piece]
    out = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [generated[a] for a, _ in out["offset_mapping"]]
    last = max(i for i, flag in enumerate(mask) if flag)
    return out["input_ids"][: last + 1], mask[: last + 1]


def tokenize(template, conv: Conversation, turns: str = "all", max_length: int = 10_000) -> list[tuple[list[int], list[bool]]]:
    samples = tokenize_conversations(template, [conv], TokenizeOptions(max_length, turns), DataReport())
    return [(ids.tolist(), mask.tolist()) for ids, mask, _, _ in samples]


def turn(role: str, content: str) -> list[tuple[str, bool]]:
    if role == "assistant":
        return [("<|im_start|>assistant\n", False), (content + "<|im_end|>", True), ("\n", False)]
    return [(f"<|im_start|>{role}\n{content}<|im_end|>\n", False)]


@pytest.mark.parametrize("jinja", ["CHATML", "MARKED"], ids=["rendered", "markers"])
def test_multi_turn_with_system_prompt(templated, jinja):
    template = templated(jinja)
    pieces = [*turn("system", "Be kind."), *turn("user", U1), *turn("assistant", A1), *turn("user", U2), *turn("assistant", A2)]
    assert tokenize(template, conversation(U1, A1, U2, A2, system="Be kind.")) == [by_construction(template, pieces)]


@pytest.mark.parametrize("jinja", ["CHATML", "MARKED"], ids=["rendered", "markers"])
def test_last_turn_only(templated, jinja):
    template = templated(jinja)
    history = [(text, False) for text, _ in [*turn("user", U1), *turn("assistant", A1)]]
    pieces = [*history, *turn("user", U2), *turn("assistant", A2)]
    assert tokenize(template, conversation(U1, A1, U2, A2), turns="last") == [by_construction(template, pieces)]


def test_header_and_trailing_newline_are_not_supervised_and_stop_token_is(templated):
    template = templated("CHATML")
    ((ids, mask),) = tokenize(template, conversation(U1, A1))
    supervised = [i for i, m in zip(ids, mask, strict=True) if m]
    assert template.tokenizer.decode(supervised) == A1 + "<|im_end|>"
    assert mask[-1]  # the newline after the stop token is cut away


def test_markers_without_stop_token_still_supervise_it(templated, templates):
    inside, outside = "{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}"
    jinja = templates["MARKED"].replace(inside, outside)
    template = templated(jinja)
    assert jinja != templates["MARKED"]
    assert tokenize(template, conversation(U1, A1)) == tokenize(templated("CHATML"), conversation(U1, A1))


def test_markers_decide_which_replies_count(templated, templates):
    jinja = templates["MARKED"].replace("m.role == 'assistant' %}", "m.role == 'assistant' and 'fine' not in m.content %}")
    template = templated(jinja)
    history = [(text, False) for text, _ in [*turn("user", U1), *turn("assistant", A1)]]
    pieces = [*history, *turn("user", U2), *turn("assistant", A2)]
    assert tokenize(template, conversation(U1, A1, U2, A2)) == [by_construction(template, pieces)]


def test_template_that_drops_old_thinking_makes_one_sample_per_reply(templated):
    template = templated("STRIPS_THINKING")
    thought = "<think>\nhello\n</think>\n\n"
    first = [*turn("user", U1), *turn("assistant", thought + A1)]
    second = [(text, False) for text, _ in [*turn("user", U1), *turn("assistant", A1)]] + [*turn("user", U2), *turn("assistant", A2)]
    conv = conversation(U1, A1, U2, A2, reasoning={1: "hello"})
    assert tokenize(template, conv) == [by_construction(template, first), by_construction(template, second)]
    assert tokenize(template, conv, turns="last") == [by_construction(template, second)]


def test_same_template_without_thinking_keeps_one_sample(templated):
    assert len(tokenize(templated("STRIPS_THINKING"), conversation(U1, A1, U2, A2))) == 1


def test_thinking_in_the_last_reply_is_supervised(templated):
    template = templated("STRIPS_THINKING")
    ((ids, mask),) = tokenize(template, conversation(U1, A1, reasoning={1: "hello"}))
    assert template.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == f"<think>\nhello\n</think>\n\n{A1}<|im_end|>"


def test_empty_think_block_of_the_generation_prompt_is_not_supervised(templated):
    template = templated("EMPTY_THINK_PROMPT")
    header = ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False)
    first = [*turn("user", U1), header, (A1 + "<|im_end|>", True)]
    history = [(text, False) for text, _ in [*turn("user", U1), *turn("assistant", A1)]]
    second = [*history, *turn("user", U2), header, (A2 + "<|im_end|>", True)]
    assert tokenize(template, conversation(U1, A1, U2, A2)) == [by_construction(template, first), by_construction(template, second)]


@pytest.mark.parametrize("inline", [False, True])
def test_open_think_block_supplied_by_the_prompt(templated, inline):
    template = templated("OPEN_THINK_PROMPT")
    conv = conversation(U1, f"<think>\nhello\n</think>\n\n{A1}") if inline else conversation(U1, A1, reasoning={1: "hello"})
    pieces = [*turn("user", U1), ("<|im_start|>assistant\n<think>\n", False), (f"hello\n</think>\n\n{A1}<|im_end|>", True)]
    assert tokenize(template, conv) == [by_construction(template, pieces)]


@pytest.mark.parametrize("content", ["end", "im_end", "assistant", "user", "<|im_start|>", "a<|im_end|>b", "\n", " \n x \n ", "日本 😀 é"])
def test_contents_that_look_like_the_template(templated, content):
    template = templated("CHATML")
    if not content.strip():
        content = "x" + content
    pieces = [*turn("user", content), *turn("assistant", content), *turn("user", content), *turn("assistant", content)]
    assert tokenize(template, conversation(content, content, content, content)) == [by_construction(template, pieces)]


def test_prompt_ids_are_a_prefix_as_serving_sends_them(templated):
    """The first supervised token of each reply comes right after the prompt's ids; random conversations."""
    template, rng = templated("CHATML"), random.Random(0)
    words = ["one", "two", "three", "hello", "yes", "no", "Paris", "fox", "😀", "é", ",", ".\n"]
    for _ in range(50):
        conv = conversation(*(" ".join(rng.choices(words, k=rng.randint(1, 8))).strip() or "x" for _ in range(2 * rng.randint(1, 4))))
        ((ids, mask),) = tokenize(template, conv)
        edges = np.flatnonzero(np.diff([0, *map(int, mask), 0])).reshape(-1, 2)
        assert len(edges) == len(conv.reply_indices)
        for (start, end), reply in zip(edges, conv.reply_indices, strict=True):
            assert template.render_prompt(conv.messages[:reply]) == ids[:start]
            assert template.tokenizer.decode(ids[start:end]) == conv.messages[reply]["content"] + "<|im_end|>"


def test_template_without_special_tokens_at_the_border(templated):
    """'ASSISTANT:' + ' I am' – the blank belongs to the reply, as the model generates it."""
    template = templated("PLAIN")
    ((ids, mask),) = tokenize(template, conversation(U1, A1))
    assert template.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == f" {A1}</s>"


def test_token_reaching_over_the_border_is_left_out_and_counted(templated, templates):
    """The generation prompt ends with a blank that the full text's tokenization joins to the first word."""
    template = templated(templates["PLAIN"].replace("'ASSISTANT:' }}", "'ASSISTANT: ' }}"))
    report = DataReport()
    ((ids, mask, _, _),) = tokenize_conversations(template, [conversation(U1, A1)], TokenizeOptions(999, "all"), report)
    assert template.tokenizer.decode(ids[mask]) == A1.removeprefix("I") + "</s>"
    assert report.inexact_boundary == 1


def test_trimmed_offsets_give_the_same_mask(templated, templates, new_tokenizer, tmp_path):

    from specforge.data.chat_template import ChatTemplate, load_tokenizer

    trimmed = ChatTemplate(load_tokenizer(new_tokenizer(tmp_path / "trimmed", None, trim_offsets=True)), templates["PLAIN"])
    exact = templated("PLAIN")
    conv = conversation("hi  \n there", "I am \n\n fine  ", U2, " \n " + A2)
    assert tokenize(trimmed, conv) == tokenize(exact, conv)


def test_token_starts_and_spans_on_split_characters():
    offsets = np.array([[0, 3], [3, 4], [3, 4], [3, 4], [5, 8]])  # one character of three tokens, then a trimmed blank
    assert token_starts(offsets).tolist() == [0, 3, 3, 3, 4]
    mask, inexact = mask_from_spans(offsets, ((3, 8),))
    assert mask.tolist() == [False, True, True, True, True] and inexact == 0
    assert mask_from_spans(offsets, ((1, 4),))[1] == 1


def test_tool_calls_are_supervised_to_the_stop_token(templated):
    jinja = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if m.tool_calls %}{{ '<tool>' + m.tool_calls[0].function.name + '</tool>' }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    template = templated(jinja)
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    row = [
        {"role": "user", "content": U1},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "yes"},
        {"role": "assistant", "content": A1},
    ]
    pieces = [*turn("user", U1), *turn("assistant", "<tool>weather</tool>"), *turn("tool", "yes"), *turn("assistant", A1)]
    assert tokenize(template, parse_row({"messages": row}, "messages")) == [by_construction(template, pieces)]


def test_template_refusal_names_the_reason(templated):
    template = templated("{% if messages|length > 1 %}{{ raise_exception('no replies here') }}{% endif %}")
    with pytest.raises(RowProblem, match="no replies here"):
        render_samples(template, conversation(U1, A1), "all")


def test_truncation_cuts_the_end_and_drops_what_has_no_reply_left(templated):
    template = templated("CHATML")
    ((ids, mask),) = tokenize(template, conversation(U1, A1))
    start = mask.index(True)
    report = DataReport()
    options = TokenizeOptions(start + 2, "all")
    ((cut, cut_mask, _, _),) = tokenize_conversations(template, [conversation(U1, A1)], options, report)
    assert cut.tolist() == ids[: start + 2] and cut_mask.sum() == 2 and report.truncated == 1
    report = DataReport()
    assert tokenize_conversations(template, [conversation(U1, A1)], TokenizeOptions(start, "all"), report) == []
    assert (report.truncated, report.unsupervised) == (1, 1)


def with_ids(conv: Conversation, response_ids) -> Conversation:
    return parse_row({"messages": conv.messages, "response_ids": response_ids}, "messages")


def test_response_ids_are_used_as_they_are(templated):
    """Generated ids that another tokenization of the same text would not give."""
    template = templated("CHATML")
    letters = [template.tokenizer(c, add_special_tokens=False)["input_ids"][0] for c in "fine"]
    stop = template.tokenizer.eos_token_id
    report = DataReport()
    conv = with_ids(conversation(U1, "fine"), [*letters, stop])
    ((ids, mask, _, _),) = tokenize_conversations(template, [conv], TokenizeOptions(999, "all"), report)
    prompt = template.render_prompt(conv.messages[:1])
    assert ids.tolist() == [*prompt, *letters, stop]
    assert mask.tolist() == [False] * len(prompt) + [True] * 5
    assert report.retokenized == 1


def test_response_ids_equal_to_the_text_are_not_counted_and_merge_over_turns(templated):
    template = templated("CHATML")
    conv = conversation(U1, A1, U2, A2)
    ((ids, mask),) = tokenize(template, conv)
    edges = np.flatnonzero(np.diff([0, *map(int, mask), 0])).reshape(-1, 2)
    report = DataReport()
    rows = with_ids(conv, [ids[a:b] for a, b in edges])
    ((got, got_mask, _, _),) = tokenize_conversations(template, [rows], TokenizeOptions(999, "all"), report)
    assert (got.tolist(), got_mask.tolist()) == (ids, mask)
    assert report.retokenized == 0


def test_response_ids_cut_by_a_limit_have_no_stop_token(templated):
    template = templated("CHATML")
    ((ids, mask),) = tokenize(template, conversation(U1, A1))
    response = [i for i, m in zip(ids, mask, strict=True) if m][:-1]
    report = DataReport()
    ((got, _, _, _),) = tokenize_conversations(template, [with_ids(conversation(U1, A1), response)], TokenizeOptions(999, "all"), report)
    assert got.tolist() == ids[:-1] and report.retokenized == 0
