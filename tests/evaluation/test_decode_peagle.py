"""Decoding with a P-EAGLE draft: whole chains after overfitting, the walk, the cache, sampled drafts."""

from __future__ import annotations

import pytest
import torch

from specforge.data.vocabulary_map import VocabularyMap
from specforge.evaluation.decode import DecodeSettings, decode_plain, decode_speculative
from specforge.evaluation.metrics import prefix_lengths, walk_document
from specforge.inference.target_engine.hf import HFTargetEngine
from specforge.modeling.draft.llama import LlamaAttention, LlamaDraft
from specforge.modeling.target import TargetHead
from specforge.modeling.target_facts import TargetFacts
from specforge.runtime.contracts import CaptureSpec, PromptTask, StepContext, TargetIdentity, TrainBatch
from specforge.training.strategies.peagle import PEagle

CPU, PROMPT, LAYERS = torch.device("cpu"), [5, 9, 13, 21, 8, 30], (1, 2, 4)


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
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    engine = HFTargetEngine(
        dtype="float32",
        batch_tokens=None,
        attn_implementation="sdpa",
        target_folder=folder,
        device="cpu",
        identity=TargetIdentity("t", None, "c", "k", "p"),
        trust_remote_code=False,
    )
    return folder, engine


class SlidingLlama(LlamaDraft):
    """Its second layer sees a window of 6 tokens."""

    def attention(self, input_width, hidden_width, layer_idx):
        attention = LlamaAttention(input_width, hidden_width, self.num_heads, self.num_kv_heads, self.head_dim)
        if layer_idx:
            attention.facts = attention.facts.__class__(**{**attention.facts.__dict__, "window": 6})
        return attention


def settings(**changes):
    return DecodeSettings(
        **{"num_draft_tokens": 4, "max_new_tokens": 24, "temperature": 0.0, "mode": "target_only", "stop_token_ids": frozenset(), **changes}
    )


def make(target, num_layers=2, kept=None, architecture=LlamaDraft, **flags):
    folder, engine = target
    facts = TargetFacts.from_folder(folder)
    torch.manual_seed(0)
    open_keys = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
    node = {**dict.fromkeys((*open_keys, "rope")), "num_layers": num_layers, "init_from": "random"}
    arguments = {"fc_norm": False, "norm_before_fc": False, "norm_before_residual": False, **flags}
    strategy = PEagle(
        num_depths=4,
        down_sample_ratio=0.9,
        down_sample_ratio_min=0.2,
        mask_token_id=63,
        draft_vocab_size=None,
        aux_hidden_state_layer_ids=list(LAYERS),
        **arguments,
    )
    vocabulary = VocabularyMap.identity(64)
    if kept is not None:
        ids = torch.tensor(sorted(kept))
        vocabulary = VocabularyMap(ids - torch.arange(len(ids)), torch.zeros(64, dtype=torch.bool).index_fill(0, ids, True), 1.0)
    filled = architecture(**architecture.fill_from_target(node, facts))
    draft = strategy.build_model(filled, facts, vocabulary, engine.model.get_input_embeddings().weight.detach())
    return strategy, draft, TargetHead.load(folder, torch.float32)


def batch_of(engine, prompt, reply):
    ids = [*prompt, *reply]
    task = PromptTask("x", tuple(ids), tuple([0] * len(prompt) + [1] * len(reply)))
    features = engine.capture([task], CaptureSpec(LAYERS, True, True, "float32"))[0].tensors
    tensors = {name: t.unsqueeze(0) for name, t in features.items()}
    tensors |= {"position_ids": torch.arange(len(ids)).unsqueeze(0), "document_ids": torch.zeros(1, len(ids), dtype=torch.int64)}
    return TrainBatch(tensors, ("x",))


def train(strategy, draft, head, batch, steps):
    """Returns the names of parameters that no gradient ever reached."""
    parameters = dict(draft.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=3e-3, weight_decay=0.0)
    untouched = set(parameters)
    for step in range(steps):
        out = strategy.forward_loss(draft, batch, head, StepContext(step, steps, epoch=step, seed=0))
        optimizer.zero_grad()
        (out.loss_sum / out.weight_sum).backward()
        untouched -= {name for name, p in parameters.items() if p.grad is not None and p.grad.abs().sum() > 0}
        optimizer.step()
    return untouched


