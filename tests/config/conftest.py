"""Fixtures of the configuration tests: a target folder without a model, and a small folder for runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TINY_CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads the user's cache or writes into the checkout."""
    monkeypatch.setenv("SPECFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    """What ``TargetSource.ensure`` accepts: config.json, a weight file with a header, a tokenizer file."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    header = json.dumps({"model.embed_tokens.weight": {"dtype": "F32", "shape": [40, 16], "data_offsets": [0, 2560]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2560))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def on_tiny_target(target_dir: Path) -> list[str]:
    """Overrides that make every other default work on the tiny target."""
    return ["target=hf", f"target.path={target_dir}", "strategy.draft_vocab_size=null", "device=cpu"]


@pytest.fixture
def plain_config() -> dict[str, Any]:
    return {
        "name": "n",
        "output_dir": "outputs",
        "cache_dir": "c",
        "seed": 1,
        "device": "cpu",
        "optimizer": {"_target_": "specforge.training.optimizer.AdamW", "lr": 1e-5, "betas": [0.9, 0.95]},
        "tracker": {"kind": "jsonl"},
        "text": "a: '${not} resolved' # äö\nline",
        "none": None,
        "yes": True,
    }
