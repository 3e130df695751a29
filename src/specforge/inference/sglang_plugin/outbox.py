"""From rows on the device to a complete sample in a store or an answer, off the compute stream and within a memory bound.

A prompt may come in several chunks, so each has host buffers for all its rows, and every chunk's rows are copied to their place on a
stream of its own. When the last row is under way, a worker thread waits for the copies and hands the sample over.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specforge.inference.sglang_plugin.marks import Mark
from specforge.inference.sglang_plugin.settings import CaptureSettings
from specforge.runtime.contracts import INPUT_IDS, LOSS_MASK, CaptureSpec, SampleRef, TargetIdentity
from specforge.runtime.data_plane.feature_store import StoreFullError, dtype_name, specs_of
from specforge.runtime.data_plane.shared_dir import SharedDirStore

logger = logging.getLogger(__name__)

_WORKERS = 2
# A prompt whose chunks stopped coming was aborted, and a file that nobody takes has lost its client.
_ABANDONED_SECONDS = 600.0
# How long a sample waits for room in the store before it is given up.
_ROOM_SECONDS, _ROOM_POLL_SECONDS = 120.0, 0.05
# Refused requests whose later chunks may still come.
_REMEMBERED = 1024
# The scheduler waits for an inline sample at most this long; the copies take milliseconds.
_INLINE_SECONDS = 120.0


class CaptureFailed(Exception):
    """This request cannot be captured; ``code`` tells the client whether another try may help."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


@dataclass
class _Sample:
    """One prompt under way: host buffers of all rows and how many are there."""

    mark: Mark
    tensors: dict[str, Tensor]
    num_bytes: int
    rows: int = 0
    touched: float = field(default_factory=time.monotonic)
    copied: Any = None  # the last copy's event


class PendingAnswer:
    """An element of ``customized_info`` whose value is not there yet: SGLang asks for it by ``copy()`` when it builds the answer."""

    def __init__(self, future: Future[dict[str, Any]]) -> None:
        self._future = future

    def copy(self) -> dict[str, Any]:
        try:
            return self._future.result(timeout=_INLINE_SECONDS)
        except Exception as error:  # whatever it is belongs into this one answer and must not stop the scheduler
            return failed("error", f"{type(error).__name__}: {error}")


def failed(code: str, message: str) -> dict[str, Any]:
    """The answer for a request without features."""
    return {"status": code, "message": message}