@pytest.mark.parametrize(("num_layers", "flags"), [(1, {}), (2, {"fc_norm": True, "norm_before_residual": True})])
def test_overfitting_one_conversation_accepts_whole_chains(target, num_layers, flags):
    _, engine = target
    strategy, draft, head = make(target, num_layers, **flags)
    reply = decode_plain(engine, PROMPT, settings(max_new_tokens=29), CPU).tokens
    before = decode_speculative(engine, strategy.proposer(draft), LAYERS, PROMPT, settings(), CPU)
    assert train(strategy, draft, head, batch_of(engine, PROMPT, reply), 500) == set()
    after = decode_speculative(engine, strategy.proposer(draft), LAYERS, PROMPT, settings(), CPU)
    assert before.tokens == after.tokens == reply[:24]
    assert sum(before.accepted) / before.verify_steps < 1 and after.accepted == [4] * 5


@pytest.mark.parametrize(
    ("train_steps", "kept", "architecture"), [(0, None, LlamaDraft), (50, range(0, 64, 2), LlamaDraft), (90, None, SlidingLlama)]
)
def test_walk_equals_decoded_accept_length(target, train_steps, kept, architecture):
    """On the target's own greedy replies; the walk reads n tokens past the limit, where the last verify step still drafts."""
    _, engine = target
    strategy, draft, head = make(target, kept=kept, architecture=architecture)
    limit, n = 24, 4
    replies = [decode_plain(engine, [t, *PROMPT], settings(max_new_tokens=limit + n), CPU).tokens for t in (4, 40, 50)]
    if train_steps:
        train(strategy, draft, head, batch_of(engine, [4, *PROMPT], replies[0]), train_steps)
    accepted = 0
    for first, reply in zip((4, 40, 50), replies, strict=True):
        prompt = [first, *PROMPT]
        decoded = decode_speculative(engine, strategy.proposer(draft), LAYERS, prompt, settings(), CPU)
        _, places, correct, _ = strategy.prefix_correctness(draft, batch_of(engine, prompt, reply), head, n)
        walk = walk_document(places.tolist(), prefix_lengths(correct).tolist(), last_start=len(prompt) + limit - 3)
        assert (walk.steps, walk.accepted) == (decoded.verify_steps, sum(decoded.accepted))
        assert decoded.tokens == reply[:limit]
        accepted += sum(decoded.accepted)
    assert not train_steps or accepted > 0


def test_proposals_after_acceptance_equal_those_of_a_fresh_start(target):
    """Whatever was proposed before, the draft's state is that of the committed tokens alone."""
    _, engine = target
    strategy, draft, head = make(target)
    torch.manual_seed(5)
    aux, tokens = torch.randn(14, 96), list(range(10, 24))
    grown, fresh = strategy.proposer(draft), strategy.proposer(draft)
    for start, end, n in ((0, 6, 4), (6, 9, 2), (9, 10, 1), (10, 14, 4)):
        grown.observe(aux[start:end], tokens[start:end])
        proposal, again = grown.propose(n, 0.0, None), grown.propose(n, 0.0, None)
        fresh.start()
        fresh.observe(aux[:end], tokens[:end])
        expected = fresh.propose(n, 0.0, None)
        assert proposal.tokens == again.tokens == expected.tokens
        assert torch.allclose(proposal.margins, expected.margins, atol=1e-5)
    longer = fresh.propose(4, 0.0, None).tokens
    assert [fresh.propose(n, 0.0, None).tokens for n in (1, 2, 3)] == [longer[:1], longer[:2], longer[:3]]


def test_sampled_drafts_carry_the_distributions_they_came_from(target):
    _, engine = target
    strategy, draft, _ = make(target, kept=range(0, 64, 2))
    proposer = strategy.proposer(draft)
    proposer.observe(torch.randn(5, 96), PROMPT[:5])
    drawn = [proposer.propose(3, 1.0, torch.Generator().manual_seed(s)) for s in range(300)]
    p = drawn[0].probabilities
    assert p.shape == (3, 64) and torch.allclose(p.sum(-1), torch.ones(3)) and not p[:, 1::2].any()
    best = p.argmax(-1)
    for slot in range(3):
        share = sum(d.tokens[slot] == best[slot] for d in drawn) / 300
        assert abs(share - float(p[slot, best[slot]])) < 0.12
    for mode in ("target_only", "rejection"):
        runs = [decode_speculative(engine, proposer, LAYERS, PROMPT, settings(temperature=1.0, mode=mode), CPU) for _ in range(2)]
        assert runs[0].tokens == runs[1].tokens and len(runs[0].tokens) == 24
