"""Measures a live server under load: speed, latency and, where it drafts, accept_length as conventions.md §7 defines it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from specforge.errors import ConfigError, RunError
from specforge.evaluation.metrics import bootstrap_interval
from specforge.inference.sglang_generate import Answer, Sampling, ServerFacts, generate_all
from specforge.inference.sglang_http import ServerRefused, post_json

PERCENTILES = (50, 95, 99)


def require_drafting(facts: ServerFacts) -> None:
    """Raises :class:`ConfigError` for a server that was started without speculative decoding."""
    if not facts.speculative:
        raise ConfigError(f"{facts.url}: serves {facts.model_path} without speculative decoding, so there is no draft to measure. Start "
                          "it with --speculative-algorithm and --speculative-draft-model-path, or name it with --baseline.")


def require_plain(facts: ServerFacts) -> None:
    """Raises :class:`ConfigError` for a baseline that drafts."""
    if facts.speculative:
        raise ConfigError(f"{facts.url}: is the baseline, but runs {facts.algorithm} with {facts.draft_path}. Give a server of the same "
                          "model that was started without --speculative-algorithm.")


def measure(facts: ServerFacts, prompts: Sequence[list[int]], sampling: Sampling, *, concurrency: int, timeout: float, token: str | None,
            report: Callable[[int], None] | None = None) -> tuple[dict[str, Any], list[Answer]]:
    """Send all prompts with ``concurrency`` of them in flight; returns the numbers and the answers in order."""
    flush_cache(facts.url, token)
    started = time.perf_counter()
    answers = generate_all(facts.url, prompts, sampling, concurrency=concurrency, timeout=timeout, token=token, stream=True, report=report)
    return summary(answers, time.perf_counter() - started, concurrency, facts), answers


def flush_cache(url: str, token: str | None) -> None:
    """Forget cached prefixes, or a prompt sent twice would cost nothing the second time. A server that forbids it goes on."""
    with contextlib.suppress(ServerRefused):
        post_json(f"{url}/flush_cache", {}, 60.0, token)


def summary(answers: Sequence[Answer], seconds: float, concurrency: int, facts: ServerFacts) -> dict[str, Any]:
    """Everything about one load; times in seconds. ``time_between_tokens`` leaves the first token out."""
    tokens = sum(a.num_tokens for a in answers)
    streamed = [(a, a.seconds_to_first) for a in answers if a.seconds_to_first is not None]
    result: dict[str, Any] = {
        "concurrency": concurrency,
        "num_requests": len(answers),
        "num_prompt_tokens": sum(a.num_prompt_tokens for a in answers),
        "num_cached_prompt_tokens": sum(a.cached_tokens for a in answers),
        "num_output_tokens": tokens,
        "seconds": seconds,
        "output_tokens_per_second": tokens / seconds,
        "requests_per_second": len(answers) / seconds,
        "time_to_first_token": percentiles([first for _, first in streamed]),
        "end_to_end": percentiles([a.seconds for a in answers]),
        "time_between_tokens": percentiles([(a.seconds - first) / (a.num_tokens - 1) for a, first in streamed if a.num_tokens > 1]),
    }
    return {**result, **acceptance(answers, facts)} if facts.speculative else result


def acceptance(answers: Sequence[Answer], facts: ServerFacts) -> dict[str, Any]:
    """accept_length pooled over verify steps, its interval and the histogram. Raises :class:`RunError` if no step was made."""
    counts = [(a.accepted, a.verify_steps) for a in answers]
    steps = sum(s for _, s in counts)
    if not steps:
        raise RunError(f"{facts.url}: says it runs {facts.algorithm}, but no answer made a verify step. Ask for more than one token "
                       "(--max-new-tokens), or see the server's log.")
    histogram = [0] * max(len(a.histogram) for a in answers)
    for answer in answers:
        for j, count in enumerate(answer.histogram):
            histogram[j] += count
    return {
        "accept_length": 1.0 + sum(n for n, _ in counts) / steps,
        "accept_length_interval_95": list(bootstrap_interval(counts)),
        "acceptance_histogram": histogram,
        "num_verify_steps": steps,
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and nearest-rank percentiles; ``None`` without values."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[min(len(ordered) - 1, max(0, -(-p * len(ordered) // 100) - 1))] for p in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **ranks}
