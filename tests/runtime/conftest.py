"""A tiny target, dataset and the pieces of a run around them, for the tests of topologies, loader and capture."""

from __future__ import annotations

import pytest
import torch
import transformers

from specforge.inference.target_engine.hf import HFTargetEngine
from specforge.runtime.contracts import CaptureSpec, PromptTask, TargetIdentity


class TinyDataset:
    """Random samples of different lengths with the interface of TokenizedDataset."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tasks = []
        for n in range(count):
            length = int(torch.randint(4, 20, (1,), generator=generator))
            ids = torch.randint(3, 97, (length,), generator=generator).tolist()
            self.tasks.append(PromptTask(f"sample{seed}-{n}", tuple(ids), tuple(int(i > 2) for i in range(length))))

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> PromptTask:
        return self.tasks[index]

    def sample_id(self, index: int) -> str:
        return self.tasks[index].sample_id


@pytest.fixture
def identity():
    return TargetIdentity("tiny", None, "config-a", "tokenizer-a", "template-a")


@pytest.fixture
def capture():
    return CaptureSpec((0, 3), final_hidden=True, target_argmax=True, dtype="float32")


@pytest.fixture
def make_dataset():
    return TinyDataset


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("target")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=97
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def engine(tiny_folder, identity):
    return HFTargetEngine(
        dtype="float32",
        batch_tokens=None,
        attn_implementation=None,
        target_folder=tiny_folder,
        device="cpu",
        identity=identity,
        trust_remote_code=False,
    )
