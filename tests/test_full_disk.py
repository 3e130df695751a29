"""A disk that fills up while a command writes: one message, what was complete stays, and with room again the command goes on."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def files_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """``small_disk(bytes)`` mounts a file system of that size; skips where the system does not let us."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={size}".encode()) != 0:
            pytest.skip(f"a small file system cannot be mounted here: {os.strerror(ctypes.get_errno())}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        libc.umount2(str(folder).encode(), 2)  # MNT_DETACH: also when something still holds a file


def test_a_full_disk_while_saving_keeps_the_last_checkpoint(small_disk, refused, run_cli, tiny_work, tmp_path) -> None:
    disk = small_disk(700_000)
    more = [*tiny_work.base, "trainer.epochs=8", "trainer.global_batch_size=4", "trainer.keep_checkpoints=null", f"output_dir={disk}"]
    refused(*more, says=["the disk is full", "The previous checkpoint is intact", "it resumes"], code=1, leaves=True)
    [run_dir] = (disk / "t").iterdir()
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir())
    assert kept and all((run_dir / "checkpoints" / name / "_SUCCESS").exists() for name in kept)
    assert not [path for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".tmp")]
    # With room again the same run goes on from there.
    moved = shutil.copytree(run_dir, tmp_path / "room" / run_dir.name)
    outcome = run_cli(f"run={moved}", cwd=tmp_path)
    assert outcome.code == 0 and f"resumed from {moved}/checkpoints/{kept[-1]}" in outcome.err, outcome.err
    assert (moved / "checkpoints" / "latest").read_text() == "step_0000024\n"


def test_a_disk_that_is_full_at_once(small_disk, refused, tiny_work) -> None:
    refused(*tiny_work.base, f"output_dir={small_disk(4096)}", says=["No space left"], code=1, leaves=True)


def test_a_full_disk_while_exporting_keeps_the_earlier_export(small_disk, refused, run_cli, tiny_work, tmp_path) -> None:
    outcome = run_cli(*tiny_work.base, "trainer.epochs=2", "trainer.global_batch_size=4", "output_dir=done", cwd=tmp_path)
    trained = tmp_path / outcome.run_dir
    assert run_cli("export", f"run={trained}", f"output={tmp_path}/draft", cwd=tmp_path).code == 0
    disk = small_disk(int(1.5 * sum(len(content) for content in files_of(tmp_path / "draft").values())))
    assert run_cli("export", f"run={trained}", f"output={disk}/draft", cwd=tmp_path).code == 0
    before = files_of(disk / "draft")
    refused("export", f"run={trained}", f"output={disk}/draft", "checkpoint=3", says=["disk full while exporting"], code=1, leaves=True)
    assert files_of(disk / "draft") == before and [path.name for path in disk.iterdir()] == ["draft"]


def test_a_full_disk_while_capturing_keeps_what_is_complete(small_disk, refused, run_cli, tiny_work, tmp_path) -> None:
    disk = small_disk(200_000)
    refused("capture", *tiny_work.base, f"output={disk}/features", says=["disk full while writing features"], code=1, leaves=True)
    assert sorted(path.name for path in (disk / "features").iterdir()) == ["header.json"]
    few = run_cli("capture", *tiny_work.base, f"output={disk}/features", "limit=2", "data.eval_path=null", cwd=tmp_path)
    assert few.code == 0, few.err
    message = refused("capture", *tiny_work.base, f"output={disk}/features", says=["2 samples are complete and kept"], code=1, leaves=True)
    moved = shutil.copytree(disk / "features", tmp_path / "room")
    done = run_cli("capture", *tiny_work.base, f"output={moved}", cwd=tmp_path)
    assert done.code == 0 and "13 samples captured, 2 were there already" in done.out, message


def test_a_full_disk_while_regenerating_keeps_whole_rows(small_disk, refused, run_cli, tiny_work, tmp_path) -> None:
    disk = small_disk(4096)
    more = ["regenerate", *tiny_work.base, f"input={tiny_work.folder}/train-prompts.jsonl", f"output={disk}/answers.jsonl", "batch_size=1",
            "max_new_tokens=25"]  # fmt: skip
    refused(*more, says=["disk full", "all rows before are kept"], code=1, leaves=True)
    rows = [json.loads(line) for line in (disk / "answers.jsonl").read_text().splitlines()]
    assert 0 < len(rows) < 12
    shutil.copy(disk / "answers.jsonl", tmp_path / "answers.jsonl")
    assert run_cli(*more, f"output={tmp_path}/answers.jsonl", cwd=tmp_path).code == 0
    expected = [json.loads(line)["response_ids"] for line in (tiny_work.folder / "train.jsonl").read_text().splitlines()]
    assert [json.loads(line)["response_ids"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()] == expected
