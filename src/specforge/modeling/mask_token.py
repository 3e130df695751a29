"""The token that fills the slots a draft predicts in parallel: an id whose embedding the target has and that no text uses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specforge.errors import ConfigError

KEY = "strategy.mask_token_id"
# Words in the names of special tokens that ordinary conversations do not use, best first.
_UNUSED_WORDS = ("reserved", "unused", "placeholder", "extra", "fim", "repo", "jupyter", "empty", "file")


def mask_token_id(folder: str | Path, vocab_size: int) -> int:
    """The tokenizer's mask token, else the lowest id below ``vocab_size`` that no token has.

    Raises:
        ConfigError: there is neither; the message proposes a special token to take in their place.
    """
    tokens, special, mask = read_tokenizer(Path(folder))
    if mask is not None and tokens.get(mask, vocab_size) < vocab_size:
        return tokens[mask]
    used = set(tokens.values())
    free = next((i for i in range(vocab_size) if i not in used), None)
    if free is not None:
        return free
    raise ConfigError(
        f"{KEY}: null — the target's tokenizer has no mask token, and every one of its {vocab_size} ids is a token. "
        f"Give the id of a special token that conversations never use{_proposed(special)}."
    )


def _proposed(special: Mapping[str, int]) -> str:
    """One token to propose in a message, with its override."""
    for word in _UNUSED_WORDS:
        for name, number in sorted(special.items(), key=lambda item: item[1]):
            if word in name.lower():
                return f", for example {name}: {KEY}={number}"
    return f". Its special tokens: {', '.join(f'{n} = {i}' for n, i in special.items()) or 'none'}"


def read_tokenizer(folder: Path) -> tuple[dict[str, int], dict[str, int], str | None]:
    """All tokens by name, the special ones among them, and the mask token's name if there is one; without loading transformers if possible."""
    settings = _json(folder / "tokenizer_config.json")
    mask = settings.get("mask_token")
    mask = mask.get("content") if isinstance(mask, Mapping) else mask
    data = _json(folder / "tokenizer.json")
    vocabulary = (data.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict):
        added = data.get("added_tokens") or []
        tokens = {**vocabulary, **{token["content"]: token["id"] for token in added}}
        return tokens, {token["content"]: token["id"] for token in added if token.get("special")}, mask
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return dict(tokenizer.get_vocab()), dict(tokenizer.get_added_vocab()), tokenizer.mask_token


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
