"""Decoding with block drafts: whole blocks after overfitting, the walk, sampling, and the block that serving runs for fewer drafts."""

from __future__ import annotations

import pytest
import torch

from specforge.data.vocabulary_map import VocabularyMap
from specforge.evaluation.decode import DecodeSettings, decode_plain, decode_speculative
from specforge.evaluation.metrics import prefix_lengths, walk_document
from specforge.inference.target_engine.hf import HFTargetEngine
from specforge.modeling.draft.llama import LlamaDraft
from specforge.modeling.target import TargetHead
from specforge.modeling.target_facts import TargetFacts
from specforge.runtime.contracts import PromptTask, StepContext, TargetIdentity, TrainBatch
from specforge.training.strategies.dflash import DFlash
from specforge.training.strategies.domino import Domino
from specforge.training.strategies.dpace import DPace
from specforge.training.strategies.dspark import DSpark

CPU, PROMPT = torch.device("cpu"), [5, 9, 13, 21, 8, 30]
LAYERS = [1, 2, 4]
_BLOCK = {"num_anchors": None, "mask_token_id": 63, "aux_hidden_state_layer_ids": LAYERS}
_DSPARK = {
    "block_size": 3,
    "loss_decay_gamma": None,
    "markov_rank": 8,
    "confidence_head": True,
    "confidence_head_with_markov": True,
    "ce_weight": 0.5,
    "l1_weight": 0.5,
    "confidence_weight": 1.0,
    **_BLOCK,
}
_DOMINO = {
    "block_size": 4,
    "loss_decay_gamma": None,
    "gru_hidden_size": 16,
    "correction_size": 8,
    "base_loss_fraction": 0.5,
    "candidate_pool_size": 20,
    **_BLOCK,
}
STRATEGIES = {
    "dflash": lambda: DFlash(block_size=4, loss_decay_gamma=None, **_BLOCK),
    "dpace": lambda: DPace(block_size=4, weighting="full", alpha=0.5, **_BLOCK),
    "domino": lambda: Domino(**_DOMINO),
    "dspark-vanilla": lambda: DSpark(markov_head_type="vanilla", **_DSPARK),
    "dspark-gated": lambda: DSpark(markov_head_type="gated", **_DSPARK),
    "dspark-rnn": lambda: DSpark(markov_head_type="rnn", **_DSPARK),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.4,
        eos_token_id=1,
        bos_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    identity = TargetIdentity("t", None, "c", "k", "p")
    engine = HFTargetEngine(dtype="float32", batch_tokens=None, attn_implementation="sdpa", target_folder=folder, device="cpu",
                            identity=identity, trust_remote_code=False)  # fmt: skip
    return folder, engine


def settings(**changes):
    fixed = {"num_draft_tokens": 3, "max_new_tokens": 24, "temperature": 0.0, "mode": "target_only", "stop_token_ids": frozenset()}
    return DecodeSettings(**{**fixed, **changes})


def make(target, name, num_layers=1):
    folder, engine = target
    facts, strategy = TargetFacts.from_folder(folder), STRATEGIES[name]()
    torch.manual_seed(0)
    nulls = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "rope")
    architecture = LlamaDraft(
        **LlamaDraft.fill_from_target(dict.fromkeys(nulls) | {"num_layers": num_layers, "init_from": "random"}, facts)
    )
    whole = VocabularyMap(torch.zeros(64, dtype=torch.int64), torch.ones(64, dtype=torch.bool), 1.0)
    draft = strategy.build_model(architecture, facts, whole, engine.model.get_input_embeddings().weight.detach())
    return strategy, draft, TargetHead.load(folder, torch.float32)


def batch_of(engine, strategy, facts, prompt, reply):
    ids = [*prompt, *reply]
    task = PromptTask("x", tuple(ids), tuple([0] * len(prompt) + [1] * len(reply)))
    features = engine.capture([task], strategy.capture_spec(facts, "float32"))[0].tensors
    tensors = {name: t.unsqueeze(0) for name, t in features.items()}
    tensors |= {"position_ids": torch.arange(len(ids)).unsqueeze(0), "document_ids": torch.zeros(1, len(ids), dtype=torch.int64)}
    return TrainBatch(tensors, ("x",))


