"""Plain-torch stand-in for SGLang's CPU kernel package, so that the real SGLang runs on a CPU without AMX. Test support only.

SGLang reaches operators in two ways: by name from this module, and as ``torch.ops.sgl_kernel.<name>``. Only what dense targets and
EAGLE-3 drafts need is here; any other name resolves to a function that raises ``NotImplementedError`` with that name.

``convert_weight_packed`` must never exist here: on hardware with AMX its presence would route linear layers and norms to operators that
this package does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_kernel.attention import decode_attention_cpu, extend_attention_cpu
from sgl_kernel.cache_slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel.draft_tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = "0.0.0+stand.in"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

# An attribute of the namespace is enough: nothing here goes through torch's dispatcher.
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {name}")

    missing.__name__ = name
    return missing
