"""One row of a chat file as a checked conversation, whichever of the three forms it is written in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

RowFormat = Literal["auto", "messages", "sharegpt", "prompt"]
Message = dict[str, Any]

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
# Other writers call the same field by these names; templates read the first.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_OTHER_MESSAGE_KEYS = ("tool_calls", "tool_call_id", "name")
_ROW_KEYS = ("messages", "conversations", "prompt", "response", "completion", "system", "tools", "response_ids", "id")


class RowProblem(ValueError):
    """Why a row cannot be used; the caller adds file and line."""


@dataclass(frozen=True)
class Conversation:
    """A checked row. ``response_ids`` holds the generated token ids of replies that `regenerate` wrote, by message index."""

    messages: list[Message]
    row_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    response_ids: dict[int, list[int]] = field(default_factory=dict)
    where: str = ""  # file:line
    line: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # the row's other keys, handed through by `regenerate`

    @property
    def reply_indices(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def prompt_turns(self) -> list[list[Message]]:
        """The messages between replies: what is to be sent before the first, second, … reply; existing replies are left out.

        Two user messages in a row are two turns: each is answered before the next is sent.
        """
        turns: list[list[Message]] = []
        waiting: list[Message] = []
        for message in self.messages:
            if message["role"] == "assistant":
                continue
            waiting.append(message)
            if message["role"] == "user":
                turns.append(waiting)
                waiting = []
        return turns


def detect_format(row: Mapping[str, Any]) -> RowFormat:
    """The form of a row by its keys; raises :class:`RowProblem` when it has none of them."""
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        return "sharegpt"
    if "prompt" in row:
        return "prompt"
    raise RowProblem(f"no key of a known form (messages, conversations or prompt); the row has: {', '.join(map(str, row)) or 'no key'}")


def parse_row(row: Any, row_format: RowFormat, *, prompts_only: bool = False, where: str = "", line: int = 0) -> Conversation:
    """Check one decoded JSON row. ``prompts_only`` asks for at least one user message instead of at least one reply.

    Trailing messages after the last reply are dropped unless ``prompts_only``. Raises :class:`RowProblem` with the reason.
    """
    if not isinstance(row, Mapping):
        raise RowProblem(f"the row is {_kind(row)}, not an object")
    chosen = detect_format(row) if row_format == "auto" else row_format
    messages = {"messages": _from_messages, "sharegpt": _from_sharegpt, "prompt": _from_prompt}[chosen](row)
    _check_order(messages, prompts_only)
    if not prompts_only:
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        messages = messages[: last + 1]
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, Mapping) for t in tools)):
        raise RowProblem(f"tools is {_kind(tools)}, not a list of objects")
    row_id = row.get("id")
    conversation = Conversation(
        messages=messages,
        row_id=None if row_id is None else str(row_id),
        tools=[dict(t) for t in tools] if tools else None,
        where=where,
        line=line,
        extra={key: value for key, value in row.items() if key not in _ROW_KEYS},
    )
    if row.get("response_ids") is not None and not prompts_only:
        conversation.response_ids.update(_response_ids(row["response_ids"], conversation.reply_indices))
    return conversation


def _kind(value: Any) -> str:
    names = {type(None): "null", str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _list_of(row: Mapping[str, Any], key: str) -> list[Any]:
    if key not in row:
        raise RowProblem(f"the key '{key}' is missing; the row has: {', '.join(map(str, row)) or 'no key'}")
    items = row[key]
    if not isinstance(items, list):
        raise RowProblem(f"{key} is {_kind(items)}, not a list")
    if not items:
        raise RowProblem(f"{key} is empty")
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise RowProblem(f"{key}[{i}] is {_kind(item)}, not an object")
    return items


def _from_messages(row: Mapping[str, Any]) -> list[Message]:
    items = _list_of(row, "messages")
    return [_message(item.get("role"), item.get("content"), item, f"messages[{i}]") for i, item in enumerate(items)]


def _from_sharegpt(row: Mapping[str, Any]) -> list[Message]:
    items = _list_of(row, "conversations")
    messages = []
    if row.get("system"):
        messages.append(_message("system", row["system"], {}, "system"))
    for i, item in enumerate(items):
        if "from" not in item or "value" not in item:
            raise RowProblem(f"conversations[{i}] needs the keys 'from' and 'value'; it has: {', '.join(map(str, item)) or 'no key'}")
        speaker = item["from"]
        role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise RowProblem(f"conversations[{i}].from is {speaker!r}; known are {', '.join(_SHAREGPT_ROLES)}")
        messages.append(_message(role, item["value"], item, f"conversations[{i}]"))
    return messages


def _from_prompt(row: Mapping[str, Any]) -> list[Message]:
    prompt = row.get("prompt")
    messages = [_message("system", row["system"], {}, "system")] if row.get("system") else []
    if isinstance(prompt, list):  # the prompt is itself a list of messages
        messages += _from_messages({"messages": prompt})
    else:
        messages.append(_message("user", prompt, {}, "prompt"))
    for key in ("response", "completion"):
        if key in row:
            reasoning = {name: row[name] for name in _REASONING_KEYS if name in row}
            messages.append(_message("assistant", row[key], reasoning, key))
            break
    return messages


def _message(role: Any, content: Any, source: Mapping[str, Any], where: str) -> Message:
    """One checked message with the keys that templates read."""
    if not isinstance(role, str) or role not in _ROLES:
        raise RowProblem(f"{where}.role is {role!r}; allowed are {', '.join(_ROLES)}")
    message: Message = {"role": role}
    if role == "assistant":
        reasoning = next((source[key] for key in _REASONING_KEYS if source.get(key) is not None), None)
        if reasoning is not None and not isinstance(reasoning, str):
            raise RowProblem(f"{where}: the reasoning is {_kind(reasoning)}, not a string")
        if reasoning:
            message["reasoning_content"] = reasoning
    for key in _OTHER_MESSAGE_KEYS:
        if source.get(key) is not None:
            message[key] = source[key]
    may_be_empty = role == "assistant" and bool(message.get("tool_calls"))
    message["content"] = "" if content is None and may_be_empty else _text(content, where)
    if not message["content"].strip() and not may_be_empty:
        raise RowProblem(f"{where}: the content of the {role} message is empty")
    return message


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content):
        other = [part.get("type") for part in content if part.get("type") != "text" or not isinstance(part.get("text"), str)]
        if other:
            raise RowProblem(f"{where}: content part of type {other[0]!r}; only text is supported")
        return "".join(part["text"] for part in content)
    raise RowProblem(f"{where}: the content is {_kind(content)}, not a string")


def _check_order(messages: Sequence[Message], prompts_only: bool) -> None:
    roles = [message["role"] for message in messages]
    turns = [role for role in roles if role not in ("system", "developer")]
    if not turns:
        raise RowProblem("there is no user message")
    if turns[0] != "user":
        raise RowProblem(f"the first message after the system prompt is of the {turns[0]}; it must be of the user")
    for before, role in zip(roles, roles[1:], strict=False):
        if role == "assistant" and before == "assistant":
            raise RowProblem("two assistant messages in a row")
        if role == "tool" and before not in ("assistant", "tool"):
            raise RowProblem(f"a tool message after a {before} message; it must follow the assistant's call")
        if role == "user" and before == "user" and not prompts_only:
            raise RowProblem("two user messages in a row")
        if role == "system" and before != "system":
            raise RowProblem(f"a system message after a {before} message; it must come first")
    if not prompts_only and "assistant" not in turns:
        raise RowProblem("there is no assistant message, so nothing to train on (prompts without answers go through `regenerate` first)")


def _response_ids(value: Any, replies: list[int]) -> dict[int, list[int]]:
    """Generated ids by message index: one list a reply, or one flat list for the last reply."""
    if not isinstance(value, list) or not value:
        raise RowProblem(f"response_ids is {'empty' if value == [] else _kind(value)}, not a list of token ids")
    lists = value if isinstance(value[0], list) else [value]
    if isinstance(value[0], list) and len(lists) != len(replies):
        raise RowProblem(f"response_ids has {len(lists)} lists for {len(replies)} assistant messages")
    for ids in lists:
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise RowProblem("response_ids must hold non-empty lists of token ids (integers from 0)")
    return dict(zip(replies[-len(lists) :], lists, strict=True))
