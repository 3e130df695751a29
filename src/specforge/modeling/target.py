"""The frozen parts of the target that a draft needs: identity, token embedding, language-model head."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from specforge.errors import TargetError
from specforge.modeling.target_facts import TargetFacts
from specforge.runtime.contracts import TargetIdentity

_EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "transformer.wte.weight",
    "gpt_neox.embed_in.weight",
    "embed_tokens.weight",
)
_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight", "embed_out.weight")
_NORM_NAMES = ("model.norm.weight", "model.language_model.norm.weight", "language_model.model.norm.weight", "norm.weight")
# Keys that say nothing about the numbers a model computes.
_VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tekken.json")


def _digest(*parts: bytes) -> str:
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.hexdigest()


def target_identity(folder: str | Path, revision: str | None = None, chat_template: str | None = None) -> TargetIdentity:
    """Identity of a local Hugging Face folder: digests of config, weight index sizes, tokenizer files and chat template."""
    folder = Path(folder)
    config = {k: v for k, v in TargetFacts.from_folder(folder).raw.items() if k not in _VOLATILE_CONFIG_KEYS}
    # Size, head and tail of each file tell two fine-tunes apart without reading gigabytes.
    weights = [f"{f.name}:{f.stat().st_size}:{_edges(f)}" for f in sorted(folder.glob("*.safetensors"))]
    tokenizer = [(folder / name).read_bytes() for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not tokenizer:
        raise TargetError(
            f"target.path: {folder} has no tokenizer (looked for {', '.join(_TOKENIZER_FILES)}). Copy its files next to config.json."
        )
    return TargetIdentity(
        path=str(folder),
        revision=revision,
        config_digest=_digest(json.dumps(config, sort_keys=True).encode(), *(w.encode() for w in weights)),
        tokenizer_digest=_digest(*tokenizer),
        template_digest=_digest((chat_template if chat_template is not None else _template_of(folder)).encode()),
    )


def _edges(file: Path, num_bytes: int = 65536) -> str:
    with file.open("rb") as f:
        head = f.read(num_bytes)
        f.seek(max(0, file.stat().st_size - num_bytes))
        return _digest(head, f.read(num_bytes))


def _template_of(folder: Path) -> str:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    try:
        template = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    except (OSError, ValueError):
        template = None
    return template if isinstance(template, str) else json.dumps(template)


def find_tensors(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Those of ``names`` that a single-file or sharded safetensors checkpoint holds; raises :class:`TargetError` on damaged files."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        files = {folder / weight_map[n] for n in names if n in weight_map}
    else:
        files = set(folder.glob("*.safetensors"))
        if not files:
            raise TargetError(f"target.path: {folder} has no *.safetensors weights. Convert the model with save_pretrained first.")
    found = {}
    for file in sorted(files):
        try:
            with safe_open(file, framework="pt") as f:
                present = set(f.keys())
                found.update({n: f.get_tensor(n) for n in names if n in present})
        except (SafetensorError, OSError) as error:
            raise TargetError(f"target.path: {file} cannot be read ({error}). It is damaged or incomplete: fetch it again.") from None
    return found


def _find_tensor(folder: Path, names: tuple[str, ...]) -> torch.Tensor | None:
    """The first of ``names`` that the checkpoint holds, or None."""
    found = find_tensors(folder, names)
    return next((found[n] for n in names if n in found), None)


def load_final_norm(folder: str | Path) -> torch.Tensor | None:
    """Weight [H] of the target's final norm, or None where the family calls it otherwise."""
    return _find_tensor(Path(folder), _NORM_NAMES)


