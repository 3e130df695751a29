"""The judgement of a served draft: what passes, what is a tie, and what each failure says."""

from __future__ import annotations

from typing import Any

import pytest

from specforge.evaluation.decode import Decoded
from specforge.export.agreement import POOLED_MIN_STEPS, Compared, Verdict, judge
from specforge.inference.sglang_generate import Answer

N = 3


def answer(tokens: list[int], accepted: list[int]) -> Answer:
    histogram = [accepted.count(j) for j in range(max(accepted, default=-1) + 1)]
    return Answer(tokens, 5, len(accepted), sum(accepted), histogram, seconds=1.0)


Side = tuple[list[int], list[int]]  # tokens, accepted drafts of each step


def compared(ours: Side, served: Side, plain: list[int], margin: float | None = 1.0) -> Compared:
    return Compared(Decoded(ours[0], list(ours[1])), answer(*served), answer(plain, []), margin)


def same(tokens: list[int], accepted: list[int]) -> Compared:
    return compared((tokens, accepted), (tokens, accepted), tokens)


def verdict(requests: list[Compared], dtype: str = "float32", distance: float = 9.0) -> Verdict:
    return judge(requests, N, dtype, lambda *_: distance)


def test_equal_tokens_and_counts_pass_and_are_counted() -> None:
    result = verdict([same([1, 2, 3, 4, 5], [3]), same([1, 2, 3], [1, 0])])
    assert not result.problems and not result.ties and not result.warnings
    assert result.facts["accept_length_ours"] == result.facts["accept_length_server"] == 1 + 4 / 3
    assert result.facts["histogram_server"] == result.facts["histogram_ours"] == [1, 1, 0, 1]
    assert (result.facts["lossless_requests"], result.facts["requests_with_equal_counts"]) == (2, 2)


@pytest.mark.parametrize(("distance", "ties", "problems"), [(1e-4, 1, 0), (0.2, 0, 1)])
def test_other_tokens_are_a_tie_or_a_loss(distance: float, ties: int, problems: int) -> None:
    result = verdict([same([1, 2], [2]), compared(([1, 2, 7], [2]), ([1, 2, 7], [2]), [1, 2, 8])], distance=distance)
    assert (len(result.ties), len(result.problems)) == (ties, problems)
    line = (result.ties + result.problems)[0]
    assert line.startswith("request 1, after 2 equal tokens: 7 with the draft, 8 without it; the target's log-probabilities differ by")


def test_half_precision_allows_larger_ties() -> None:
    long = same([1] * 9, [2] * POOLED_MIN_STEPS)
    requests = [long, compared(([1, 2], [2]), ([1, 2], [2]), [1, 3])]
    assert verdict(requests, "bfloat16", distance=0.2).problems == []
    assert "up to 0.1 in float16" in verdict(requests, "float16", distance=0.2).problems[0]


def test_answers_of_other_lengths_are_named() -> None:
    [problem] = verdict([compared(([1, 2, 3], [2]), ([1, 2, 3], [2]), [1, 2])]).problems
    assert problem == "request 0, after 2 equal tokens: one answer ends there and the other goes on (3 tokens with the draft, 2 without it)"


def test_other_counts_need_a_tie_of_the_draft() -> None:
    wrong = (([1, 2, 3, 4], [3]), ([1, 2, 3, 4], [1, 1]), [1, 2, 3, 4])
    [problem] = verdict([same([1, 2], [3]), compared(*wrong, margin=0.5)]).problems
    assert problem == ("request 1: 2 verify steps in the server with accepted drafts [0, 2, 0, 0], 1 here with [0, 0, 0, 1]; no tie "
                       "explains it (closest logits 0.5)")
    assert "no tie explains it" in verdict([compared(*wrong, margin=None)]).problems[0]
    tied = verdict([compared(*wrong, margin=1e-5)])
    assert not tied.problems and "a tie" in tied.ties[0]


def test_counts_of_other_texts_are_not_compared() -> None:
    result = verdict([compared(([1, 9], [3]), ([1, 2], [1]), [1, 2])], distance=1e-5)
    assert not result.problems and "2 in the server, 9 here" in result.ties[0]


@pytest.mark.parametrize(("served", "message"), [
    ([2] * POOLED_MIN_STEPS, None),
    ([2] * (POOLED_MIN_STEPS - 1) + [1], None),
    ([1] * POOLED_MIN_STEPS, r"accept_length is 2.000 in the server and 3.000 here, 33.3 % apart \(allowed: 5 %\)"),
    ([2] * 10, f"only 10 verify steps, and in half precision {POOLED_MIN_STEPS} are needed"),
])
def test_half_precision_is_pooled(served: list[int], message: str | None) -> None:
    result = verdict([compared(([1], [2] * POOLED_MIN_STEPS), ([1], served), [1])], "bfloat16")
    if message is None:
        assert result.problems == []
    else:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(result.problems[0])


def test_a_server_without_verify_steps_and_a_draft_that_guesses_nothing() -> None:
    silent: list[Any] = [compared(([1, 2], [1]), ([1, 2], []), [1, 2])]
    assert "made no verify step" in verdict(silent).problems[0]
    assert "accept_length is 1.00: so low" in verdict([same([1, 2], [0, 0, 0])]).warnings[0]
