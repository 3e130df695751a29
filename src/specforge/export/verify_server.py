"""``export verify=server``: load the exported folder in a real SGLang server and require that it drafts there as it does here.

Our own decoding runs first, on the weights of the exported folder; then the server with the draft, then the same server without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specforge.config.build import build
from specforge.errors import DataError, ExportError
from specforge.evaluation.decode import Decoded, DecodeSettings, decode_speculative
from specforge.evaluation.proposer import Proposal, Proposer
from specforge.export.agreement import POOLED_MIN_STEPS, Compared, Verdict, judge
from specforge.export.published import read_published
from specforge.inference.engine_factory import build_engine
from specforge.inference.sglang_generate import Answer, Sampling, generate, generate_all, server_facts
from specforge.inference.sglang_process import SGLangProcess
from specforge.modeling.target import load_embedding
from specforge.tracking.bar import counting_bar
from specforge.training.assembly import Parts, cast_buffers
from specforge.training.checkpoint import write_atomic

REPORT = "specforge_verify.json"
MIN_REQUESTS = 32
_CONCURRENCY = 8
_REQUEST_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class Checked:
    """What is asked of both sides. The stop tokens of ``settings`` are the target's own, filled in when it is loaded."""

    prompts: list[list[int]]
    settings: DecodeSettings
    dtype: str  # of the server and of our decoding alike


class MarginRecorder(Proposer):
    """Passes everything on to ``inner`` and keeps how close its drafts came to being other ones."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.margins: list[torch.Tensor] = []

    def start(self) -> None:
        self.margins = []
        self.inner.start()

    def observe(self, aux: torch.Tensor, next_tokens: list[int]) -> None:
        self.inner.observe(aux, next_tokens)

    def propose(self, num_tokens: int, temperature: float, generator: torch.Generator | None) -> Proposal:
        proposal = self.inner.propose(num_tokens, temperature, generator)
        if proposal.margins is not None:
            self.margins.append(proposal.margins.min())
        return proposal

    @property
    def smallest(self) -> float | None:
        return float(torch.stack(self.margins).min()) if self.margins else None


def verify_in_server(config: dict[str, Any], parts: Parts, folder: Path, checked: Checked, device: torch.device, log_dir: Path) -> Verdict:
    """Run the comparison and write ``specforge_verify.json`` into ``folder``.

    ``config["server"]`` is the node of the server process. Raises :class:`ExportError` with everything that differs,
    :class:`RunError` for a server that does not start or dies.
    """
    speculative = parts.strategy.serving_arguments(checked.settings.num_draft_tokens)
    if not speculative:
        raise ExportError(f"verify=server: strategy {parts.strategy.name} is not served by SGLang. Use verify=files.")
    with _engine(config, checked.dtype, device) as engine:
        checked = replace(checked, settings=replace(checked.settings, stop_token_ids=frozenset(engine.stop_token_ids)))
        ours = _simulate(engine, parts, folder, checked, device)
    steps = sum(decoded.verify_steps for decoded, _ in ours)
    if checked.dtype != "float32" and steps < POOLED_MIN_STEPS:
        raise ExportError(f"verify=server: {len(checked.prompts)} requests of up to {checked.settings.max_new_tokens} tokens gave {steps} "
                          f"verify steps, and in {checked.dtype} {POOLED_MIN_STEPS} are needed. Raise verify_prompts or verify_max_new_tokens.")
    trusted = bool(config["target"].get("trust_remote_code"))
    arguments = {"dtype": checked.dtype, "trust_remote_code": trusted, **({"device": "cpu"} if device.type == "cpu" else {})}
    drafting = {**arguments, **speculative, "speculative_draft_model_path": str(folder.absolute())}
    with _server(config, parts, drafting, log_dir / "server-with-draft.log") as server:
        facts = server_facts(server.url)
        served = _ask(server, checked, "server with the draft")
    with _server(config, parts, arguments, log_dir / "server-without-draft.log") as server:
        plain = _ask(server, checked, "server without it")
        requests = [Compared(d, s, p, m) for (d, m), s, p in zip(ours, served, plain, strict=True)]
        verdict = judge(requests, checked.settings.num_draft_tokens, checked.dtype, _distance(server, checked))
    _write(folder, verdict, checked, facts.version)
    if verdict.problems:
        shown = "; ".join(verdict.problems[:5]) + (f"; and {len(verdict.problems) - 5} more" if len(verdict.problems) > 5 else "")
        raise ExportError(f"verify=server: {folder} does not draft in SGLang {facts.version} as it does here: {shown}. All of it is in "
                          f"{folder / REPORT}, the server's log in {log_dir}.")
    return verdict


def choose_prompts(parts: Parts, datasets: Sequence[Any], count: int, max_new_tokens: int) -> list[list[int]]:
    """The first prompts of the held-out set, then of the training set, that fit the target's context with their answers."""
    room = parts.facts.max_position_embeddings - max_new_tokens
    prompts: list[list[int]] = []
    for dataset in datasets:
        for i in range(len(dataset) if dataset is not None else 0):
            if len(prompts) == count:
                return prompts
            spans = dataset.reply_spans(i)
            if spans and 0 < spans[0][0] <= room:
                prompts.append([int(t) for t in dataset[i].input_ids[: spans[0][0]]])
    if len(prompts) < MIN_REQUESTS:
        raise DataError(f"verify=server needs at least {MIN_REQUESTS} prompts of at most {room} tokens, and data.eval_path and "
                        f"data.train_path give {len(prompts)}. Name a larger file with data.eval_path=<file>.jsonl.")
    return prompts


