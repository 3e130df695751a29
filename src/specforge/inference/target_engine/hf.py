"""Target engine over any causal language model of transformers: capture by hooks, answers by a batched loop with a cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from specforge.errors import RunError, TargetError
from specforge.inference.capture import token_batches
from specforge.inference.layer_ids import check_layer_ids
from specforge.inference.target_engine.base import TargetEngine, resolve_dtype
from specforge.inference.target_engine.hf_generate import cache_argument, generate_batched
from specforge.inference.target_engine.hf_tree import keep_in_cache, tree_arguments
from specforge.runtime.contracts import (
    AUX_HIDDEN_STATES,
    FINAL_HIDDEN_STATES,
    INPUT_IDS,
    LOSS_MASK,
    TARGET_ARGMAX,
    CapturedFeatures,
    CaptureSpec,
    PromptTask,
    TargetIdentity,
)

_CUDA_BATCH_TOKENS = 16384
# Logits of one tile of the head: 2^26 values are 256 MiB in float32, whatever the vocabulary.
_HEAD_TILE_VALUES = 1 << 26


class HFTargetEngine(TargetEngine):
    """See ``conf/target_backend/hf.yaml`` for the values. Weights are frozen, in eval mode, and no call records a gradient."""

    runtime_arguments: ClassVar[tuple[str, ...]] = ("target_folder", "device", "identity", "trust_remote_code")

    model: Any
    decoder: Any

    def __init__(
        self,
        *,
        dtype: Literal["auto", "float32", "bfloat16", "float16"],
        batch_tokens: Annotated[int, Field(gt=0)] | None,
        attn_implementation: str | None,
        target_folder: Path,
        device: torch.device | str,
        identity: TargetIdentity,
        trust_remote_code: bool,
    ) -> None:
        self.device = torch.device(device)
        self.identity = identity
        self.dtype = resolve_dtype(dtype, self.device)
        self.batch_tokens = batch_tokens if batch_tokens or self.device.type == "cpu" else _CUDA_BATCH_TOKENS
        self.model = _load(Path(target_folder), self.dtype, attn_implementation, trust_remote_code).to(self.device)
        self.decoder = _find_decoder(self.model)
        text_config = self.model.config.get_text_config(decoder=True)
        self.num_layers = int(text_config.num_hidden_layers)
        self.hidden_size = int(text_config.hidden_size)
        self.vocab_size = int(text_config.vocab_size)
        self.stop_token_ids = _stop_token_ids(self.model)
        self._kept: dict[int, Tensor] = {}  # outputs of the wanted layers during one forward
        self._wanted: frozenset[int] = frozenset()
        self._keep_dtype = self.dtype
        # Hooks write into the engine, and the prefetch thread captures while the main thread evaluates: one forward at a time.
        self._one_forward = threading.RLock()
        for layer_id, layer in enumerate(_find_layers(self.decoder, self.num_layers)):
            layer.register_forward_hook(self._hook(layer_id))

    def capture(self, tasks: Sequence[PromptTask], spec: CaptureSpec) -> list[CapturedFeatures]:
        check_layer_ids(spec.aux_layer_ids, self.num_layers)
        if spec.final_hidden and not spec.post_norm:
            raise TargetError("capture.post_norm=false: the hf engine gives the final hidden state after the target's final norm only")
        results: list[CapturedFeatures | None] = [None] * len(tasks)
        for batch in token_batches([len(task.input_ids) for task in tasks], self.batch_tokens):
            try:
                with self._one_forward:
                    captured = self._capture_batch([tasks[i] for i in batch], spec)
            except torch.OutOfMemoryError as error:
                raise RunError(
                    f"the device ran out of memory while the target read {len(batch)} samples of up to {len(tasks[batch[0]].input_ids)} "
                    f"tokens (target_backend.batch_tokens={self.batch_tokens}). Lower it, for example target_backend.batch_tokens=4096"
                ) from error
            for i, features in zip(batch, captured, strict=True):
                results[i] = features
        return [features for features in results if features is not None]

    @torch.no_grad()
    def _capture_batch(self, tasks: list[PromptTask], spec: CaptureSpec) -> list[CapturedFeatures]:
        dtype = resolve_dtype(spec.dtype, self.device)
        lengths = [len(task.input_ids) for task in tasks]
        ids = torch.zeros(len(tasks), max(lengths), dtype=torch.int64)
        for row, task in enumerate(tasks):
            ids[row, : lengths[row]] = torch.tensor(task.input_ids, dtype=torch.int64)
        ids = ids.to(self.device)
        # Padding is on the right and attention is causal, so no real position sees it and no mask is needed.
        final, kept = self._run_decoder(ids, spec.aux_layer_ids, dtype)
        results = []
        for row, (task, length) in enumerate(zip(tasks, lengths, strict=True)):
            mask = torch.tensor(task.loss_mask, dtype=torch.bool, device=self.device)
            tensors = {INPUT_IDS: ids[row].narrow(0, 0, length).clone(), LOSS_MASK: mask}
            if spec.aux_layer_ids:
                tensors[AUX_HIDDEN_STATES] = torch.cat([kept[i][row].narrow(0, 0, length) for i in spec.aux_layer_ids], dim=-1)
            if spec.final_hidden:
                tensors[FINAL_HIDDEN_STATES] = final[row].narrow(0, 0, length).to(dtype, copy=True)
            if spec.target_argmax:
                tensors[TARGET_ARGMAX] = self._argmax_before_replies(final[row, :length], mask)
            results.append(CapturedFeatures(task.sample_id, tensors))
        return results

    def _argmax_before_replies(self, final: Tensor, mask: Tensor) -> Tensor:
        """final [S,H], mask [S] → the target's choice at rows whose next token is supervised, −1 elsewhere: int64 [S]."""
        argmax = torch.full((len(mask),), -1, dtype=torch.int64, device=self.device)
        rows = mask[1:].nonzero().squeeze(-1)
        tile = max(1, _HEAD_TILE_VALUES // self.vocab_size)
        for part in rows.split(tile) if len(rows) else ():
            argmax[part] = self.head_logits(final[part]).argmax(dim=-1)
        return argmax

    def _run_decoder(self, ids: Tensor, layer_ids: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, dict[int, Tensor]]:
        self._keep(layer_ids, dtype)
        try:
            final = self.decoder(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state
            return final, self._kept
        finally:
            self._keep((), dtype)

    @torch.no_grad()
    def head_logits(self, hidden: Tensor) -> Tensor:
        """Post-norm hidden [R,H] → logits [R,V] by the model's own head, its scale, bias and soft-cap included."""
        # The causal model is run over a decoder that answers with ``hidden``: whatever the class does after its decoder is kept.
        placeholder = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=self.device)
        with self._one_forward:
            answer = self.decoder(input_ids=placeholder[:, :1], use_cache=False, return_dict=True)
            answer = type(answer)(**{**answer, "last_hidden_state": hidden.unsqueeze(0)})
            self.decoder.forward = lambda *args, **kwargs: answer
            try:
                return self.model(input_ids=placeholder, use_cache=False, return_dict=True).logits[0]
            finally:
                del self.decoder.forward

    @torch.no_grad()
    def forward_cached(
        self, input_ids: Tensor, cache: Any | None, aux_layer_ids: Sequence[int], parents: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        """One request, T new tokens: (ids [1,T], cache or None) → (logits [T,V] float32, aux [T, K·H], cache).

        With ``parents`` they are a tree: token i follows token ``parents[i]``, or the last cached one for −1. The cache keeps every
        position of every layer, so that :meth:`crop_cache` and :meth:`keep_in_cache` take rejected tokens back.
        """
        if cache is None:
            from transformers import DynamicCache

            cache = DynamicCache()
        tree = {} if parents is None else tree_arguments(self.model, parents, cache.get_seq_length(), self.dtype, self.device)
        with self._one_forward:
            self._keep(aux_layer_ids, self.dtype)
            try:
                cached = {cache_argument(self.model): cache, **tree}
                output = self.model(input_ids=input_ids.to(self.device), use_cache=True, return_dict=True, **cached)
                parts = [self._kept[i][0] for i in aux_layer_ids]
                aux = torch.cat(parts, dim=-1) if parts else output.logits.new_zeros(input_ids.shape[1], 0)
                return output.logits[0].float(), aux, cache
            finally:
                self._keep((), self.dtype)

    def crop_cache(self, cache: Any, length: int) -> Any:
        """Forget every position from ``length`` on."""
        surplus = cache.get_seq_length() - length
        if surplus > 0:
            cache.crop(-surplus)  # the negative form means the same in all supported releases of transformers
        return cache

    def keep_in_cache(self, cache: Any, length: int, places: Sequence[int]) -> Any:
        """Keep the first ``length`` positions and ``places`` of those behind them, in this order."""
        return keep_in_cache(cache, length, places)

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
        with self._one_forward:
            return generate_batched(
                self.model,
                prompts,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stop_token_ids=stop_token_ids,
            )

    def close(self) -> None:
        self._kept = {}
        self.model = nn.Module()
        self.decoder = nn.Module()

    def _keep(self, layer_ids: Sequence[int], dtype: torch.dtype) -> None:
        self._wanted, self._keep_dtype, self._kept = frozenset(layer_ids), dtype, {}

    def _hook(self, layer_id: int) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if layer_id in self._wanted:
                hidden = output[0] if isinstance(output, tuple) else output
                self._kept[layer_id] = hidden.detach().to(self._keep_dtype)

        return keep


def _load(folder: Path, dtype: torch.dtype, attn_implementation: str | None, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TargetError(f"target folder {folder}: transformers cannot load it as a causal language model: {reason}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    return model.eval().requires_grad_(False)


def _find_decoder(model: Any) -> nn.Module:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        decoder = getattr(model, "base_model", None)
    if not isinstance(decoder, nn.Module) or decoder is model:
        raise TargetError(f"{type(model).__name__} has no decoder apart from its head; use target_backend=custom with your own engine")
    return decoder


def _find_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder's stack: the outermost ModuleList with one entry a layer."""
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise TargetError(f"{type(decoder).__name__} has no list of its {num_layers} layers; use target_backend=custom with your own engine")


def _stop_token_ids(model: Any) -> tuple[int, ...]:
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    if eos is None:
        eos = model.config.get_text_config(decoder=True).eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
