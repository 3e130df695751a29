"""What a training run will need, from shapes alone: parameters, memory per device, disk and time.

Upper bounds where a length is unknown before tokenization. Nothing is written and no weight is allocated: the draft is built on the
meta device, the target is counted from the headers of its weight files.
"""

from __future__ import annotations

import json
import math
import struct
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specforge.modeling.target_facts import TargetFacts

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Share of a plain matrix product's speed that training reaches, all overheads included; a guess that plan prints as such.
_EFFICIENCY = 0.35
_SPOKEN = ("messages", "conversations", "content", "value", "prompt", "response", "reasoning_content")
_SAMPLED_ROWS, _PARSED_ROWS = 20_000, 300


@dataclass(frozen=True)
class Corpus:
    """Size of a dataset before it is tokenized: rows, and tokens at four characters each, cut at the maximal length."""

    rows: int
    tokens: int


@dataclass
class Estimate:
    """Bytes by purpose, per device and on disk; ``seconds`` is ``None`` where it cannot be said."""

    draft_parameters: int | None = None
    target_parameters: int | None = None
    memory: dict[str, int] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)
    corpus: Corpus | None = None
    steps: int | None = None
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)


def estimate(config: dict[str, Any], choices: dict[str, str | None], facts: TargetFacts | None, world_size: int, device: str) -> Estimate:
    """Everything that can be said about a checked training configuration on ``device`` (``cpu`` or ``cuda``)."""
    result = Estimate()
    result.corpus = corpus(config)
    if result.corpus is None:
        result.notes.append("the dataset cannot be looked at yet, so disk and time are not estimated")
    result.steps = num_steps(config, result.corpus)
    if facts is None:
        result.notes.append("the target is not on disk yet, so sizes that depend on it are not estimated")
        return result
    result.draft_parameters = draft_parameters(config, facts)
    result.target_parameters = target_parameters(Path(config["target"]["resolved_path"]))
    layers = num_captured_layers(config, facts)
    elements = _BYTES[resolved_dtype(config, device)]
    online = choices.get("topology") != "offline"
    result.memory = memory(config, facts, result, elements, world_size, online)
    result.disk = disk(config, facts, result, layers, elements, online)
    result.seconds = seconds(config, facts, result, device, world_size, online)
    return result


def draft_parameters(config: dict[str, Any], facts: TargetFacts) -> int:
    """Trainable parameters of the draft under its strategy, counted on the meta device."""
    import torch

    from specforge.config.build import build
    from specforge.data.vocabulary_map import VocabularyMap
    from specforge.modeling.draft.base import DraftArchitecture
    from specforge.training.strategies.base import DraftTrainStrategy

    plugins = config.get("plugins") or ()
    strategy = build(config["strategy"], expects=DraftTrainStrategy, plugins=plugins)  # type: ignore[type-abstract]
    architecture = build(config["draft"], expects=DraftArchitecture, plugins=plugins)  # type: ignore[type-abstract]
    with torch.device("meta"):
        kept = draft_vocabulary(config, facts)
        vocabulary = VocabularyMap(torch.zeros(kept, dtype=torch.int64), torch.zeros(facts.vocab_size, dtype=torch.bool), 1.0)
        model = strategy.build_model(architecture, facts, vocabulary, torch.empty(facts.vocab_size, facts.hidden_size))
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def target_parameters(folder: Path) -> int | None:
    """Parameters of the target from the headers of its safetensors files; ``None`` if it has none."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total or None


def draft_vocabulary(config: dict[str, Any], facts: TargetFacts) -> int:
    return int(config["strategy"].get("draft_vocab_size") or config["draft"].get("draft_vocab_size") or facts.vocab_size)


def num_captured_layers(config: dict[str, Any], facts: TargetFacts) -> int:
    """How many layers the strategy captures from this target."""
    from specforge.config.build import build
    from specforge.training.strategies.base import DraftTrainStrategy

    strategy = build(config["strategy"], expects=DraftTrainStrategy, plugins=config.get("plugins") or ())  # type: ignore[type-abstract]
    return len(strategy.aux_layer_ids(facts))


def resolved_dtype(config: dict[str, Any], device: str) -> str:
    """The draft's dtype; ``auto`` is bfloat16 on CUDA and float32 on the CPU."""
    dtype = config["trainer"].get("param_dtype", "auto")
    return dtype if dtype in _BYTES else ("bfloat16" if device == "cuda" else "float32")


def corpus(config: dict[str, Any]) -> Corpus | None:
    """Rows and tokens of the training file, at four characters a token; large files are extrapolated from their first rows."""
    from specforge.data.sources import resolve_path
    from specforge.errors import SpecForgeError

    data = config["data"]
    try:
        path = resolve_path(data["train_path"], "data.train_path")
        if path.suffix == ".gz" or not path.is_file():
            return None
        size, limit = path.stat().st_size, data.get("max_length") or 1 << 30
        with path.open("rb") as file:
            lines = list(islice(file, _SAMPLED_ROWS))
    except (KeyError, SpecForgeError, OSError):
        return None
    share = text_share(lines[:_PARSED_ROWS])
    lengths = [min(limit, round(len(line) * share / 4) + 1) for line in lines]
    read = sum(map(len, lines))
    scale = size / read if read else 1.0
    rows = round(len(lengths) * scale)
    if isinstance(data.get("max_samples"), int):
        rows = min(rows, data["max_samples"])
    return Corpus(rows, round(sum(lengths) / max(1, len(lengths)) * rows))


