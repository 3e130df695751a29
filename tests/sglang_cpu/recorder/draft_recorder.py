"""SGLang plug-in of the tests: writes what each forward of an EAGLE-3 draft read and gave, one file a forward."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch

_count = itertools.count()


def _record(result: Any, model: Any, input_ids: Any, positions: Any, batch: Any, *rest: Any, **more: Any) -> None:
    folder = Path(os.environ["DRAFT_RECORD_FOLDER"])
    row = {
        "rids": list(batch.rids or []), "extend": batch.forward_mode.is_extend(), "input_ids": input_ids.clone(),
        "positions": positions.clone(), "features": batch.spec_info.hidden_states.clone(), "logits": result.next_token_logits.clone(),
    }
    name = f"{next(_count):06d}.pt"
    torch.save(row, folder / f".{name}")
    os.replace(folder / f".{name}", folder / name)


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "DRAFT_RECORD_FOLDER" in os.environ:
        HookRegistry.register("sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3.forward", _record, HookType.AFTER)