def train(strategy, draft, head, batch, steps, lr=5e-3):
    optimizer = torch.optim.AdamW(draft.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        out = strategy.forward_loss(draft, batch, head, StepContext(step, steps, 0, 0))
        optimizer.zero_grad()
        (out.loss_sum / out.weight_sum).backward()
        optimizer.step()


@every_strategy
def test_overfitting_one_conversation_accepts_whole_blocks(target, name):
    folder, engine = target
    plain = decode_plain(engine, PROMPT, settings(max_new_tokens=28), CPU)
    strategy, draft, head = make(target, name)
    before = decode_speculative(engine, strategy.proposer(draft, head), LAYERS, PROMPT, settings(), CPU)
    train(strategy, draft, head, batch_of(engine, strategy, TargetFacts.from_folder(folder), PROMPT, plain.tokens), 300)
    after = decode_speculative(engine, strategy.proposer(draft, head), LAYERS, PROMPT, settings(), CPU)
    assert sum(before.accepted) / before.verify_steps < 1
    assert after.accepted == [3] * 6
    assert after.tokens == plain.tokens[:24]


@every_strategy
@pytest.mark.parametrize("train_steps, num_layers, n", [(0, 1, 3), (40, 2, 3), (80, 1, 2)])
def test_walk_accept_length_is_decoded_accept_length(target, name, train_steps, num_layers, n):
    """On the target's own greedy replies; the walk reads n tokens past the limit. n = 2 is less than a block proposes."""
    folder, engine = target
    facts, limit = TargetFacts.from_folder(folder), 24
    strategy, draft, head = make(target, name, num_layers)
    replies = [decode_plain(engine, [t, *PROMPT], settings(max_new_tokens=limit + n), CPU).tokens for t in (4, 40, 50)]
    if train_steps:
        train(strategy, draft, head, batch_of(engine, strategy, facts, [4, *PROMPT], replies[0]), train_steps)
    accepted = 0
    for first, reply in zip((4, 40, 50), replies, strict=True):
        prompt = [first, *PROMPT]
        decoded = decode_speculative(engine, strategy.proposer(draft, head), LAYERS, prompt, settings(num_draft_tokens=n), CPU)
        batch = batch_of(engine, strategy, facts, prompt, reply)
        _, places, correct, _ = strategy.prefix_correctness(draft, batch, head, n)
        walk = walk_document(places.tolist(), prefix_lengths(correct).tolist(), last_start=len(prompt) + limit - 2)
        assert (walk.steps, walk.accepted) == (decoded.verify_steps, sum(decoded.accepted))
        assert decoded.tokens == reply[:limit]
        accepted += walk.accepted
    assert train_steps == 0 or accepted > 10, "the comparison must have something to compare"


@every_strategy
@pytest.mark.parametrize("mode", ["target_only", "rejection"])
def test_drafts_above_temperature_zero(target, name, mode):
    """SGLang samples DSpark's drafts in rejection mode; DFlash and Domino always draft greedily, which is a point mass."""
    _, engine = target
    strategy, draft, head = make(target, name)
    sampled = settings(temperature=1.0, mode=mode, max_new_tokens=12)
    runs = [decode_speculative(engine, strategy.proposer(draft, head), LAYERS, PROMPT, sampled, CPU) for _ in range(2)]
    assert runs[0].tokens == runs[1].tokens and len(runs[0].tokens) == 12
    proposer = strategy.proposer(draft, head)
    _, aux, _ = engine.forward_cached(torch.tensor([PROMPT]), None, LAYERS)
    proposer.observe(aux, [*PROMPT[1:], 7])
    greedy = proposer.propose(3, 1.0, None)
    drawn = proposer.propose(3, 1.0, torch.Generator().manual_seed(1))
    assert greedy.probabilities is None and len(greedy.tokens) == 3 and (greedy.margins >= 0).all()
    assert torch.allclose(drawn.probabilities.sum(-1), torch.ones(3))
    if not name.startswith("dspark"):
        assert drawn.tokens == greedy.tokens and drawn.probabilities.argmax(-1).tolist() == greedy.tokens
        assert drawn.probabilities.max(-1).values.tolist() == [1.0] * 3
    else:
        assert drawn.probabilities.max() < 1.0


def test_a_step_that_wants_fewer_drafts_runs_a_smaller_block(target):
    """SGLang's verify window sets the block: two drafts come from three slots, not from the first three of four."""
    strategy, draft, head = make(target, "dflash")
    _, engine = target
    _, aux, _ = engine.forward_cached(torch.tensor([PROMPT]), None, LAYERS)
    proposer = strategy.proposer(draft, head)
    proposer.observe(aux, [*PROMPT[1:], 7])
    states = {size: proposer._block(size) for size in (3, 4)}
    assert not torch.allclose(states[3], states[4][:, :3]), "slots see each other both ways"
    expected = (states[3][0, 1:] @ head.weight.T).argmax(-1).tolist()
    assert proposer.propose(2, 0.0, None).tokens == expected
