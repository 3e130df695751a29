"""The target's dimensions, read from its config.json without torch, so that composing a configuration stays fast."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specforge.errors import TargetError

# Wrappers of multimodal targets keep the language model's dimensions one level down.
_TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config")
# Names that a family has for the usual ones (LongCat-Flash).
_OTHER_NAMES = {"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size"}


@dataclass(frozen=True)
class TargetFacts:
    """Dimensions of a frozen target. ``rope`` is in the v5 form: rope_theta, rope_type and that type's own keys."""

    path: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    hidden_act: str
    tie_word_embeddings: bool
    rope: dict[str, Any]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    raw: dict[str, Any]

    @classmethod
    def from_folder(cls, path: str | Path) -> TargetFacts:
        """Read ``config.json`` of a Hugging Face folder; raises :class:`TargetError` if it is absent or lacks a dimension."""
        file = Path(path) / "config.json"
        try:
            raw = json.loads(file.read_text())
        except FileNotFoundError:
            raise TargetError(f"target.path: {path} has no config.json. Give the folder of a Hugging Face causal language model.") from None
        except (OSError, ValueError) as error:
            raise TargetError(f"target.path: {file} cannot be read as JSON ({error}). Fetch the model again.") from None
        return cls.from_config(raw, str(path))

    @classmethod
    def from_config(cls, raw: dict[str, Any], path: str = "") -> TargetFacts:
        """The facts of a config.json that is already parsed."""
        text = language_config(raw)
        for ours, theirs in _OTHER_NAMES.items():
            if text.get(ours) is None and theirs in text:
                text = {**text, ours: text[theirs]}
        required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        missing = [k for k in required if not isinstance(text.get(k), int)]
        if missing:
            raise TargetError(
                f"target.path: config.json of {path or 'the target'} lacks {', '.join(missing)}; is it a causal language model?"
            )
        heads = text["num_attention_heads"]
        eos = text.get("eos_token_id", raw.get("eos_token_id"))
        return cls(
            path=path,
            model_type=text.get("model_type", raw.get("model_type", "unknown")),
            hidden_size=text["hidden_size"],
            intermediate_size=text.get("intermediate_size") or 4 * text["hidden_size"],
            num_layers=text["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            vocab_size=text["vocab_size"],
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            max_position_embeddings=text.get("max_position_embeddings", 2048),
            hidden_act=text.get("hidden_act", text.get("hidden_activation", "silu")) or "silu",
            tie_word_embeddings=bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
            rope=resolve_rope(text, path),
            bos_token_id=text.get("bos_token_id", raw.get("bos_token_id")),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
            raw=raw,
        )


def language_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model: all of it, unless a multimodal target wraps it."""
    return next((raw[k] for k in _TEXT_CONFIG_KEYS if isinstance(raw.get(k), dict)), raw)


def resolve_rope(config: dict[str, Any], where: str = "") -> dict[str, Any]:
    """RoPE parameters in the v5 form from a v4 (``rope_theta``/``rope_scaling``) or v5 (``rope_parameters``) config.

    A missing theta is refused (conventions §8): a silent 10000 is the most expensive default in the field.
    """
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and "full_attention" in parameters:  # one entry a layer type (Gemma 3, ...)
        parameters = parameters["full_attention"]
    rope = dict(parameters or {})
    for key, value in (config.get("rope_scaling") or {}).items():
        rope.setdefault("rope_type" if key == "type" else key, value)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise TargetError(
            f"config.json of {where or 'the target'} states no rope_theta (looked in rope_parameters, rope_scaling, top level). "
            "Add it to the target's config.json or set draft.rope.rope_theta."
        )
    rope["rope_theta"] = float(theta)
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return rope


def rope_both_forms(rope: dict[str, Any]) -> dict[str, Any]:
    """Config keys that write RoPE in the v4 and the v5 form, so that any loader finds theta (conventions §8)."""
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
    plain = scaling.get("rope_type", "default") == "default"
    both = {"rope_theta": rope["rope_theta"], "rope_scaling": None if plain else scaling, "rope_parameters": dict(rope)}
    # SGLang's draft layers look for the share of a head that turns at the top level only.
    partial = rope.get("partial_rotary_factor")
    return both if partial is None else {**both, "partial_rotary_factor": partial}