def load_embedding(folder: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """The target's input embedding [V, H]; a target that scales its embeddings (Gemma) has the scale applied (conventions §1)."""
    folder = Path(folder)
    weight = _find_tensor(folder, _EMBEDDING_NAMES)
    if weight is None:
        raise TargetError(f"target.path: no input embedding in {folder}; looked for {', '.join(_EMBEDDING_NAMES)}.")
    facts = TargetFacts.from_folder(folder)
    if facts.model_type.startswith("gemma"):
        weight = weight.float() * facts.hidden_size**0.5
    return weight.to(device=device, dtype=dtype)


class TargetHead(nn.Module):
    """The frozen head that turns post-norm final hidden states into P[i]: weight [V, H], optional bias, scale and soft-cap."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0, soft_cap: float | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.scale, self.soft_cap = scale, soft_cap

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> TargetHead:
        """Read the head of a tied, single-file or sharded checkpoint; raises :class:`TargetError` if there is none."""
        folder = Path(folder)
        facts = TargetFacts.from_folder(folder)
        weight = _find_tensor(folder, _HEAD_NAMES)
        if weight is None and facts.tie_word_embeddings:
            weight = _find_tensor(folder, _EMBEDDING_NAMES)
        if weight is None:
            raise TargetError(
                f"target.path: no language-model head in {folder} (looked for {', '.join(_HEAD_NAMES)}; "
                f"tie_word_embeddings is {str(facts.tie_word_embeddings).lower()})."
            )
        bias = _find_tensor(folder, tuple(n.removesuffix("weight") + "bias" for n in _HEAD_NAMES))
        text = next(
            (facts.raw[k] for k in ("text_config", "llm_config", "language_config") if isinstance(facts.raw.get(k), dict)), facts.raw
        )
        scale = text.get("logit_scale") or 1.0 / (text.get("logits_scaling") or 1.0)
        return cls(
            weight.to(device=device, dtype=dtype),
            None if bias is None else bias.to(device=device, dtype=dtype),
            float(scale),
            text.get("final_logit_softcapping"),
        )

    def logits(self, hidden: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [..., H] -> logits [..., V] in float32, or only those of ``token_ids`` [Vd] -> [..., Vd]."""
        weight = self.weight if token_ids is None else self._rows(token_ids)
        bias = self.bias if self.bias is None or token_ids is None else self.bias[token_ids]
        logits = nn.functional.linear(hidden.to(weight.dtype), weight, bias).float()
        return self._finish(logits)

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        # The kept rows are gathered once: the same vocabulary map is used for a whole run.
        cached = getattr(self, "_kept_rows", None)
        if cached is None or cached[0] is not token_ids:
            self._kept_rows = cached = (token_ids, self.weight[token_ids].contiguous())
        return cached[1]

    @torch.no_grad()
    def argmax(self, hidden: torch.Tensor, tile: int = 32768) -> torch.Tensor:
        """Full-vocabulary argmax [...] int64 over tiles of the vocabulary; ties go to the lowest id."""
        flat = hidden.reshape(-1, hidden.shape[-1]).to(self.weight.dtype)
        best = torch.full((flat.shape[0],), float("-inf"), device=flat.device)
        winner = torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
        for start in range(0, self.vocab_size, tile):
            bias = None if self.bias is None else self.bias[start : start + tile]
            # Scale is positive and the soft-cap monotone, so neither moves the argmax.
            value, index = nn.functional.linear(flat, self.weight[start : start + tile], bias).float().max(dim=-1)
            better = value > best
            best = torch.where(better, value, best)
            winner = torch.where(better, index + start, winner)
        return winner.reshape(hidden.shape[:-1])

    @torch.no_grad()
    def log_normalizer(self, hidden: torch.Tensor, tile: int = 32768) -> torch.Tensor:
        """log Σ_v exp(logit_v) over the whole vocabulary, over tiles of it: hidden [..., H] -> float32 [...]."""
        flat = hidden.reshape(-1, hidden.shape[-1]).to(self.weight.dtype)
        total = torch.full((flat.shape[0],), float("-inf"), device=flat.device)
        for start in range(0, self.vocab_size, tile):
            bias = None if self.bias is None else self.bias[start : start + tile]
            logits = self._finish(nn.functional.linear(flat, self.weight[start : start + tile], bias).float())
            total = torch.logaddexp(total, torch.logsumexp(logits, dim=-1))
        return total.reshape(hidden.shape[:-1])
