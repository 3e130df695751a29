"""The tokenization cache: one folder per key, written under a temporary name and renamed, checked when it is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specforge.data.dataset import TokenizedDataset
from specforge.data.report import DataReport
from specforge.errors import RunError

# Raise it whenever the code writes other tokens or masks for the same input.
FORMAT_VERSION = 1
_META = "meta.json"


def file_digest(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def cache_key(parts: dict[str, Any]) -> str:
    """Key of everything that the result depends on: file content, tokenizer, template, lengths and options."""
    text = json.dumps({**parts, "cache_version": FORMAT_VERSION}, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class TokenCache:
    """Tokenized datasets under ``cache_dir/tokenized``; several processes may use it at once."""

    def __init__(self, cache_dir: Path, tell: Callable[[str], None]) -> None:
        self.root = Path(cache_dir) / "tokenized"
        self.tell = tell

    def load(self, key: str) -> TokenizedDataset | None:
        """The dataset of ``key``, memory-mapped; None when there is none or it is damaged (then it is removed, with a note)."""
        folder = self.root / key
        if not folder.is_dir():
            return None
        try:
            meta = json.loads((folder / _META).read_text())
            arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in TokenizedDataset.ARRAYS}
            if TokenizedDataset.digest_of(arrays) != meta["digest"]:
                raise ValueError("the digest does not match")
            return TokenizedDataset(arrays, DataReport.from_json(meta["report"]), meta["digest"])
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            self.tell(f"the tokenization cache {folder} is damaged ({error}); it is made again")
            self._discard(folder)
            return None

    def store(self, key: str, dataset: TokenizedDataset) -> TokenizedDataset:
        """Write ``dataset`` and return it memory-mapped. If another process was first, its equal copy stays."""
        temporary = self.root / f".{key}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        try:
            temporary.mkdir(parents=True)
            for name in TokenizedDataset.ARRAYS:
                np.save(temporary / f"{name}.npy", dataset.arrays[name], allow_pickle=False)
            (temporary / _META).write_text(json.dumps({"digest": dataset.digest, "report": dataset.report.to_json()}))
            try:
                os.rename(temporary, self.root / key)
            except OSError:
                if not (self.root / key).is_dir():
                    raise
        except OSError as error:
            raise RunError(
                f"cannot write the tokenization cache in {self.root}: {error.strerror or error}. "
                "Free some space, set cache_dir to another disk, or set data.cache=false."
            ) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return self.load(key) or dataset

    def _discard(self, folder: Path) -> None:
        aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.damaged")
        try:
            os.rename(folder, aside)  # one of several processes wins; the others find the folder gone or new
        except OSError:
            return
        shutil.rmtree(aside, ignore_errors=True)
