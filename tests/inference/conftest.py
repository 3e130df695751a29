"""Tiny random targets of several families, saved as folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from specforge.inference.target_engine.hf import HFTargetEngine
from specforge.runtime.contracts import TargetIdentity

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


def make_target(folder: Path, family: str) -> Path:
    torch.manual_seed(7)
    wide = {"initializer_range": 0.4, "bos_token_id": 1, "eos_token_id": 2}
    if family == "gemma2":
        config = transformers.Gemma2Config(**SIZES, **wide, head_dim=8, final_logit_softcapping=3.0, sliding_window=8)
    elif family == "qwen3":
        config = transformers.Qwen3Config(**SIZES, **wide, head_dim=8)
    elif family == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=97, n_positions=128, **wide)
    elif family == "granite":
        config = transformers.GraniteConfig(**SIZES, **wide, logits_scaling=4.0, embedding_multiplier=3.0)
    else:
        config = transformers.LlamaConfig(**SIZES, **wide, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    made: dict[str, Path] = {}

    def get(family: str = "llama") -> Path:
        if family not in made:
            made[family] = make_target(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


@pytest.fixture
def make_engine(target_folder):
    def make(family: str = "llama", batch_tokens: int | None = None, dtype: str = "float32") -> HFTargetEngine:
        return HFTargetEngine(
            dtype=dtype,
            batch_tokens=batch_tokens,
            attn_implementation=None,
            target_folder=target_folder(family),
            device="cpu",
            identity=TargetIdentity("tiny", None, "config-a", "tokenizer-a", "template-a"),
            trust_remote_code=False,
        )

    return make
