"""SGLang plug-in of the tests: lets the block algorithms and the MLA draft run on its CPU engine, which SGLang itself keeps for CUDA.

Nothing here touches what a draft computes, but for one cast: SGLang hands a block draft its embeddings in bfloat16 whatever the draft's
dtype is, and a float32 draft wants them in its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _SaysCuda:
    """Server arguments whose ``device`` reads cuda; everything else is passed through."""

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments

    def __getattr__(self, name: str) -> Any:
        return "cuda" if name == "device" else getattr(self._arguments, name)


def _past_the_device_check(original: Callable[[Any], Any], server_args: Any) -> Any:
    from sglang.srt.arg_groups import speculative_hook

    view = speculative_hook.resolving_view
    if view(server_args).device != "cpu":
        return original(server_args)
    speculative_hook.resolving_view = lambda arguments: _SaysCuda(view(arguments))
    try:
        return original(server_args)
    finally:
        speculative_hook.resolving_view = view


def _embeddings_in_the_drafts_dtype(self: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dtype, place = self.fc.weight.dtype, 3  # of input_embeds among the positional arguments
    if kwargs.get("input_embeds") is not None:
        kwargs["input_embeds"] = kwargs["input_embeds"].to(dtype)
    elif len(args) > place and args[place] is not None:
        args = (*args[:place], args[place].to(dtype), *args[place + 1 :])
    return (self, *args), kwargs


def _write_kept_rows(pool: Any, layer: Any, slots: Any, kept: Any, keys: Any, values: Any, k_scale: Any, v_scale: Any, *_: Any, **__: Any) -> None:
    """Replaces a Triton kernel: write the first ``kept[i]`` of each request's rows into its cache slots [requests, rows]."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    chosen = (torch.arange(slots.shape[1])[None] < kept.long()[:, None]).flatten()
    pool.set_kv_buffer(layer, KVWriteLoc(slots.flatten()[chosen], physical=True), keys[chosen], values[chosen], k_scale, v_scale)


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    if "intel_amx" not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.DRAFT_ATTENTION_BACKEND_CHOICES.append("intel_amx")
    arguments, runtime = "sglang.srt.arg_groups.speculative_hook", "sglang.srt.speculative.domino_utils.validate_domino_runtime"
    for name in ("_handle_dflash", "_handle_dspark"):
        HookRegistry.register(f"{arguments}.{name}", _past_the_device_check, HookType.AROUND)
    HookRegistry.register(runtime, lambda **_: None, HookType.REPLACE)  # asks for CUDA and bfloat16
    HookRegistry.register("sglang.srt.models.dflash.DFlashDraftModel.forward", _embeddings_in_the_drafts_dtype, HookType.BEFORE)
    pool = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer_prefix_valid"
    HookRegistry.register(pool, _write_kept_rows, HookType.REPLACE)
    if not hasattr(DFlashVerifyInput, "tree_topk"):
        DFlashVerifyInput.tree_topk = 1
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_, **__: None
        record_stream = torch.Tensor.record_stream
        torch.Tensor.record_stream = lambda tensor, stream: record_stream(tensor, stream) if tensor.is_cuda else None
