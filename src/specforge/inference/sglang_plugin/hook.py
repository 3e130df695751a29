"""The hook on SGLang's logits processor: the one place that sees ids, auxiliary states, final hidden state and request ids at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specforge.inference.sglang_plugin.marks import Mark, is_identity, is_marked, read_mark
from specforge.inference.sglang_plugin.outbox import CaptureFailed, Outbox, failed
from specforge.inference.sglang_plugin.settings import ANSWER_KEY
from specforge.runtime.contracts import AUX_HIDDEN_STATES, FINAL_HIDDEN_STATES, INPUT_IDS, TARGET_ARGMAX, CaptureSpec

logger = logging.getLogger(__name__)

# Logits of one tile of the head, which serving has little memory left for: 2^24 values are 64 MiB in float32.
_HEAD_TILE_VALUES = 1 << 24


class CaptureHook:
    """Called after every forward of the logits processor; does nothing unless the batch is a prefill that holds a marked request.

    ``outbox`` is None on tensor-parallel ranks that do not write: they only take part in the head's collectives.
    """

    def __init__(self, capture: CaptureSpec, outbox: Outbox | None, identity: dict[str, Any]) -> None:
        self.capture = capture
        self.outbox = outbox
        self.identity = identity

    def __call__(self, result: Any, processor: Any, input_ids: Tensor, hidden_states: Tensor, lm_head: Any, logits_metadata: Any,
                 aux_hidden_states: Any = None, hidden_states_before_norm: Any = None, **_: Any) -> None:
        rids = getattr(logits_metadata, "rids", None)
        lengths = getattr(logits_metadata, "extend_seq_lens_cpu", None)
        # Decode, verify and draft batches have no extend lengths or are excluded by their mode; graph capture has no request ids.
        if not rids or lengths is None or not any(map(is_marked, rids)) or not _is_prefill(logits_metadata.forward_mode):
            return
        starts = logits_metadata.extend_prefix_lens_cpu or [0] * len(rids)
        answers: list[Any] = []
        row = 0
        for rid, start, length in zip(rids, starts, lengths, strict=False):
            take = slice(row, row + length)
            batch = (processor, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states)
            answers.append(self._one(rid, int(start), take, *batch))
            row += length
        if self.outbox is not None and any(answer is not None for answer in answers):
            result.customized_info = {**(result.customized_info or {}), ANSWER_KEY: answers}

    def _one(self, rid: str, start: int, take: slice, processor: Any, input_ids: Tensor, hidden: Tensor, lm_head: Any, metadata: Any,
             aux: Any) -> Any | None:
        """The answer element of one request of the batch, whose rows are ``take``; None while there is nothing to say."""
        if not is_marked(rid):
            return None
        if is_identity(rid):
            return self.identity
        try:
            mark = read_mark(rid)
            rows = self._rows(take, input_ids, hidden, aux)
            if self.capture.target_argmax:
                # Every rank computes it, whatever it will do with it, since the head's logits are gathered from all of them.
                rows[TARGET_ARGMAX] = _argmax(mark, start, rows[INPUT_IDS], hidden[take], processor, lm_head, metadata)
            if not self.capture.final_hidden:
                rows.pop(FINAL_HIDDEN_STATES, None)
            return None if self.outbox is None else self.outbox.add(rid, mark, start, rows)
        except CaptureFailed as refusal:
            return failed(refusal.code, str(refusal))
        except Exception as error:  # a capture must never take the server down with it
            logger.exception("specforge_capture: request %s", rid[:120])
            return failed("error", f"{type(error).__name__}: {error}")

    def _rows(self, take: slice, input_ids: Tensor, hidden: Tensor, aux: Any) -> dict[str, Tensor]:
        """This request's rows as tensors of their own: the batch's may be buffers that the next forward overwrites."""
        length = take.stop - take.start
        if hidden.shape[0] < take.stop or input_ids.shape[0] < take.stop:
            raise CaptureFailed("rows", f"the logits processor got {hidden.shape[0]} rows of hidden states for {take.stop} tokens (a "
                                        "parallel "
                                "layout that spreads the rows of a sequence over ranks is not supported)")
        rows = {INPUT_IDS: input_ids[take].to(torch.int64, copy=True), FINAL_HIDDEN_STATES: hidden[take].clone()}
        if self.capture.aux_layer_ids:
            rows[AUX_HIDDEN_STATES] = self._aux_rows(take, aux, length, hidden.shape[-1])
        return rows

    def _aux_rows(self, take: slice, aux: Any, length: int, hidden_size: int) -> Tensor:
        """[rows, K·H] from what the model gave: a list of K tensors, or one packed tensor."""
        wanted = len(self.capture.aux_layer_ids)
        parts: Sequence[Tensor] = [] if aux is None else [aux] if isinstance(aux, Tensor) else list(aux)
        width = sum(part.shape[-1] for part in parts)
        if width != wanted * hidden_size or any(part.shape[0] < take.stop for part in parts):
            raise CaptureFailed("no_aux", f"the model gave auxiliary states of width {width} instead of {wanted} × {hidden_size}; its "
                                          "class "
                                "does not capture the layers that were asked for")
        return torch.cat([part[take] for part in parts], dim=-1) if len(parts) > 1 else parts[0][take].clone()


def _is_prefill(mode: Any) -> bool:
    return bool(mode.is_extend()) and not mode.is_target_verify() and not mode.is_draft_extend_v2()


def _argmax(mark: Mark, start: int, ids: Tensor, hidden: Tensor, processor: Any, lm_head: Any, metadata: Any) -> Tensor:
    """The target's own choice, int64 [rows]: at rows whose next token is supervised, −1 elsewhere; by SGLang's own head."""
    column = torch.full_like(ids, -1)
    wanted = [i - start for i in mark.argmax_rows() if start <= i < start + len(ids)]
    if not wanted:
        return column
    rows = torch.tensor(wanted, device=ids.device)
    for part in rows.split(max(1, _HEAD_TILE_VALUES // int(processor.vocab_size))):
        logits = processor._get_logits(hidden[part], lm_head, metadata, use_logits_buffer=False)
        column[part] = logits[:, : int(processor.vocab_size)].argmax(dim=-1)
    return column
