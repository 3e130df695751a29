"""The store that processes share: two of them at once, killed writers, damaged files, attempts, pins, room."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch

from specforge.errors import FeatureError
from specforge.runtime.contracts import CaptureSpec, TargetIdentity
from specforge.runtime.data_plane import sample_file
from specforge.runtime.data_plane.feature_store import StoreFullError
from specforge.runtime.data_plane.process_owner import make_private_folder
from specforge.runtime.data_plane.shared_dir import SharedDirStore

TARGET = TargetIdentity("tiny", "r1", "config-a", "tokenizer-a", "template-a")
SPEC = CaptureSpec((1, 2), final_hidden=True, target_argmax=True, dtype="bfloat16")
FORK = multiprocessing.get_context("fork")


def features(length=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(99, (length,), generator=g),
        "loss_mask": torch.arange(length) % 2 == 0,
        "aux_hidden_states": torch.randn(length, 8, generator=g).bfloat16(),
        "final_hidden_states": torch.randn(length, 4, generator=g).bfloat16(),
        "target_argmax": torch.randint(-1, 99, (length,), generator=g),
    }


def open_store(folder, max_bytes=1 << 20):
    return SharedDirStore(path=str(folder), max_bytes=max_bytes, checksums=True)


def put_samples(folder, first, count, ready=None):
    store = open_store(folder)
    for n in range(first, first + count):
        store.release(store.put(f"s{n}", features(5 + n % 3, n), TARGET, SPEC))
    if ready is not None:
        ready.set()
        time.sleep(60)


def put_forever(folder, started):
    """Writes slowly, so that a kill hits the middle of a file."""
    write = sample_file._write_all

    def slowly(file, data):
        started.set()
        half = len(memoryview(data)) // 2
        write(file, memoryview(data)[:half])
        time.sleep(60)

    sample_file._write_all = slowly
    put_samples(folder, 100, 1)


def test_another_process_reads_what_was_put_with_every_bit_and_fact(tmp_path):
    child = FORK.Process(target=put_samples, args=(tmp_path, 0, 6))
    child.start()
    child.join()
    assert child.exitcode == 0
    store = open_store(tmp_path)
    for n in range(6):
        ref = store.find(f"s{n}")
        assert (ref.target, ref.capture, ref.num_tokens, ref.attempt) == (TARGET, SPEC, 5 + n % 3, 0)
        for name, tensor in store.get(ref).items():
            assert tensor.dtype == features()[name].dtype and torch.equal(tensor, features(5 + n % 3, n)[name]), name
    assert store.find("s6") is None and store.stats()["samples"] == 6


def test_two_writers_and_a_reader_at_once(tmp_path):
    writers = [FORK.Process(target=put_samples, args=(tmp_path, first, 40)) for first in (0, 20)]  # 20 samples are written by both
    for writer in writers:
        writer.start()
    store, seen = open_store(tmp_path), set()
    while any(writer.is_alive() for writer in writers) or len(seen) < 60:
        for n in set(range(60)) - seen:
            if (ref := store.find(f"s{n}")) is not None:
                assert torch.equal(store.get(ref)["aux_hidden_states"], features(5 + n % 3, n)["aux_hidden_states"])
                seen.add(n)
    assert all(writer.exitcode == 0 for writer in writers)


def test_a_writer_killed_in_the_middle_leaves_nothing_that_anybody_sees(tmp_path):
    started = FORK.Event()
    child = FORK.Process(target=put_forever, args=(tmp_path, started))
    child.start()
    assert started.wait(60)
    time.sleep(0.1)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert list(tmp_path.glob(".partial-*"))  # it was in the middle
    store = open_store(tmp_path)
    assert store.find("s100") is None and store.bytes_used == 0
    assert not list(tmp_path.glob(".partial-*"))
    store.put("s100", features(), TARGET, SPEC)
    assert torch.equal(store.get(store.find("s100"))["input_ids"], features()["input_ids"])


@pytest.mark.parametrize("keep", [0, 5, 60, -1, -30])
def test_cut_files_are_refused_by_name(tmp_path, keep):
    store = open_store(tmp_path)
    ref = store.put("s", features(), TARGET, SPEC)
    path = next(tmp_path.glob("*/*.safetensors"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FeatureError, match=path.name):
        store.get(ref)
    with pytest.raises(FeatureError, match=path.name):
        store.find("s")


def test_a_changed_byte_and_a_foreign_version_are_refused(tmp_path):
    store = open_store(tmp_path)
    ref = store.put("s", features(), TARGET, SPEC)
    path = next(tmp_path.glob("*/*.safetensors"))
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(FeatureError, match="checksum"):
        store.get(ref)
    path.write_bytes(good.replace(b'"format_version": "1"', b'"format_version": "9"'))
    with pytest.raises(FeatureError, match="version 9"):
        store.find("s")


def test_later_attempts_replace_earlier_ones_and_late_earlier_ones_are_refused(tmp_path):
    store = open_store(tmp_path)
    first = store.put("s", features(seed=1), TARGET, SPEC, attempt=0)
    store.put("s", features(seed=2), TARGET, SPEC, attempt=2)
    assert store.find("s").attempt == 2 and store.find_attempt("s", 0) is None
    with pytest.raises(FeatureError, match="gone"):
        store.get(first)
    with pytest.raises(FeatureError, match="attempt 1 comes late"):
        store.put("s", features(seed=3), TARGET, SPEC, attempt=1)
    assert torch.equal(store.get(store.find("s"))["input_ids"], features(seed=2)["input_ids"])
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 1 and not list(tmp_path.glob(".partial-*"))


def test_room_comes_from_released_samples_oldest_first(tmp_path):
    size = 5 * (8 + 1 + 16 + 8 + 8) + 1500  # tensors and header
    store = open_store(tmp_path, max_bytes=3 * size)
    refs = [store.put(f"s{n}", features(seed=n), TARGET, SPEC) for n in range(2)]
    with pytest.raises(StoreFullError, match="max_bytes"):
        store.put("s2", features(seed=2), TARGET, SPEC)
        store.put("s3", features(seed=3), TARGET, SPEC)
        store.put("s4", features(seed=4), TARGET, SPEC)
    assert store.find("s0") and store.find("s1"), "nothing pinned may go"
    store.release(refs[1])
    store.put("s5", features(seed=5), TARGET, SPEC)
    assert store.find("s1") is None and store.find("s0") is not None and store.evictions >= 1
    assert store.pin(refs[1]) is False and store.pin(refs[0]) is True


def test_pins_are_shared_and_those_of_dead_processes_do_not_count(tmp_path):
    ready = FORK.Event()
    child = FORK.Process(target=put_samples, args=(tmp_path, 0, 1, ready))
    child.start()
    assert ready.wait(60)
    here, size = open_store(tmp_path), next(tmp_path.glob("*/*.safetensors")).stat().st_size
    ref = here.find("s0")
    assert here.pin(ref)
    other = open_store(tmp_path, max_bytes=size + 50)  # room for one sample
    with pytest.raises(StoreFullError):
        other.put("s1", features(), TARGET, SPEC)
    here.release(ref)
    other.release(other.put("s1", features(), TARGET, SPEC))
    assert other.find("s0") is None
    child.kill()
    child.join()

    child = FORK.Process(target=_pin_and_wait, args=(tmp_path, ready := FORK.Event()))
    child.start()
    assert ready.wait(60)
    with pytest.raises(StoreFullError):
        other.put("s2", features(), TARGET, SPEC)
    child.kill()
    child.join()
    other.put("s2", features(), TARGET, SPEC)
    assert other.find("s1") is None


def _pin_and_wait(folder, ready):
    store = open_store(folder)
    assert store.pin(store.find("s1"))
    ready.set()
    time.sleep(60)


def test_failures_are_told_once_and_discard_keeps_views(tmp_path):
    store = open_store(tmp_path)
    store.fail("s", 3, "no room")
    assert store.failure("s", 2) is None and store.failure("s", 3) == "no room" and store.failure("s", 3) is None
    ref = store.put("s", features(seed=9), TARGET, SPEC)
    views = store.get(ref)
    store.discard(ref)
    assert store.find("s") is None and not list(tmp_path.glob("*/*pin*"))
    assert torch.equal(views["final_hidden_states"], features(seed=9)["final_hidden_states"])


def test_tensors_that_are_not_what_the_capture_says_are_refused(tmp_path):
    with pytest.raises(FeatureError, match="dtype float32, expected bfloat16"):
        open_store(tmp_path).put("s", {**features(), "aux_hidden_states": torch.zeros(5, 8)}, TARGET, SPEC)


def test_private_folders_of_killed_processes_are_removed_by_the_next():
    child = FORK.Process(target=_folder_and_wait, args=(queue := FORK.Queue(),))
    child.start()
    left = queue.get(timeout=60)
    own = make_private_folder()
    assert left.is_dir() and own.is_dir() and own.stat().st_mode & 0o077 == 0
    child.kill()
    child.join()
    second = make_private_folder()
    assert not left.is_dir() and own.is_dir()
    own.rmdir()
    second.rmdir()


def _folder_and_wait(queue):
    queue.put(make_private_folder())
    time.sleep(60)
