"""What is sent to SGLang for a capture or an answer, and how its reply becomes features; every check that keeps a partial one out."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specforge.errors import DataError, FeatureError, RunError, TargetError
from specforge.inference.sglang_client.pool import ServerBusy
from specforge.inference.sglang_http import ServerUnreachable
from specforge.inference.sglang_plugin.marks import Mark
from specforge.inference.sglang_plugin.settings import ANSWER_KEY
from specforge.runtime.contracts import (
    AUX_HIDDEN_STATES,
    FINAL_HIDDEN_STATES,
    INPUT_IDS,
    LOSS_MASK,
    TARGET_ARGMAX,
    CapturedFeatures,
    CaptureSpec,
    FeatureSpec,
    PromptTask,
    SampleRef,
    TargetIdentity,
)
from specforge.runtime.data_plane.feature_store import check_stored
from specforge.runtime.data_plane.shared_dir import SharedDirStore

_WAIT_FIRST_SECONDS, _WAIT_MOST_SECONDS = 0.001, 0.05
_NOBODY = TargetIdentity("", None, "", "", "")


def capture_body(task: PromptTask, rid: str) -> dict[str, Any]:
    """A request that runs the prompt once. ``extra_key`` keeps it out of the prefix cache of other requests."""
    return {"input_ids": list(task.input_ids), "rid": rid, "extra_key": rid, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}


def generate_body(prompt: Sequence[int], *, max_new_tokens: int, temperature: float, top_p: float, seed: int, stops: Sequence[int],
                  own_stops: Sequence[int]) -> dict[str, Any]:
    """A request for an answer. SGLang always ends at the model's own stops, so those are switched off when they are not wanted."""
    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "stop_token_ids": list(stops)}
    if temperature > 0:
        sampling |= {"top_p": top_p, "sampling_seed": seed % (1 << 31)}
    if not set(own_stops) <= set(stops):
        sampling["ignore_eos"] = True
    return {"input_ids": list(prompt), "sampling_params": sampling}


def answer_tokens(answer: dict[str, Any], stops: Sequence[int]) -> list[int]:
    """The generated ids up to and with the first stop token."""
    check_finished(answer, "an answer")
    tokens = [int(t) for t in answer.get("output_ids") or []]
    end = next((i + 1 for i, token in enumerate(tokens) if token in set(stops)), len(tokens))
    return tokens[:end]


def check_finished(answer: dict[str, Any], what: str) -> None:
    """Raise :class:`RunError` for a request that SGLang gave up."""
    reason = (answer.get("meta_info") or {}).get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise RunError(f"SGLang aborted {what}: {reason.get('message', 'no reason given')}")


def plugin_answer(answer: dict[str, Any]) -> dict[str, Any] | None:
    """What the plug-in wrote into an answer, None when it wrote nothing."""
    values = (answer.get("meta_info") or {}).get(ANSWER_KEY)
    found = [v for v in values if isinstance(v, dict)] if isinstance(values, list) else []
    return found[-1] if found else None


def read_capture(answer: dict[str, Any], mark: Mark, task: PromptTask, spec: CaptureSpec, store: SharedDirStore | None, timeout: float,
                 server: str) -> CapturedFeatures:
    """The features of ``task``, complete and checked, in host memory; what the server gives beyond ``spec`` is left out.

    Raises :class:`ServerBusy`, :class:`ServerUnreachable` when a promised file does not come, and the package's own errors.
    """
    check_finished(answer, f"sample {task.sample_id}")
    said = plugin_answer(answer)
    if said is None:
        raise TargetError(f"{server}: no features came with the answer for sample {task.sample_id}; the plug-in specforge_capture does "
                          "not see "
                          "the prompts of this target class in this SGLang")
    status = said.get("status")
    if status == "busy":
        raise ServerBusy(said["message"])
    if status == "inline":
        tensors = _inline_tensors(said, task)
    elif status == "stored" and store is not None:
        tensors = _stored_tensors(store, mark, timeout, server)
    else:
        kind = TargetError if status in ("prefix_cache", "no_aux", "too_large", "no_store") else RunError
        raise kind(f"{server}, sample {task.sample_id}: {said.get('message', said)}")
    return CapturedFeatures(task.sample_id, check_features(tensors, task, spec, server))


def check_features(tensors: dict[str, Tensor], task: PromptTask, spec: CaptureSpec, server: str) -> dict[str, Tensor]:
    """The tensors of ``spec`` among ``tensors``, ``target_argmax`` only if the server gave it.

    Raises :class:`FeatureError` unless they are of exactly this prompt.
    """
    where = f"{server}, sample {task.sample_id}"
    if tensors[INPUT_IDS].tolist() != list(task.input_ids):
        raise FeatureError(f"{where}: the features are of {len(tensors[INPUT_IDS])} other tokens than the {len(task.input_ids)} that "
                           "were sent")
    wanted = {INPUT_IDS: tensors[INPUT_IDS], LOSS_MASK: torch.tensor(task.loss_mask, dtype=torch.bool)}
    for name in ([AUX_HIDDEN_STATES] if spec.aux_layer_ids else []) + ([FINAL_HIDDEN_STATES] if spec.final_hidden else []):
        if name not in tensors:
            raise FeatureError(f"{where}: the server gave no {name}")
        if str(tensors[name].dtype).removeprefix("torch.") != spec.dtype or len(tensors[name]) != len(task.input_ids):
            raise FeatureError(f"{where}: {name} is {tensors[name].dtype} with {len(tensors[name])} rows, expected {spec.dtype} with "
                               f"{len(task.input_ids)}")
        wanted[name] = tensors[name]
    if spec.target_argmax and TARGET_ARGMAX in tensors:
        wanted[TARGET_ARGMAX] = tensors[TARGET_ARGMAX]
    return wanted


def _stored_tensors(store: SharedDirStore, mark: Mark, timeout: float, server: str) -> dict[str, Tensor]:
    """Wait for the file that the answer promised, map it, and take it out of the folder: the views keep it."""
    deadline, pause = time.monotonic() + timeout, _WAIT_FIRST_SECONDS
    while (ref := store.find_attempt(mark.name, mark.attempt)) is None:
        if (reason := store.failure(mark.name, mark.attempt)) is not None:
            raise RunError(f"{server}: features of {mark.name} could not be stored in {store.folder}: {reason}")
        if time.monotonic() > deadline:
            raise ServerUnreachable(f"{server}: the features of {mark.name} did not appear in {store.folder} within {timeout:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, _WAIT_MOST_SECONDS)
    tensors = store.get(ref)
    store.discard(ref)
    return tensors


def _inline_tensors(said: dict[str, Any], task: PromptTask) -> dict[str, Tensor]:
    """Tensors out of base64, each against its checksum."""
    raw = bytearray(base64.b64decode(said["data"]))
    tensors: dict[str, Tensor] = {}
    specs, offset = [], 0
    for name, dtype_name, shape, checksum in said["specs"]:
        dtype = getattr(torch, dtype_name)
        count = 1
        for size in shape:
            count *= size
        end = offset + count * torch.empty((), dtype=dtype).element_size()
        if end > len(raw):
            raise FeatureError(f"sample {task.sample_id}: the answer holds {len(raw)} bytes, {name} would end at {end}")
        # A buffer of its own for each tensor, so that every dtype finds its alignment.
        own = bytearray(raw[offset:end])
        tensors[name] = torch.frombuffer(own, dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
        specs.append(FeatureSpec(name, tuple(shape), dtype_name, checksum))
        offset = end
    ref = SampleRef(task.sample_id, "inline", tuple(specs), _NOBODY, CaptureSpec((), False, False, ""), len(task.input_ids), offset)
    check_stored(ref, tensors, checksums=True)
    return tensors


def too_long(task: PromptTask, limit: int | None, server: str) -> DataError | None:
    """The error for a sample that the server cannot take, before anything is sent."""
    if limit is None or len(task.input_ids) < limit:
        return None
    return DataError(f"sample {task.sample_id} has {len(task.input_ids)} tokens, and {server} takes fewer than {limit} (its context "
                     "length). "
                     f"Set data.max_length={limit - 8} or start the server with a longer --context-length")