@contextmanager
def _engine(config: dict[str, Any], dtype: str, device: torch.device) -> Iterator[Any]:
    """The target in this process through transformers: the one backend that decodes step by step."""
    node = {"_target_": "specforge.inference.target_engine.hf.HFTargetEngine", "dtype": dtype, "batch_tokens": None,
            "attn_implementation": config["target_backend"].get("attn_implementation")}
    engine = build_engine({**config, "target_backend": node}, device)
    try:
        yield engine
    finally:
        engine.close()
        if device.type == "cuda":  # the server wants that memory
            torch.cuda.empty_cache()


def _exported_draft(parts: Parts, folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The draft as the folder holds it, rounding of the export included."""
    published = read_published(folder)
    vocabulary = published.vocabulary(parts.facts.vocab_size)
    model = parts.strategy.build_model(parts.architecture, parts.facts, vocabulary, load_embedding(parts.folder, torch.float32))
    published.load_into(model, parts)
    return cast_buffers(model.to(dtype), dtype).to(device).eval()


def _simulate(engine: Any, parts: Parts, folder: Path, checked: Checked, device: torch.device) -> list[tuple[Decoded, float | None]]:
    dtype = getattr(torch, checked.dtype)
    draft = _exported_draft(parts, folder, dtype, device)
    proposer = MarginRecorder(parts.strategy.proposer(draft, parts.head(dtype, device)))
    layers = parts.strategy.aux_layer_ids(parts.facts)
    results = []
    with counting_bar("our own decoding", len(checked.prompts)) as advance:
        for i, prompt in enumerate(checked.prompts):
            decoded = decode_speculative(engine, proposer, layers, prompt, checked.settings, device, i)
            results.append((decoded, proposer.smallest))
            advance(i + 1)
    return results


@contextmanager
def _server(config: dict[str, Any], parts: Parts, arguments: Mapping[str, Any], log_path: Path) -> Iterator[SGLangProcess]:
    node = config["server"]
    node = {**node, "arguments": {**arguments, **node["arguments"]}}
    server = build(node, expects=SGLangProcess, plugins=config.get("plugins") or (), model_path=str(parts.folder.absolute()),
                   log_path=log_path)
    print(f"starting SGLang {'with the draft' if 'speculative_algorithm' in arguments else 'without it'}; its log: {log_path}")
    with server:
        yield server


def _ask(server: SGLangProcess, checked: Checked, name: str) -> list[Answer]:
    settings = checked.settings
    sampling = Sampling(settings.max_new_tokens, stop_token_ids=tuple(sorted(settings.stop_token_ids)))
    with counting_bar(name, len(checked.prompts)) as advance:
        answers = generate_all(server.url, checked.prompts, sampling, concurrency=_CONCURRENCY, timeout=_REQUEST_TIMEOUT_SECONDS,
                               report=advance)
    server.check_alive()
    return answers


def _distance(server: SGLangProcess, checked: Checked) -> Any:
    def distance(index: int, shared: list[int], one: int, other: int) -> float:
        answer = generate(server.url, [*checked.prompts[index], *shared], Sampling(1), timeout=_REQUEST_TIMEOUT_SECONDS,
                          return_logprob=True, token_ids_logprob=[one, other])
        (first, second) = answer.extra["output_token_ids_logprobs"][0]
        return abs(first[0] - second[0])

    return distance


def _write(folder: Path, verdict: Verdict, checked: Checked, version: str) -> None:
    settings = checked.settings
    report = {
        "passed": not verdict.problems, "harness": f"sglang {version} and specforge", "dtype": checked.dtype, "temperature": 0.0,
        "mode": "greedy", "num_draft_tokens": settings.num_draft_tokens, "max_new_tokens": settings.max_new_tokens, **verdict.facts,
        "problems": verdict.problems, "warnings": verdict.warnings, "ties": verdict.ties,
    }
    write_atomic(folder / REPORT, json.dumps(report, indent=1) + "\n")
