"""Sums that become numbers late: numerators and denominators over micro-batches, ranks and steps, divided only when logged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from specforge.evaluation.metrics import simulated_acc_len

Value = float | list[float]


class FlatSums:
    """Sums of one optimizer step in one float64 vector, so that a single all-reduce carries all of them.

    ``scalars`` are named sums; ``metrics`` are (numerator, denominator) pairs as in :class:`StepOutput`. Every rank must add the same
    names and shapes; :meth:`layout` says what they are, for comparing ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scalars: dict[str, torch.Tensor] = {}
        self.metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, name: str, value: torch.Tensor | float) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().to(self.device, torch.float64)
        else:  # filled on the device: a copy from the host would wait
            value = torch.full((), value, dtype=torch.float64, device=self.device)
        self.scalars[name] = self.scalars[name] + value if name in self.scalars else value

    def add_metrics(self, metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        for name, pair in metrics.items():
            num, den = (t.detach().to(self.device, torch.float64).reshape(-1) for t in pair)
            if name in self.metrics:
                num, den = self.metrics[name][0] + num, self.metrics[name][1] + den
            self.metrics[name] = (num, den)

    def layout(self) -> list[tuple[str, int]]:
        return [(name, 1) for name in sorted(self.scalars)] + [(name, self.metrics[name][0].numel()) for name in sorted(self.metrics)]

    def pack(self) -> torch.Tensor:
        parts = [self.scalars[name].reshape(1) for name in sorted(self.scalars)]
        for name in sorted(self.metrics):
            parts += self.metrics[name]
        return torch.cat(parts)

    def unpack(self, values: list[float]) -> tuple[dict[str, float], dict[str, tuple[list[float], list[float]]]]:
        """The inverse of :meth:`pack` on a host list; longer lists are fine."""
        scalars = dict(zip(sorted(self.scalars), values, strict=False))
        metrics = {}
        at = len(scalars)
        for name in sorted(self.metrics):
            size = self.metrics[name][0].numel()
            metrics[name] = (values[at : at + size], values[at + size : at + 2 * size])
            at += 2 * size
        return scalars, metrics


@dataclass
class MetricWindow:
    """Everything since the last logged line. It is part of a checkpoint, so a resumed run logs what an uninterrupted one would."""

    sums: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    steps: int = 0
    tokens: float = 0.0

    def add(self, metrics: Mapping[str, tuple[list[float], list[float]]], tokens: float) -> None:
        for name, (num, den) in metrics.items():
            old = self.sums.get(name, ([0.0] * len(num), [0.0] * len(den)))
            self.sums[name] = ([a + b for a, b in zip(old[0], num, strict=True)], [a + b for a, b in zip(old[1], den, strict=True)])
        self.steps += 1
        self.tokens += tokens

    def take(self) -> dict[str, Value]:
        """The divided metrics (a list where there is one entry a step or depth), and an empty window from now on."""
        values: dict[str, Value] = {}
        for name, (num, den) in self.sums.items():
            quotients = [n / d if d else math.nan for n, d in zip(num, den, strict=True)]
            values[name] = quotients[0] if len(quotients) == 1 else quotients
        accuracy = values.get("per_position_accuracy")
        if accuracy is not None:
            values.setdefault("simulated_acc_len", simulated_acc_len(accuracy if isinstance(accuracy, list) else [accuracy]))
        self.sums, self.steps, self.tokens = {}, 0, 0.0
        return values

    def state(self) -> dict[str, Any]:
        return {
            "sums": {name: [list(num), list(den)] for name, (num, den) in self.sums.items()},
            "steps": self.steps,
            "tokens": self.tokens,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MetricWindow:
        return cls({name: (list(num), list(den)) for name, (num, den) in state["sums"].items()}, state["steps"], state["tokens"])
