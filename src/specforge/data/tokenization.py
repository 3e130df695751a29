"""Conversations to token ids and loss masks, in batches, over several processes when asked."""

from __future__ import annotations

import itertools
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from specforge.data.chat_template import ChatTemplate
from specforge.data.conversation import Conversation, RowProblem
from specforge.data.loss_mask import RenderedSample, Turns, mask_from_spans, render_reply, render_samples
from specforge.data.report import DataReport

_CHUNK = 512
# (ids [S], mask [S], line in the file, message index of the last reply)
Sample = tuple[np.ndarray, np.ndarray, int, int]


@dataclass(frozen=True)
class TokenizeOptions:
    """What decides the samples besides the text: the cut at ``max_length`` tokens and the replies that are supervised."""

    max_length: int
    turns: Turns


def tokenize_conversations(
    template: ChatTemplate, conversations: Iterable[Conversation], options: TokenizeOptions, report: DataReport
) -> list[Sample]:
    """Samples in order; what was cut, dropped or refused is counted in ``report``.

    A sample ends with its last supervised token: what the template writes after it is never generated nor read.
    """
    samples: list[Sample] = []
    for part in _chunks(conversations, _CHUNK):
        samples += _tokenize_chunk(template, part, options, report)
    return samples


def _tokenize_chunk(template: ChatTemplate, part: list[Conversation], options: TokenizeOptions, report: DataReport) -> list[Sample]:
    # Each entry is a finished sample or the place of a text in the batch, so that one tokenizer call serves the whole chunk.
    texts: list[RenderedSample] = []
    entries: list[tuple[Conversation, Sample | int]] = []
    checks: list[tuple[int, list[int]]] = []
    for conversation in part:
        first = len(texts)
        try:
            if conversation.response_ids:
                for sample, reply in _from_response_ids(template, conversation, options.turns, checks, texts):
                    entries.append((conversation, (*sample, conversation.line, reply)))
            else:
                rendered = render_samples(template, conversation, options.turns)
                report.split_by_template += len(rendered) > 1
                entries += [(conversation, first + i) for i in range(len(rendered))]
                texts += rendered
        except RowProblem as problem:
            report.skip(conversation.where, str(problem))
    encoded = template.encode([rendered.text for rendered in texts])
    for place, generated in checks:
        report.retokenized += _as_text(encoded[place], texts[place])[: len(generated)] != generated
    samples = []
    for conversation, entry in entries:
        if isinstance(entry, int):
            ids, offsets = encoded[entry]
            mask, inexact = mask_from_spans(offsets, texts[entry].spans)
            report.inexact_boundary += inexact
            made: Sample = (ids, mask, conversation.line, texts[entry].reply)
        else:
            made = entry
        if (cut := _cut(made, options.max_length, report)) is not None:
            samples.append(cut)
    return samples


def _as_text(encoded: tuple[np.ndarray, np.ndarray], rendered: RenderedSample) -> list[int]:
    mask, _ = mask_from_spans(encoded[1], rendered.spans)
    return encoded[0][: np.flatnonzero(mask)[-1] + 1].tolist() if mask.any() else []


def _cut(sample: Sample, max_length: int, report: DataReport) -> Sample | None:
    ids, mask, line, reply = sample
    supervised = np.flatnonzero(mask)
    end = int(supervised[-1]) + 1 if len(supervised) else 0
    if end > max_length:
        report.truncated += 1
        end = max_length
    if not mask[:end].any():
        report.unsupervised += 1
        return None
    return ids[:end], mask[:end], line, reply


def _from_response_ids(
    template: ChatTemplate,
    conversation: Conversation,
    turns: Turns,
    checks: list[tuple[int, list[int]]],
    texts: list[RenderedSample],
) -> list[tuple[tuple[np.ndarray, np.ndarray], int]]:
    """Samples whose replies are generated ids: prompt ids + response ids, exactly as the target saw them.

    Replies share a sample when the later prompt begins with the earlier prompt and response. ``checks`` gets what the text of
    each reply should tokenize to, so that differences can be counted.
    """
    replies = sorted(conversation.response_ids)
    samples: list[tuple[list[int], list[bool], int]] = []
    for reply in replies if turns == "all" else replies[-1:]:
        response = conversation.response_ids[reply]
        prompt = template.render_prompt(conversation.messages[:reply], conversation.tools)
        checks.append((len(texts), prompt + response))
        texts.append(render_reply(template, conversation.messages, reply, conversation.tools))
        mask = [False] * len(prompt)
        if samples and prompt[: len(samples[-1][0])] == samples[-1][0]:
            earlier = samples.pop()[1]
            mask[: len(earlier)] = earlier
        samples.append((prompt + response, mask + [True] * len(response), reply))
    return [((np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=bool)), reply) for ids, mask, reply in samples]


def _chunks(items: Iterable[Conversation], size: int) -> Iterator[list[Conversation]]:
    iterator = iter(items)
    while part := list(itertools.islice(iterator, size)):
        yield part


# -- several processes ---------------------------------------------------------------------------------------------------------

_worker: tuple[ChatTemplate, TokenizeOptions] | None = None


def _start_worker(tokenizer: Any, override: str | None, arguments: Mapping[str, Any], options: TokenizeOptions) -> None:
    global _worker
    _worker = (ChatTemplate(tokenizer, override, arguments), options)


def _work(part: list[Conversation]) -> tuple[list[Sample], DataReport]:
    assert _worker is not None
    report = DataReport()
    return tokenize_conversations(_worker[0], part, _worker[1], report), report


def tokenize_in_processes(
    template: ChatTemplate,
    conversations: Iterable[Conversation],
    options: TokenizeOptions,
    report: DataReport,
    num_workers: int,
) -> list[Sample]:
    """The same samples in the same order as :func:`tokenize_conversations`, made by ``num_workers`` processes."""
    samples: list[Sample] = []
    waiting: deque[Future[tuple[list[Sample], DataReport]]] = deque()

    def collect() -> None:
        done, counts = waiting.popleft().result()
        samples.extend(done)
        report.add(counts)

    # "spawn": a forked child would inherit locks of the tokenizer's thread pool.
    context = multiprocessing.get_context("spawn")
    setup = (template.tokenizer, template.override, template.arguments, options)
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker, initargs=setup) as pool:
        for part in _chunks(conversations, _CHUNK):
            waiting.append(pool.submit(_work, part))
            if len(waiting) > 2 * num_workers:
                collect()
        while waiting:
            collect()
    return samples
