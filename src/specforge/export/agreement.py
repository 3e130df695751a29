"""Does a server draft as we do? The judgement of conventions.md §7 over requests that were decoded in both places.

Three answers belong to each request: ours with the draft (the simulator), the server's with the draft, and the server's without it.
In float32 the counts must be equal request by request; in half precision the pooled accept_length must agree within 5 % over at least
2,000 verify steps. Where two answers part, the two tokens must be a tie for the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specforge.evaluation.decode import Decoded
from specforge.evaluation.metrics import bootstrap_interval
from specforge.inference.sglang_generate import Answer

POOLED_TOLERANCE = 0.05
POOLED_MIN_STEPS = 2000
# Log-probabilities (of target or draft) closer than this are a tie: a few times the rounding of logits of size 10 to 40.
TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
# Below this nearly every draft is wrong, and a draft whose weights were never loaded would look the same.
TELLING_ACCEPT_LENGTH = 1.1

# (request, tokens that both answers share, one token, the other) -> distance of their log-probabilities under the target.
Distance = Callable[[int, list[int], int, int], float]


@dataclass(frozen=True)
class Compared:
    """One request. ``margin`` is the smallest distance between the draft's best and second logit over all of our drafts."""

    ours: Decoded
    served: Answer
    plain: Answer
    margin: float | None


@dataclass
class Verdict:
    """``problems`` empty = passed. ``ties`` says where two answers part and why that is allowed."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def judge(requests: Sequence[Compared], num_draft_tokens: int, dtype: str, distance: Distance) -> Verdict:
    """The verdict over all requests; ``dtype`` is the server's and decides how strict the comparison is."""
    verdict = Verdict()
    if not any(r.served.verify_steps for r in requests):
        verdict.problems.append("the server made no verify step: it runs without the draft. See its log for the flags it took")
        return verdict
    for i, request in enumerate(requests):
        _same_tokens(verdict, i, request.served.tokens, request.plain.tokens, "with the draft", "without it", dtype, distance)
    verdict.facts = _facts(requests, num_draft_tokens)
    if dtype == "float32":
        for i, request in enumerate(requests):
            _same_counts(verdict, i, request, num_draft_tokens, distance)
    else:
        _same_pooled(verdict)
    if verdict.facts["accept_length_ours"] < TELLING_ACCEPT_LENGTH:
        verdict.warnings.append(f"accept_length is {verdict.facts['accept_length_ours']:.2f}: so low that it cannot tell this draft from "
                                "one whose weights were not loaded. Train longer, then verify again")
    return verdict


def _same_tokens(verdict: Verdict, index: int, a: list[int], b: list[int], name_a: str, name_b: str, dtype: str,
                 distance: Distance) -> bool:
    """Equal, or parted by a tie of the target (noted); else a problem."""
    if a == b:
        return True
    at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    where = f"request {index}, after {at} equal tokens"
    if at == min(len(a), len(b)):
        verdict.problems.append(f"{where}: one answer ends there and the other goes on ({len(a)} tokens {name_a}, {len(b)} {name_b})")
        return False
    gap = distance(index, a[:at], a[at], b[at])
    line = f"{where}: {a[at]} {name_a}, {b[at]} {name_b}; the target's log-probabilities differ by {gap:.4g}"
    if gap <= TIE[dtype]:
        verdict.ties.append(f"{line} (a tie: up to {TIE[dtype]} in {dtype})")
    else:
        verdict.problems.append(f"{line}, so the answer is not the target's own (a tie is up to {TIE[dtype]} in {dtype})")
    return False


def _same_counts(verdict: Verdict, index: int, request: Compared, num_draft_tokens: int, distance: Distance) -> None:
    if not _same_tokens(verdict, index, request.served.tokens, request.ours.tokens, "in the server", "here", "float32", distance):
        return  # said already, and counts of different texts cannot be compared
    ours, theirs = histogram_of(request.ours.accepted, num_draft_tokens), padded(request.served.histogram, num_draft_tokens)
    if ours == theirs and request.ours.verify_steps == request.served.verify_steps:
        return
    line = (f"request {index}: {request.served.verify_steps} verify steps in the server with accepted drafts {theirs}, "
            f"{request.ours.verify_steps} here with {ours}")
    if request.margin is not None and request.margin <= TIE["float32"]:
        verdict.ties.append(f"{line}; the draft's two best logits come as close as {request.margin:.2g} there, a tie")
    else:
        closest = "" if request.margin is None else f" (closest logits {request.margin:.2g})"
        verdict.problems.append(f"{line}; no tie explains it{closest}")


def _same_pooled(verdict: Verdict) -> None:
    facts = verdict.facts
    ours, theirs = facts["accept_length_ours"], facts["accept_length_server"]
    steps = min(facts["verify_steps_ours"], facts["verify_steps_server"])
    if steps < POOLED_MIN_STEPS:
        verdict.problems.append(f"only {steps} verify steps, and in half precision {POOLED_MIN_STEPS} are needed. Raise verify_prompts or "
                                "verify_max_new_tokens")
    apart = abs(theirs - ours) / ours
    if apart > POOLED_TOLERANCE:
        verdict.problems.append(f"accept_length is {theirs:.3f} in the server and {ours:.3f} here, {100 * apart:.1f} % apart (allowed: "
                                f"{100 * POOLED_TOLERANCE:.0f} %); accepted drafts a step {facts['histogram_server']} there, "
                                f"{facts['histogram_ours']} here")


def _facts(requests: Sequence[Compared], num_draft_tokens: int) -> dict[str, Any]:
    ours = [(sum(r.ours.accepted), r.ours.verify_steps) for r in requests]
    theirs = [(r.served.accepted, r.served.verify_steps) for r in requests]
    return {
        "accept_length_ours": pooled(ours),
        "accept_length_server": pooled(theirs),
        "interval_95_ours": list(bootstrap_interval(ours)),
        "interval_95_server": list(bootstrap_interval(theirs)),
        "verify_steps_ours": sum(s for _, s in ours),
        "verify_steps_server": sum(s for _, s in theirs),
        "histogram_ours": histogram_of([n for r in requests for n in r.ours.accepted], num_draft_tokens),
        "histogram_server": [sum(c) for c in zip(*(padded(r.served.histogram, num_draft_tokens) for r in requests), strict=True)],
        "num_requests": len(requests),
        "lossless_requests": sum(r.served.tokens == r.plain.tokens for r in requests),
        "requests_with_equal_counts": sum(histogram_of(r.ours.accepted, num_draft_tokens) == padded(r.served.histogram, num_draft_tokens)
                                          for r in requests),
    }


def pooled(counts: Sequence[tuple[int, int]]) -> float:
    """accept_length of (accepted drafts, verify steps) pairs: 1 + Σ accepted / Σ steps."""
    steps = sum(s for _, s in counts)
    return 1.0 + sum(a for a, _ in counts) / steps if steps else 1.0


def histogram_of(accepted: Sequence[int], num_draft_tokens: int) -> list[int]:
    """How many steps accepted 0, 1, … n drafts."""
    return [sum(a == j for a in accepted) for j in range(num_draft_tokens + 1)]


def padded(histogram: Sequence[int], num_draft_tokens: int) -> list[int]:
    """A server's histogram ends at the highest count it saw."""
    return [*histogram, *[0] * (num_draft_tokens + 1 - len(histogram))]