def text_share(lines: list[bytes]) -> float:
    """Which part of the rows' bytes is what people and models said; the rest is keys, ids and other columns."""

    def characters(value: Any, spoken: bool) -> int:
        if isinstance(value, str):
            return len(value) if spoken else 0
        if isinstance(value, list):
            return sum(characters(v, spoken) for v in value)
        if isinstance(value, dict):
            return sum(characters(v, k in _SPOKEN) for k, v in value.items())
        return 0

    said = total = 0
    for line in lines:
        total += len(line)
        try:
            said += characters(json.loads(line), False)
        except ValueError:
            continue  # prepare reports such a row with its line
    return said / total if said else 1.0


def num_steps(config: dict[str, Any], size: Corpus | None) -> int | None:
    """Optimizer steps: the smaller of max_steps and epochs × ceil(samples / global batch)."""
    trainer = config["trainer"]
    most = trainer.get("max_steps")
    if size is None:
        return most
    steps = math.ceil(trainer.get("epochs", 1) * math.ceil(size.rows / trainer["global_batch_size"]))
    return min(steps, most) if most else steps


def memory(config: dict[str, Any], facts: TargetFacts, known: Estimate, elements: int, world_size: int, online: bool) -> dict[str, int]:
    """Bytes on one device, replicated data parallel."""
    p = known.draft_parameters or 0
    trainer = config["trainer"]
    samples = math.ceil(trainer["global_batch_size"] / world_size / (trainer.get("micro_batches") or 1))
    tokens = samples * (config["data"].get("max_length") or 2048)
    if known.corpus and known.corpus.rows:  # the mean is known well enough; one and a half times it for an uneven batch
        tokens = min(tokens, math.ceil(1.5 * samples * known.corpus.tokens / known.corpus.rows))
    parts = {
        "draft weights": p * elements,
        "masters (fp32)": p * 4 if elements < 4 else 0,  # in fp32 a weight is its own master
        "gradients (fp32)": p * 4,
        "AdamW moments (fp32)": p * 8,
        "target embedding and head": facts.vocab_size * facts.hidden_size * elements * (1 if facts.tie_word_embeddings else 2),
        f"activations, {tokens} tokens": activations(config, facts, tokens, elements),
    }
    if online and known.target_parameters:
        parts["target model"] = known.target_parameters * elements
    return {name: size for name, size in parts.items() if size}


def activations(config: dict[str, Any], facts: TargetFacts, tokens: int, elements: int) -> int:
    """What backward keeps of one micro-batch: a layer's inputs per unrolled step, teacher and student logits once in fp32."""
    draft, strategy = config["draft"], config["strategy"]
    hidden = draft.get("hidden_size") or facts.hidden_size
    inner = draft.get("intermediate_size") or facts.intermediate_size
    steps = strategy.get("ttt_length") or 1
    layer = 12 * hidden + 4 * inner
    return tokens * (steps * (draft.get("num_layers") or 1) * layer * elements + 3 * draft_vocabulary(config, facts) * 4)


def feature_bytes(facts: TargetFacts, layers: int, elements: int, tokens: int) -> int:
    """Captured features of ``tokens`` tokens: K layers, final hidden, ids, mask and the target's choice."""
    return tokens * ((layers + 1) * facts.hidden_size * elements + 8 + 1 + 8)


def disk(config: dict[str, Any], facts: TargetFacts, known: Estimate, layers: int, elements: int, online: bool) -> dict[str, int]:
    """Bytes in the run folder and, for offline training, of the features."""
    keep = config["trainer"].get("keep_checkpoints")
    p = known.draft_parameters or 0
    one = p * (4 + 8) + (p * elements if elements < 4 else 0)
    # The newest ones, the best one, and the one being written before an old one goes.
    parts = {f"checkpoints ({'all' if keep is None else keep + 2} × {one / 1e9:.2f} GB)": one * ((keep or 3) + 2)}
    if known.corpus:
        name = "features (captured before)" if not online else "features (feature store, if it keeps all)"
        parts[name] = feature_bytes(facts, layers, elements, known.corpus.tokens)
    return parts


def seconds(config: dict[str, Any], facts: TargetFacts, known: Estimate, device: str, world_size: int, online: bool) -> float | None:
    """Time of training from the number of multiplications and a short measurement of this machine."""
    if known.corpus is None or known.steps is None or known.draft_parameters is None:
        return None
    trainer = config["trainer"]
    seen = known.steps * trainer["global_batch_size"] * known.corpus.tokens / max(1, known.corpus.rows)
    steps = config["strategy"].get("ttt_length") or 1
    work = 6 * known.draft_parameters * steps * seen + 2 * draft_vocabulary(config, facts) * facts.hidden_size * seen
    if online and known.target_parameters:
        work += 2 * known.target_parameters * known.corpus.tokens  # once; the store then has them
    # CPU ranks share the cores that were measured together.
    needed = float(work / (measured_speed(device) * _EFFICIENCY * (world_size if device == "cuda" else 1)))
    limit = trainer.get("time_limit_minutes")
    if limit and limit * 60 < needed:
        known.notes.append(f"trainer.time_limit_minutes={limit} ends the run early: all steps would need {needed / 60:.0f} minutes")
        return limit * 60.0
    return needed


def measured_speed(device: str) -> float:
    """Floating-point operations a second of a matrix product here, in the dtype that training would use."""
    import torch

    size, dtype = (4096, torch.bfloat16) if device == "cuda" else (768, torch.float32)
    a = torch.ones(size, size, dtype=dtype, device=device)
    a @ a
    best = math.inf
    for _ in range(3):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ a
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
