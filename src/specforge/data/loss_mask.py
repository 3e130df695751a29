"""Which tokens of a conversation serving would have the target generate: m of conventions §1.

The text is rendered once as a whole; where each reply lies in it is found by comparing texts (or from the template's own
``{% generation %}`` blocks), and characters become tokens by the offsets of one encoding. Prefixes are never encoded again:
a tokenizer may merge across their ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from specforge.data.chat_template import ChatTemplate
from specforge.data.conversation import Conversation, Message

Turns = Literal["all", "last"]
Span = tuple[int, int]

_SENTINEL = "specforge-reply-5b1e"
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class RenderedSample:
    """A text and the character spans that the target generates in it; ``reply`` is the message index of its last reply."""

    text: str
    spans: tuple[Span, ...]
    reply: int


def render_samples(template: ChatTemplate, conversation: Conversation, turns: Turns) -> list[RenderedSample]:
    """One sample for the conversation, or one per reply when the template rewrites history (drops old thinking, say).

    Raises :class:`RowProblem` when the template refuses the conversation.
    """
    replies = conversation.reply_indices
    chosen = replies if turns == "all" else replies[-1:]
    parts = [render_reply(template, conversation.messages, reply, conversation.tools) for reply in chosen]
    whole = parts[-1]
    # A reply that the final text shows word for word, after the very prompt that led to it, can be supervised there.
    if all(whole.text.startswith(part.text[: part.spans[-1][1]]) for part in parts if part.spans):
        return [RenderedSample(whole.text, tuple(span for part in parts for span in part.spans), whole.reply)]
    return parts


def render_reply(template: ChatTemplate, messages: list[Message], reply: int, tools: list[Any] | None) -> RenderedSample:
    """The conversation up to and including message ``reply``, with only that reply supervised."""
    prompt = template.render(messages[:reply], tools, generation_prompt=True)
    marked: list[Span] | None = None
    if template.has_markers(tools):
        text, marked = template.render_marked(messages[: reply + 1], tools)
    else:
        text = template.render(messages[: reply + 1], tools)
    if not text.startswith(prompt):
        return _as_served(template, messages, reply, tools, prompt, text)
    start = len(prompt)
    if marked is None:
        return RenderedSample(text, ((start, _reply_end(template, messages, reply, tools, text, start)),), reply)
    spans = [(max(a, start), b) for a, b in marked if b > start]
    if spans:  # an author may leave the stop token out of the block; the target generates it all the same
        a, b = spans[-1]
        stop = template.special_at(text, b)
        spans[-1] = (a, stop[1]) if stop and stop[0] == b else (a, b)
    return RenderedSample(text, tuple(spans), reply)


def _reply_end(template: ChatTemplate, messages: list[Message], reply: int, tools: list[Any] | None, text: str, start: int) -> int:
    """End of the reply in ``text`` (which ends with it), stop token included.

    The reply is rendered again with its content replaced: what follows the replacement is what the template adds after a content.
    """
    message = messages[reply]
    probe_message = {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": _SENTINEL}
    probe = template.render([*messages[:reply], probe_message], tools)
    at = probe.rfind(_SENTINEL)
    tail = probe[at + len(_SENTINEL) :] if at >= 0 else ""
    stop = template.special_at(tail, 0)
    if not message.get("tool_calls") and at >= 0 and text.endswith(tail):
        content_end = len(text) - len(tail)
        return content_end + (stop[1] if stop else 0)
    # Calls are written after the content, perhaps with special tokens of their own: the reply ends at the last stop token.
    if stop and (found := text.rfind(tail[stop[0] : stop[1]])) >= start:
        return found + stop[1] - stop[0]
    last = template.special_at(text, start, last=True)
    return last[1] if last else len(text.rstrip())


def _as_served(
    template: ChatTemplate, messages: list[Message], reply: int, tools: list[Any] | None, prompt: str, text: str
) -> RenderedSample:
    """The reply after the prompt that serving sends, for a template whose history differs from it.

    Such a template supplies a think block (open, or empty and closed) in the generation prompt and drops it from past replies.
    """
    message = messages[reply]
    content = message["content"]
    reasoning = message.get("reasoning_content", "")
    if not reasoning and _THINK_CLOSE in content:
        head, _, content = content.rpartition(_THINK_CLOSE)
        reasoning, content = head.replace(_THINK_OPEN, "").strip("\n"), content.lstrip("\n")
    common = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text)))
    end = _reply_end(template, messages, reply, tools, text, common)
    found = text.rfind(content.strip(), common, end) if content.strip() else -1
    emitted = text[found:end] if found >= 0 else text[common:end]
    if prompt.rstrip().endswith(_THINK_OPEN):
        emitted = f"{reasoning}\n{_THINK_CLOSE}\n\n{emitted}"
    return RenderedSample(prompt + emitted, ((len(prompt), len(prompt) + len(emitted)),), reply)


def token_starts(offsets: np.ndarray) -> np.ndarray:
    """First character that each token covers, [S]; ``offsets`` is [S, 2].

    Some tokenizers trim white space from their offsets; it belongs to the token all the same, so a token starts no later than
    where the token before it ended.
    """
    before = np.concatenate([[0], offsets[:-1, 1]]) if len(offsets) else np.zeros(0, dtype=np.int64)
    return np.minimum(offsets[:, 0], before)


def mask_from_spans(offsets: np.ndarray, spans: tuple[Span, ...]) -> tuple[np.ndarray, int]:
    """(m [S] bool, number of spans that start inside a token).

    A token counts when its first character lies in a span: one that reaches into a reply from the prompt is none that the target
    would have generated after that prompt.
    """
    starts = token_starts(offsets)
    mask = np.zeros(len(offsets), dtype=bool)
    inexact = 0
    for a, b in spans:
        mask |= (starts >= a) & (starts < b)
        inexact += bool(np.any((starts < a) & (offsets[:, 1] > a)))
    return mask, inexact
