"""Fixtures that several packages' tests share: a tiny EAGLE-3 draft, a tiny head and batches of made-up documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specforge.modeling.draft.llama import LlamaDraft
from specforge.modeling.target import TargetHead
from specforge.modeling.target_facts import TargetFacts
from specforge.modeling.wiring.eagle3 import Eagle3Draft
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.eagle3 import Eagle3

TINY_TARGET = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 40, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False, "eos_token_id": 2,
}


@pytest.fixture
def tiny_target_facts() -> TargetFacts:
    return TargetFacts.from_config(dict(TINY_TARGET), "tiny")


@pytest.fixture
def make_strategy() -> Callable[..., Eagle3]:
    def make(**changes: Any) -> Eagle3:
        arguments: dict[str, Any] = {
            "ttt_length": 3, "step_decay": 0.8, "draft_vocab_size": None, "aux_hidden_state_layer_ids": [1, 2, 4], "fc_norm": False,
            "norm_before_fc": False, "norm_output": False, "norm_before_residual": False,
        }
        return Eagle3(**{**arguments, **changes})

    return make


@pytest.fixture
def tiny_architecture() -> LlamaDraft:
    return LlamaDraft(num_layers=1, hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=4, rms_norm_eps=1e-5,
                      max_position_embeddings=64, rope={"rope_type": "default", "rope_theta": 10000.0}, init_from="random")


@pytest.fixture
def make_draft(tiny_architecture: LlamaDraft) -> Callable[..., Eagle3Draft]:
    def make(strategy: Eagle3, kept: Sequence[int] | None = None, seed: int = 0) -> Eagle3Draft:
        torch.manual_seed(seed)
        ids = torch.arange(40) if kept is None else torch.tensor(sorted(kept))
        t2d = torch.zeros(40, dtype=torch.bool)
        t2d[ids] = True
        draft = Eagle3Draft(tiny_architecture, target_hidden_size=16, num_aux=3, embedding=torch.randn(40, 16), d2t=ids - torch.arange(len(ids)),
                            t2d=t2d, flags=strategy.flags)
        for parameter in draft.parameters():  # norms away from one, so that a missing norm shows
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        return draft

    return make


@pytest.fixture
def tiny_head() -> TargetHead:
    torch.manual_seed(7)
    return TargetHead(torch.randn(40, 16))


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    def make(masks: Sequence[Sequence[Sequence[int]]], width: int, seed: int = 0) -> TrainBatch:
        """``masks[b]`` lists the loss masks of the documents packed in row b; the rest of ``width`` is padding."""
        generator = torch.Generator().manual_seed(seed)
        shape = (len(masks), width)
        loss_mask, positions = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.int64)
        documents = torch.full(shape, -1)
        number = 0
        for b, row in enumerate(masks):
            start = 0
            for mask in row:
                end = start + len(mask)
                loss_mask[b, start:end] = torch.tensor(mask, dtype=torch.bool)
                positions[b, start:end] = torch.arange(len(mask))
                documents[b, start:end] = number
                number, start = number + 1, end
        return TrainBatch({
            "input_ids": torch.randint(0, 40, shape, generator=generator), "loss_mask": loss_mask, "position_ids": positions,
            "document_ids": documents, "aux_hidden_states": torch.randn(*shape, 48, generator=generator),
            "final_hidden_states": torch.randn(*shape, 16, generator=generator),
        }, tuple(str(i) for i in range(number)))

    return make