class Outbox:
    """All samples under way of one writer rank. Called by the scheduler's thread only; its workers touch no shared state but the bound."""

    def __init__(self, settings: CaptureSettings, capture: CaptureSpec, identity: TargetIdentity, device: torch.device) -> None:
        self.settings, self.capture, self.identity = settings, capture, identity
        self.store = None
        if settings.store_path is not None:
            self.store = SharedDirStore(path=settings.store_path, max_bytes=settings.store_bytes, checksums=True)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._open: OrderedDict[str, _Sample] = OrderedDict()
        self._refused: OrderedDict[str, CaptureFailed] = OrderedDict()
        self._stored: deque[tuple[float, SampleRef]] = deque(maxlen=100_000)  # pinned until their client takes them
        self._pending_bytes = 0
        self._bound = threading.Lock()
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="specforge-capture")

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    def add(self, rid: str, mark: Mark, start: int, rows: Mapping[str, Tensor]) -> Any | None:
        """Rows ``start`` … of a prompt (all of equal length, on the device, owned by us); the answer element once it is complete.

        Raises :class:`CaptureFailed` when earlier rows are missing or there is no room.
        """
        end = start + len(rows[INPUT_IDS])
        try:
            if start > 0 and rid in self._refused:  # of a later chunk, the reason why the first was refused
                raise self._refused[rid]
            if end > mark.num_tokens:
                raise CaptureFailed("rows", f"the server ran {end} tokens of a prompt of {mark.num_tokens}")
            sample = self._sample(rid, mark, start, rows)
            self._copy(sample, start, rows)
        except BaseException as error:
            self._drop(rid)
            if isinstance(error, CaptureFailed):
                self._remember(rid, error)
            raise
        sample.rows, sample.touched = end, time.monotonic()
        if end < mark.num_tokens:
            return None
        del self._open[rid]
        return self._hand_over(sample)

    def _remember(self, rid: str, refusal: CaptureFailed) -> None:
        """SGLang builds the answer from the last chunk, so that one must say what went wrong with an earlier one."""
        self._refused[rid] = refusal
        while len(self._refused) > _REMEMBERED:
            self._refused.popitem(last=False)

    def _sample(self, rid: str, mark: Mark, start: int, rows: Mapping[str, Tensor]) -> _Sample:
        sample = self._open.get(rid)
        if sample is not None and start == 0:  # the scheduler took it back and begins again
            self._drop(rid)
            sample = None
        if sample is None:
            if start > 0:
                raise CaptureFailed("prefix_cache", f"the first {start} rows came from the prefix cache, so their features are missing. "
                                    "Start the server with --disable-radix-cache, or send each request with an extra_key of its own")
            sample = self._allocate(mark, rows)
            self._open[rid] = sample
        elif sample.rows != start:
            self._drop(rid)
            raise CaptureFailed("rows", f"row {start} came after row {sample.rows - 1}; the chunks of the prompt do not join")
        return sample

    def _allocate(self, mark: Mark, rows: Mapping[str, Tensor]) -> _Sample:
        self._give_up_abandoned()
        if mark.transport == "store" and self.store is None:
            raise CaptureFailed("no_store", "this server has no store_path, so it can only answer inline (transport=inline)")
        num_bytes = sum(t[:1].numel() * t.element_size() for t in rows.values()) * mark.num_tokens
        if mark.transport == "inline" and num_bytes > self.settings.inline_bytes:
            raise CaptureFailed("too_large", f"features of {num_bytes} bytes exceed inline_bytes={self.settings.inline_bytes}; "
                                "use transport=store")
        with self._bound:
            if self._pending_bytes and self._pending_bytes + num_bytes > self.settings.pending_bytes:
                raise CaptureFailed("busy", f"{self._pending_bytes} bytes of features are under way and {num_bytes} more exceed "
                                    f"pending_bytes={self.settings.pending_bytes}")
            self._pending_bytes += num_bytes
        pinned = self._stream is not None
        tensors = {name: torch.empty((mark.num_tokens, *t.shape[1:]), dtype=t.dtype, pin_memory=pinned) for name, t in rows.items()}
        return _Sample(mark, tensors, num_bytes)

    def _copy(self, sample: _Sample, start: int, rows: Mapping[str, Tensor]) -> None:
        if self._stream is None:
            for name, tensor in rows.items():
                sample.tensors[name][start : start + len(tensor)].copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for name, tensor in rows.items():
                sample.tensors[name][start : start + len(tensor)].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)  # its memory is not given to others before the copy is done
            sample.copied = torch.cuda.Event()
            sample.copied.record(self._stream)

    def _hand_over(self, sample: _Sample) -> Any:
        if sample.mark.transport == "inline":
            return PendingAnswer(self._workers.submit(self._finish, sample, self._inline_answer))
        # The answer does not wait for the store: the client sees the file appear, or the reason why it will not.
        self._workers.submit(self._finish, sample, self._put)
        return {"status": "stored", "name": sample.mark.name, "attempt": sample.mark.attempt, "store": self.settings.store_path,
                "tensors": {name: [dtype_name(t.dtype), list(t.shape)] for name, t in sample.tensors.items()}}

    def _finish(self, sample: _Sample, deliver: Any) -> Any:
        try:
            if sample.copied is not None:
                sample.copied.synchronize()
            mask = torch.tensor(sample.mark.loss_mask(), dtype=torch.bool)
            return deliver(sample.mark, {**sample.tensors, LOSS_MASK: mask})
        finally:
            with self._bound:
                self._pending_bytes -= sample.num_bytes

    def _put(self, mark: Mark, tensors: dict[str, Tensor]) -> None:
        assert self.store is not None
        deadline = time.monotonic() + _ROOM_SECONDS
        try:
            while True:
                try:
                    ref = self.store.put(mark.name, tensors, self.identity, self.capture, mark.attempt)
                    break
                except StoreFullError:  # room comes when clients take files away
                    self._release_unread()
                    if time.monotonic() > deadline or sum(t.numel() * t.element_size() for t in tensors.values()) > self.store.max_bytes:
                        raise
                    time.sleep(_ROOM_POLL_SECONDS)
            with self._bound:
                self._stored.append((time.monotonic(), ref))
        except Exception as error:
            logger.exception("specforge_capture: sample %s could not be stored", mark.name)
            self.store.fail(mark.name, mark.attempt, f"{type(error).__name__}: {error}")

    def _release_unread(self) -> None:
        """Files that nobody came for in a long time are a dead client's; from now on they may be evicted."""
        assert self.store is not None
        while True:
            with self._bound:
                if not self._stored or time.monotonic() - self._stored[0][0] < _ABANDONED_SECONDS:
                    return
                _, ref = self._stored.popleft()
            self.store.release(ref)

    def _inline_answer(self, mark: Mark, tensors: dict[str, Tensor]) -> dict[str, Any]:
        order = sorted(tensors)
        specs = specs_of(tensors, checksums=True)
        raw = b"".join(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name in order)
        return {"status": "inline", "name": mark.name, "attempt": mark.attempt, "data": base64.b64encode(raw).decode("ascii"),
                "specs": [[s.name, s.dtype, list(s.shape), s.checksum] for s in specs]}

    def _give_up_abandoned(self) -> None:
        for rid, sample in list(self._open.items()):
            if time.monotonic() - sample.touched > _ABANDONED_SECONDS:
                logger.warning("specforge_capture: the rest of %s never came (aborted?)", sample.mark.name)
                self._drop(rid)

    def _drop(self, rid: str) -> None:
        sample = self._open.pop(rid, None)
        if sample is not None:
            with self._bound:
                self._pending_bytes -= sample.num_bytes
