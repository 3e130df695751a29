"""Target engine written by the user: any class with the interface of :class:`TargetEngine`, named by its path."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from specforge.errors import ConfigError
from specforge.inference.target_engine.base import TargetEngine
from specforge.runtime.contracts import CapturedFeatures, CaptureSpec, PromptTask, TargetIdentity


class CustomTargetEngine(TargetEngine):
    """Hands every call to ``engine``, a partial (``_partial_: true``) that is finished here with the runtime objects.

    The user's class is called with ``target_folder``, ``device``, ``identity`` and ``trust_remote_code`` besides its own keys. It
    never sees two calls at once.
    """

    runtime_arguments: ClassVar[tuple[str, ...]] = ("target_folder", "device", "identity", "trust_remote_code")

    def __init__(
        self, *, engine: Any, target_folder: Path, device: torch.device | str, identity: TargetIdentity, trust_remote_code: bool
    ) -> None:
        made = engine(target_folder=target_folder, device=device, identity=identity, trust_remote_code=trust_remote_code)
        missing = [name for name in ("capture", "generate", "close", "hidden_size", "num_layers") if not hasattr(made, name)]
        if missing:
            raise ConfigError(
                f"target_backend.engine: {type(made).__name__} lacks {', '.join(missing)}; derive it from "
                "specforge.inference.target_engine.base.TargetEngine"
            )
        self.engine: TargetEngine = made
        self.identity = identity
        self.hidden_size = made.hidden_size
        self.num_layers = made.num_layers
        self.stop_token_ids = tuple(getattr(made, "stop_token_ids", ()))
        self._one_call = threading.Lock()

    def capture(self, tasks: Sequence[PromptTask], spec: CaptureSpec) -> list[CapturedFeatures]:
        with self._one_call:
            return self.engine.capture(tasks, spec)

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
        with self._one_call:
            return self.engine.generate(
                prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop_token_ids=stop_token_ids
            )

    def close(self) -> None:
        self.engine.close()
