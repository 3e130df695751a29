"""The stream of training batches: references from a source, tensors from its store, laid out, prefetched and copied ahead.

Who asks for the next step has finished the one before, so that is when a step's samples are acknowledged. A step that was prefetched
but never reached the trainer is never acknowledged, and is made again after a restart.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specforge.data.packing import pack
from specforge.errors import FeatureError
from specforge.runtime.contracts import INPUT_IDS, PromptTask, SampleRef, TrainBatch
from specforge.runtime.data_plane.batch_plan import BatchPlan
from specforge.runtime.data_plane.collate import collate
from specforge.runtime.data_plane.feature_store import FeatureStore, check_ref

if TYPE_CHECKING:
    from specforge.topology.base import RefSource


class Dataset(Protocol):
    """What the loader needs of a tokenized dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> PromptTask: ...


@dataclass
class _Prepared:
    step: int
    batches: list[TrainBatch]
    sample_ids: list[str]
    copied: torch.cuda.Event | None = None


class FeatureLoader:
    """Yields ``(step, micro-batches)`` of one rank in step order, from where :meth:`seek` put it, up to ``total_steps``.

    ``prefetch_steps`` steps are prepared ahead in a thread (0: everything happens in the caller's thread, in the same order).
    ``packing`` lays samples into rows of at most ``max_row_tokens``; else each sample is a row of its own. ``pin`` copies to a CUDA
    ``device`` from page-locked memory on a stream of its own. Errors of the thread are raised by the iterator.
    """

    def __init__(
        self,
        dataset: Dataset,
        source: RefSource,
        store: FeatureStore,
        plan: BatchPlan,
        rank: int,
        *,
        packing: bool,
        max_row_tokens: int,
        prefetch_steps: int,
        device: torch.device | str,
        pin: bool,
        total_steps: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.source = source
        self.store = store
        self.plan = plan
        self.rank = rank
        self.packing = packing
        self.max_row_tokens = max_row_tokens
        self.prefetch_steps = prefetch_steps
        self.device = torch.device(device)
        self.pin = pin and self.device.type == "cuda"
        self.total_steps = total_steps
        self._next_step = 0
        self._announced = 0
        self._unacknowledged: _Prepared | None = None
        self._worker: _Worker | None = None
        self._stream: torch.cuda.Stream | None = None

    def seek(self, step: int) -> None:
        """The next step to be yielded; what was prefetched is dropped, and an unacknowledged step stays so."""
        self._stop_worker()
        self.source.restart()
        self._unacknowledged = None
        self._next_step = self._announced = step

    def __iter__(self) -> Iterator[tuple[int, list[TrainBatch]]]:
        while True:
            self._acknowledge()
            if self.total_steps is not None and self._next_step >= self.total_steps:
                self._stop_worker()
                return
            prepared = self._take_next()
            self._next_step = prepared.step + 1
            self._unacknowledged = prepared
            yield prepared.step, self._on_device(prepared)

    def close(self) -> None:
        """Stop prefetching. The last yielded step is not acknowledged by this: only asking for the next one does."""
        self.seek(self._next_step)

    def _take_next(self) -> _Prepared:
        if self.prefetch_steps == 0:
            return self._prepare(self._next_step)
        if self._worker is None:
            self._worker = _Worker(self, self._next_step)
        return self._worker.next()

    def _prepare(self, step: int) -> _Prepared:
        self._announce(step)
        micro_batches = self.plan.rank_batches(step, self.rank)
        tasks = [[self.dataset[i] for i in indices] for indices in micro_batches]
        flat = [task for micro in tasks for task in micro]
        refs = self.source.take(flat)
        self._check(flat, refs)
        epoch, start, batches = self.plan.epoch(step), 0, []
        for micro in tasks:
            batches.append(self._lay_out(refs[start : start + len(micro)], epoch))
            start += len(micro)
        return self._copy_ahead(_Prepared(step, batches, [task.sample_id for task in flat]))

    def _announce(self, step: int) -> None:
        """Tell the source about each coming step once, so that it may work on them together."""
        last = step + max(1, self.prefetch_steps)
        last = last if self.total_steps is None else min(last, self.total_steps)
        for coming in range(max(self._announced, step), last):
            indices = [i for micro in self.plan.rank_batches(coming, self.rank) for i in micro]
            self.source.announce([self.dataset[i] for i in indices])
        self._announced = max(self._announced, last)

    def _check(self, tasks: Sequence[PromptTask], refs: Sequence[SampleRef]) -> None:
        if [ref.sample_id for ref in refs] != [task.sample_id for task in tasks]:
            raise FeatureError("the source gave features of other samples than were asked for")
        for task, ref in zip(tasks, refs, strict=True):
            check_ref(ref, self.source.identity, self.source.capture, f"the features of sample {ref.sample_id}")
            if ref.num_tokens != len(task.input_ids):
                raise FeatureError(f"sample {ref.sample_id}: features of {ref.num_tokens} tokens, the dataset has {len(task.input_ids)}")

    def _lay_out(self, refs: Sequence[SampleRef], epoch: int) -> TrainBatch:
        samples = [(ref.sample_id, self.store.get(ref)) for ref in refs]
        if self.packing:
            rows = pack([len(tensors[INPUT_IDS]) for _, tensors in samples], self.max_row_tokens)
        else:
            rows = [[i] for i in range(len(samples))]
        return collate(samples, rows, self.source.layout, epoch)

    def _copy_ahead(self, prepared: _Prepared) -> _Prepared:
        if not self.pin:
            return prepared
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            for batch in prepared.batches:
                for name, tensor in batch.tensors.items():
                    if tensor.device.type == "cpu":
                        # The allocator keeps page-locked memory until the copy on this stream is done.
                        batch.tensors[name] = tensor.pin_memory().to(self.device, non_blocking=True)
            prepared.copied = torch.cuda.Event()
            prepared.copied.record(self._stream)
        return prepared

    def _on_device(self, prepared: _Prepared) -> list[TrainBatch]:
        if prepared.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(prepared.copied)
            for batch in prepared.batches:
                for tensor in batch.tensors.values():
                    if tensor.device.type == "cuda":
                        tensor.record_stream(current)
        return [batch.to(self.device) for batch in prepared.batches]

    def _acknowledge(self) -> None:
        if self._unacknowledged is not None:
            self.source.acknowledge(self._unacknowledged.sample_ids, self._unacknowledged.step)
            self._unacknowledged = None

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


class _Worker:
    """The prefetch thread: prepares steps in order into a bounded queue until it is stopped or fails."""

    def __init__(self, loader: FeatureLoader, first_step: int) -> None:
        self._loader = loader
        self._queue: queue.Queue[_Prepared | BaseException] = queue.Queue(maxsize=loader.prefetch_steps)
        self._stopping = threading.Event()
        # A daemon: an interpreter that ends after Ctrl-C never waits for a step that nobody wants.
        self._thread = threading.Thread(target=self._work, args=(first_step,), name="feature-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> _Prepared:
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        self._stopping.set()
        self._loader.source.interrupt()
        self._thread.join(timeout=60)

    def _work(self, step: int) -> None:
        last = self._loader.total_steps
        try:
            while not self._stopping.is_set() and (last is None or step < last):
                self._offer(self._loader._prepare(step))
                step += 1
        except BaseException as error:  # whatever happens here must surface in the consumer
            self._offer(error)

    def _offer(self, item: Any) -> None:
        while not self._stopping.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue
