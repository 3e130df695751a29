"""Requests to a live SGLang server: the answer's tokens, its speculative counts as the server kept them, and the times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from specforge.errors import ConfigError, RunError
from specforge.inference.sglang_http import ServerRefused, ServerUnreachable, get_json, post_json, stream_json


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. ``ignore_eos`` makes every answer ``max_new_tokens`` long."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def body(self) -> dict[str, Any]:
        return {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature, "top_p": self.top_p,
                "stop_token_ids": list(self.stop_token_ids) or None, "ignore_eos": self.ignore_eos}


@dataclass(frozen=True)
class Answer:
    """One request. ``histogram[j]`` verify steps accepted j drafts; all zero where the server drafts nothing (conventions.md §7)."""

    tokens: list[int]
    num_prompt_tokens: int
    verify_steps: int
    accepted: int
    histogram: list[int]
    seconds: float
    seconds_to_first: float | None = None  # only of streamed answers
    cached_tokens: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # the rest of meta_info

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself; ``num_draft_tokens`` counts drafted tokens a step (SGLang's own number, minus the root)."""

    url: str
    version: str
    model_path: str
    tokenizer_path: str
    dtype: str
    algorithm: str | None
    num_steps: int | None
    topk: int | None
    num_draft_tokens: int | None
    draft_path: str | None

    @property
    def speculative(self) -> bool:
        return self.algorithm is not None


def server_facts(url: str, timeout: float = 30.0, token: str | None = None) -> ServerFacts:
    """Ask a server who it is. Raises :class:`ServerUnreachable`, or :class:`ConfigError` if it is no SGLang server."""
    info = None
    for path in ("/server_info", "/get_server_info"):  # the second is the older name
        try:
            info = get_json(f"{url}{path}", timeout, token)
        except ServerRefused as error:
            if error.status in (401, 403):
                raise
            continue
        break
    if not isinstance(info, dict) or "model_path" not in info:
        raise ConfigError(f"{url}: something answers there, but not as an SGLang server does (no /server_info). Give the address that "
                          "sglang.launch_server printed, without a path such as /v1.")
    algorithm = info.get("speculative_algorithm") or None
    nodes = info.get("speculative_num_draft_tokens")
    return ServerFacts(
        url=url, version=str(info.get("version", "unknown")), model_path=str(info["model_path"]),
        tokenizer_path=str(info.get("tokenizer_path") or info["model_path"]), dtype=str(info.get("dtype")), algorithm=algorithm,
        num_steps=info.get("speculative_num_steps"), topk=info.get("speculative_eagle_topk"),
        num_draft_tokens=nodes - 1 if algorithm and isinstance(nodes, int) else None, draft_path=info.get("speculative_draft_model_path"))


def generate(url: str, prompt: Sequence[int] | str, sampling: Sampling, *, timeout: float, token: str | None = None, stream: bool = False,
             stopped: threading.Event | None = None, **more: Any) -> Answer:
    """One request; ``more`` goes into its body. ``stopped`` ends a streamed one early. Raises the errors of ``sglang_http``."""
    body = {("text" if isinstance(prompt, str) else "input_ids"): prompt if isinstance(prompt, str) else list(prompt),
            "sampling_params": sampling.body(), "stream": stream, **more}
    started = time.perf_counter()
    if not stream:
        out = post_json(f"{url}/generate", body, timeout, token)
        return _answer(url, out, list(out.get("output_ids") or []) if isinstance(out, dict) else [], time.perf_counter() - started, None)
    first, out, pieces = None, None, []
    for event in stream_json(f"{url}/generate", body, timeout, token):
        first = time.perf_counter() - started if first is None else first
        out = event
        pieces.append(list(event.get("output_ids") or []))
        if stopped is not None and stopped.is_set():
            raise RunError(f"{url}: stopped in the middle of an answer.")
    return _answer(url, out, _joined(pieces, out), time.perf_counter() - started, first)


def _joined(pieces: list[list[int]], last: Any) -> list[int]:
    """Events carry either all tokens so far or only the new ones, as the server was started."""
    if not pieces:
        return []
    total = last.get("meta_info", {}).get("completion_tokens")
    return pieces[-1] if len(pieces[-1]) == total else [token for piece in pieces for token in piece]


def _answer(url: str, out: Any, tokens: list[int], seconds: float, first: float | None) -> Answer:
    if not isinstance(out, dict) or not isinstance(out.get("meta_info"), dict):
        raise ServerUnreachable(f"{url}/generate: the answer broke off.")
    meta = dict(out["meta_info"])
    if (meta.get("finish_reason") or {}).get("type") == "abort":
        raise ServerRefused(400, f"{url}/generate: {meta['finish_reason'].get('message', 'aborted')}")
    histogram = list(meta.pop("spec_correct_drafts_histogram", None) or meta.pop("spec_accept_histogram", None) or [])
    steps = int(meta.pop("spec_verify_ct", 0) or 0)
    accepted = int(meta.pop("spec_num_correct_drafts", 0) or 0)
    prompt, cached = int(meta.pop("prompt_tokens", 0)), int(meta.pop("cached_tokens", 0) or 0)
    return Answer(tokens, prompt, steps, accepted, histogram, seconds, first, cached, meta)


def generate_all(url: str, prompts: Sequence[Sequence[int] | str], sampling: Sampling, *, concurrency: int, timeout: float,
                 token: str | None = None, stream: bool = False, report: Callable[[int], None] | None = None) -> list[Answer]:
    """Answers in the order of ``prompts``, at most ``concurrency`` in flight; the first failure ends the rest and is raised."""
    stopped = threading.Event()
    done = 0
    lock = threading.Lock()

    def one(index: int) -> Answer | None:
        nonlocal done
        if stopped.is_set():
            return None
        try:
            answer = generate(url, prompts[index], sampling, timeout=timeout, token=token, stream=stream, stopped=stopped)
        except ServerRefused as error:
            raise ServerRefused(error.status, f"prompt {index + 1} of {len(prompts)} was refused: {error}") from None
        with lock:
            done += 1
            if report is not None:
                report(done)
        return answer

    with ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="request") as pool:
        futures = [pool.submit(one, i) for i in range(len(prompts))]
        try:
            return [answer for future in futures if (answer := future.result()) is not None]
        except BaseException:
            stopped.set()  # those in flight end at their next event, the others are not sent
            raise
