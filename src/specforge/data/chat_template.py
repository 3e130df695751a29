"""The target's tokenizer and its own chat template: conversations to text, and text to token ids, exactly as in serving."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specforge.data.conversation import Message, RowProblem
from specforge.errors import DataError, TargetError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model", "spiece.model")
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The fast tokenizer of a local Hugging Face folder; :class:`TargetError` when the folder has none, or none with offsets."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise TargetError(
            f"target.path: {folder} has no tokenizer (looked for {', '.join(_TOKENIZER_FILES)}). "
            "Copy the tokenizer files of the target next to its config.json."
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many types for a damaged folder
        raise TargetError(f"target.path: the tokenizer in {folder} cannot be loaded ({error}). Fetch the tokenizer files again.") from None
    if not tokenizer.is_fast:
        raise TargetError(
            f"target.path: the tokenizer in {folder} has no tokenizer.json, and the loss mask needs character offsets. "
            "Save a fast tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Hex digest of everything that decides how text becomes ids."""
    return hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode(), digest_size=16).hexdigest()


def read_template(value: str | None) -> str | None:
    """``data.chat_template``: null (the tokenizer's own), a Jinja file, or Jinja text; raises :class:`DataError` for a missing file."""
    if value is None or "{%" in value or "{{" in value:
        return value
    file = Path(value).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"data.chat_template={value} cannot be read ({reason}). Give a Jinja file, Jinja text that contains '{{%' or '{{{{', "
            "or null for the tokenizer's own template."
        ) from None


class ChatTemplate:
    """A tokenizer with the template in use and its arguments (for example ``enable_thinking``).

    Raises :class:`DataError` when there is no template or it is not valid Jinja.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, arguments: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        self.override = template  # Jinja text in place of the tokenizer's own, or None
        if template is None and not tokenizer.chat_template:
            raise DataError(
                f"data.chat_template=null, but the tokenizer in {tokenizer.name_or_path} has no chat template. "
                "Set data.chat_template to a Jinja file or to Jinja text."
            )
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = sorted({*tokenizer.all_special_tokens, *added} - {""}, key=len, reverse=True)
        self._check_syntax()

    def _check_syntax(self) -> None:
        from jinja2.exceptions import TemplateError, TemplateSyntaxError

        try:
            self.render([{"role": "user", "content": "x"}])
        except RowProblem as problem:
            cause = problem.__cause__
            if isinstance(cause, TemplateSyntaxError):
                raise DataError(f"data.chat_template: not valid Jinja, line {cause.lineno}: {cause.message}") from None
            if not isinstance(cause, TemplateError):
                raise DataError(f"data.chat_template: {problem}") from None

    def source(self, tools: Sequence[Any] | None = None) -> str:
        """The Jinja text in use; some tokenizers have another one for conversations with tools."""
        return self.tokenizer.get_chat_template(self.override, tools)

    @property
    def digest(self) -> str:
        """Hex digest of template and arguments."""
        own = self.override if self.override is not None else self.tokenizer.chat_template
        text = json.dumps([own, self.arguments, self.tokenizer.special_tokens_map], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def has_markers(self, tools: Sequence[Any] | None = None) -> bool:
        """True when the template says itself what is generated, by ``{% generation %}`` blocks."""
        return _MARKER.search(self.source(tools)) is not None

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, generation_prompt: bool = False) -> str:
        """The conversation as text; raises :class:`RowProblem` when the template refuses it."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.override,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.arguments,
            )
        except Exception as error:  # a template is a program: it raises TemplateError, but also TypeError, KeyError, …
            raise RowProblem(f"the chat template refused it: {error}") from error
        return str(text)

    def render_marked(self, messages: Sequence[Message], tools: list[Any] | None = None) -> tuple[str, list[tuple[int, int]]]:
        """Text and the character spans of its ``{% generation %}`` blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            out: Any = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.source(tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.arguments},
            )
        except Exception as error:
            raise RowProblem(f"the chat template refused it: {error}") from error
        texts, spans = out
        return str(texts[0]), [(start, end) for start, end in spans[0]]

    def special_at(self, text: str, start: int, *, last: bool = False) -> tuple[int, int] | None:
        """(start, end) of the first (or last) special token's text in ``text`` from ``start`` on."""
        hits = [(at, at + len(token)) for token in self._special if (at := text.rfind(token) if last else text.find(token, start)) >= start]
        # Of two tokens that begin at one place the longer one counts, as in the tokenizer.
        return max(hits, key=lambda h: (h[0] if last else -h[0], h[1])) if hits else None

    def encode(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids [S] int32, character offsets [S, 2]) of each text, one encoding each; the template has written all special tokens."""
        if not texts:
            return []
        out = self.tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
        return [
            (np.asarray(ids, dtype=np.int32), np.asarray(offsets, dtype=np.int64).reshape(-1, 2))
            for ids, offsets in zip(out["input_ids"], out["offset_mapping"], strict=True)
        ]

    def render_prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        """Token ids that serving would be sent before the next reply: the conversation with the generation prompt."""
        text = self.render(messages, tools, generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
