"""The optimizer: AdamW over the fp32 masters that the backend hands in, with weight decay only where it belongs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerFactory(ABC):
    """A config-built recipe: it has the numbers, and makes the optimizer once the backend knows the masters."""

    lr: float

    @abstractmethod
    def create(self, masters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer over the fp32 ``masters`` (name → parameter), with deterministic parameter groups."""


class AdamW(OptimizerFactory):
    """AdamW (arXiv 1711.05101) with fp32 moments. Norm weights, biases and every other 1-D parameter are not decayed.

    ``implementation``: ``auto`` takes the fused kernel on CUDA and the foreach one elsewhere; both give the same result on every
    start of the same machine, which bit-for-bit resume needs.
    """

    def __init__(
        self,
        *,
        lr: Positive,
        beta1: Beta,
        beta2: Beta,
        eps: Positive,
        weight_decay: NotNegative,
        implementation: Literal["auto", "fused", "foreach", "plain"],
    ) -> None:
        self.lr = lr
        self.betas = (beta1, beta2)
        self.eps = eps
        self.weight_decay = weight_decay
        self.implementation = implementation

    def create(self, masters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        decayed = [p for name, p in masters.items() if is_decayed(name, p)]
        kept = [p for name, p in masters.items() if not is_decayed(name, p)]
        groups = [{"params": params, "weight_decay": decay} for params, decay in ((decayed, self.weight_decay), (kept, 0.0)) if params]
        on_cuda = all(p.device.type == "cuda" for p in masters.values())
        choice = self.implementation if self.implementation != "auto" else ("fused" if on_cuda else "foreach")
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=choice == "fused", foreach=choice == "foreach")


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: matrices only, and nothing that belongs to a norm."""
    return parameter.ndim >= 2 and "norm" not in name.lower()
