"""The contract of a target engine: frozen target in, features and answers out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from specforge.runtime.contracts import CapturedFeatures, CaptureSpec, PromptTask, TargetIdentity


class TargetEngine(ABC):
    """One frozen target that captures features and generates answers; never trains and never sees the draft.

    Calls may come from two threads at once (prefetch and evaluation); an engine that keeps state during a call lets one wait.

    Attributes: ``identity`` names the model in every feature; ``hidden_size`` H and ``num_layers`` N are the text model's;
    ``stop_token_ids`` are the tokens after which the model's own generation config ends a reply.
    """

    identity: TargetIdentity
    hidden_size: int
    num_layers: int
    stop_token_ids: tuple[int, ...]

    @abstractmethod
    def capture(self, tasks: Sequence[PromptTask], spec: CaptureSpec) -> list[CapturedFeatures]:
        """Features of ``tasks`` in their order: unpadded tensors named as in ``runtime.contracts``, on the engine's device.

        ``input_ids`` int64 [S] and ``loss_mask`` bool [S] are included; hidden states have ``spec.dtype``. ``target_argmax`` [S]
        (int64) is the target's own next token after tok[i] where m[i+1] = 1, and −1 elsewhere.
        Raises :class:`TargetError` for layer ids that the engine cannot give.
        """

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> list[list[int]]:
        """Answers in the order of ``prompts``, each with its stop token if one came. Temperature 0 is greedy.

        A prompt's draws depend on its seed alone (one seed a prompt, or one for all that is mixed with the prompt's place), never
        on the other prompts of a batch.
        """

    def close(self) -> None:  # noqa: B027 - most engines hold nothing but memory
        """Give back processes and memory; the engine is not used afterwards."""


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on a CPU and bfloat16 on an accelerator; other names are torch's own."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
