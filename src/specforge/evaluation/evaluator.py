"""Held-out evaluation: accuracies and walks from features while training, real speculative decoding on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from specforge.config.build import component_class
from specforge.distributed.groups import Group
from specforge.evaluation.decode import CachedTarget, Decoded, DecodeSettings, SamplingMode, decode_plain, decode_speculative
from specforge.evaluation.draft_tree import tree_problems
from specforge.evaluation.metrics import Walk, bootstrap_interval, prefix_lengths, simulated_acc_len, walk_document
from specforge.evaluation.proposer import Proposer
from specforge.modeling.target import TargetHead
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import DraftTrainStrategy


class Evaluator:
    """Built from ``conf/evaluator``; the YAML says what each number means."""

    def __init__(
        self,
        *,
        num_draft_tokens: Annotated[int, Field(ge=1, le=32)],
        batch_tokens: Annotated[int, Field(ge=1)],
        num_requests: Annotated[int, Field(ge=1)] | None,
        num_baseline_requests: Annotated[int, Field(ge=0)] | None,
        num_untrained_requests: Annotated[int, Field(ge=0)],
        max_new_tokens: Annotated[int, Field(ge=1)],
        temperature: Annotated[float, Field(ge=0)],
        mode: SamplingMode,
        tree_topk: Annotated[int, Field(ge=1, le=16)],
        tree_num_tokens: Annotated[int, Field(ge=1, le=512)] | None,
        time_limit_minutes: Annotated[float, Field(gt=0)] | None,
    ) -> None:
        self.num_draft_tokens, self.batch_tokens = num_draft_tokens, batch_tokens
        self.num_requests, self.num_baseline_requests = num_requests, num_baseline_requests
        self.num_untrained_requests = num_untrained_requests
        self.max_new_tokens, self.temperature, self.mode, self.time_limit_minutes = max_new_tokens, temperature, mode, time_limit_minutes
        self.tree_topk, self.tree_num_tokens = tree_topk, tree_num_tokens

    @classmethod
    def rules(cls, choices: Mapping[str, str], config: Mapping[str, Any]) -> list[str]:
        node = config["evaluator"]
        topk = node.get("tree_topk", 1)
        if not isinstance(topk, int) or not isinstance(node.get("num_draft_tokens"), int):
            return []
        problems = tree_problems(node["num_draft_tokens"], topk, node.get("tree_num_tokens"), node.get("temperature") or 0.0)
        if topk > 1 and not getattr(component_class(config["strategy"], config.get("plugins") or ()), "drafts_trees", False):
            problems.append(
                f"evaluator.tree_topk: {topk} — a draft of strategy={choices.get('strategy')} proposes one chain and no tree. "
                "Set evaluator.tree_topk=1."
            )
        return problems

    @torch.no_grad()
    def from_features(
        self,
        strategy: DraftTrainStrategy,
        model: nn.Module,
        batches: Sequence[TrainBatch],
        head: TargetHead,
        group: Group,
        device: torch.device,
    ) -> dict[str, Any]:
        """Accuracies, joint_acc_len and walk_accept_length over this rank's ``batches``, summed over ranks before dividing. Collective."""
        n = self.num_draft_tokens
        right, count = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
        prefix_sum, walk = 0, Walk()
        for batch in batches:
            documents, places, correct, legal = (x.cpu() for x in strategy.prefix_correctness(model, batch.to(device), head, n))
            right += correct.sum(0)
            count += legal.sum(0)
            prefixes = prefix_lengths(correct)
            prefix_sum += int(prefixes.sum())
            sizes = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
            for of_document, their_prefixes in zip(places.split(sizes), prefixes.split(sizes), strict=True):
                walk.add(walk_document(of_document.tolist(), their_prefixes.tolist()))
        sums = torch.cat((right, count, torch.tensor([prefix_sum, walk.steps, walk.accepted], dtype=torch.float64))).to(device)
        group.all_reduce_sum(sums)
        right, count, rest = sums[:n].tolist(), sums[n : 2 * n].tolist(), sums[2 * n :].tolist()
        accuracy = [r / c if c else 0.0 for r, c in zip(right, count, strict=True)]
        return {
            "per_position_accuracy": accuracy,
            "simulated_acc_len": simulated_acc_len(accuracy),
            "joint_acc_len": rest[0] / count[0] if count[0] else 0.0,
            "walk_accept_length": Walk(int(rest[1]), int(rest[2])).accept_length,
            "num_rows": count[0],
            "num_draft_tokens": n,
        }

    def settings(self, stop_token_ids: frozenset[int], seed: int) -> DecodeSettings:
        return DecodeSettings(
            self.num_draft_tokens,
            self.max_new_tokens,
            self.temperature,
            self.mode,
            stop_token_ids,
            seed,
            self.tree_topk,
            self.tree_num_tokens,
        )

    def by_decoding(
        self,
        target: CachedTarget,
        proposer: Proposer,
        aux_layer_ids: Sequence[int],
        prompts: Sequence[Sequence[int]],
        settings: DecodeSettings,
        device: torch.device,
        compare: bool = True,
        limit: int | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> DecodeReport:
        """Decode the held-out prompts (the first ``limit``) with the draft and, with ``compare``, as many as asked without it.

        Both decodings of a request follow each other, so that a change in the machine's load meets both speeds alike.
        """
        chosen = prompts[: self.num_requests][:limit]
        wanted = self.num_baseline_requests if compare else 0
        compared = len(chosen) if wanted is None else min(wanted, len(chosen))
        result = DecodeReport(settings, len(chosen))
        deadline = None if self.time_limit_minutes is None else time.monotonic() + 60 * self.time_limit_minutes
        for i, prompt in enumerate(chosen):
            if deadline is not None and time.monotonic() > deadline:
                break
            result.speculative.append(decode_speculative(target, proposer, aux_layer_ids, prompt, settings, device, i))
            if i < compared:
                result.plain.append(decode_plain(target, prompt, settings, device, i))
            if report is not None:
                report(i + 1, len(chosen))
        return result


@dataclass
class DecodeReport:
    """Everything that a stored accept_length must carry (conventions §7), and the two outputs of each compared request."""

    settings: DecodeSettings
    num_asked: int
    speculative: list[Decoded] = field(default_factory=list)
    plain: list[Decoded] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        counts = [(sum(d.accepted), d.verify_steps) for d in self.speculative]
        accepted, steps = sum(a for a, _ in counts), sum(s for _, s in counts)
        histogram = [0] * (self.settings.num_draft_tokens + 1)
        for decoded in self.speculative:
            for length in decoded.accepted:
                histogram[length] += 1
        pairs = list(zip(self.speculative, self.plain, strict=False))
        greedy = self.settings.temperature == 0.0
        low, high = bootstrap_interval(counts)
        return {
            "accept_length": 1.0 + accepted / steps if steps else 1.0,
            "accept_length_interval_95": [low, high],
            "acceptance_histogram": histogram,
            "num_verify_steps": steps,
            "num_requests": len(self.speculative),
            "num_requests_asked": self.num_asked,
            "harness": "specforge",
            "num_draft_tokens": self.settings.num_draft_tokens,
            "tree": None if self.settings.tree is None else asdict(self.settings.tree),
            "temperature": self.settings.temperature,
            "mode": "greedy" if greedy else self.settings.mode,
            "max_new_tokens": self.settings.max_new_tokens,
            "lossless_requests": sum(a.tokens == b.tokens for a, b in pairs) if greedy else None,
            "compared_requests": len(pairs),
            "first_difference": _first_difference(pairs) if greedy else None,
            "tokens_per_second_with_draft": _speed([a for a, _ in pairs] or self.speculative),
            "tokens_per_second_without_draft": _speed([b for _, b in pairs]),
        }


def _speed(decoded: Sequence[Decoded]) -> float | None:
    seconds = sum(d.seconds for d in decoded)
    return sum(len(d.tokens) for d in decoded) / seconds if seconds else None


def _first_difference(pairs: Sequence[tuple[Decoded, Decoded]]) -> dict[str, Any] | None:
    for i, (a, b) in enumerate(pairs):
        if a.tokens != b.tokens:
            at = next((k for k, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), min(len(a.tokens), len(b.tokens)))
            return {"request": i, "token": at, "with_draft": a.tokens[at : at + 4], "without_draft": b.tokens[at : at + 4]}
    return None
