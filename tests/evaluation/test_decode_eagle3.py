"""Decoding with a draft against decoding without one, against the teacher-forced walk, and after overfitting one conversation."""

from __future__ import annotations

import pytest
import torch

from specforge.distributed.groups import SingleGroup
from specforge.evaluation.acceptance import accept_rejection, accept_target_only
from specforge.evaluation.decode import DecodeSettings, decode_plain, decode_speculative
from specforge.evaluation.evaluator import Evaluator
from specforge.evaluation.metrics import bootstrap_interval, prefix_lengths, simulated_acc_len, walk_document
from specforge.evaluation.proposer import Proposal, draw
from specforge.inference.target_engine.hf import HFTargetEngine
from specforge.modeling.draft.llama import LlamaDraft
from specforge.modeling.target import TargetHead
from specforge.modeling.target_facts import TargetFacts
from specforge.modeling.wiring.eagle3 import Eagle3Draft
from specforge.runtime.contracts import CaptureSpec, PromptTask, StepContext, TargetIdentity, TrainBatch

CPU = torch.device("cpu")
PROMPT = [5, 9, 13, 21, 8, 30]


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


def settings(**changes):
    return DecodeSettings(
        **{"num_draft_tokens": 3, "max_new_tokens": 24, "temperature": 0.0, "mode": "target_only", "stop_token_ids": frozenset(), **changes}
    )


def make(target, make_strategy, seed=0, **flags):
    folder, engine = target
    facts = TargetFacts.from_folder(folder)
    torch.manual_seed(seed)
    architecture = LlamaDraft(
        **LlamaDraft.fill_from_target(
            dict.fromkeys(
                (
                    "hidden_size",
                    "intermediate_size",
                    "num_heads",
                    "num_kv_heads",
                    "head_dim",
                    "rms_norm_eps",
                    "max_position_embeddings",
                    "rope",
                )
            )
            | {"num_layers": 1, "init_from": "random"},
            facts,
        )
    )
    strategy = make_strategy(**flags)
    draft = Eagle3Draft(
        architecture,
        target_hidden_size=32,
        num_aux=3,
        embedding=engine.model.get_input_embeddings().weight.detach(),
        d2t=torch.zeros(64, dtype=torch.int64),
        t2d=torch.ones(64, dtype=torch.bool),
        flags=strategy.flags,
    )
    return strategy, draft, TargetHead.load(folder, torch.float32)


def batch_of(engine, prompt, reply):
    ids = [*prompt, *reply]
    task = PromptTask("x", tuple(ids), tuple([0] * len(prompt) + [1] * len(reply)))
    features = engine.capture([task], CaptureSpec((1, 2, 4), True, True, "float32"))[0].tensors
    tensors = {name: t.unsqueeze(0) for name, t in features.items()}
    tensors |= {"position_ids": torch.arange(len(ids)).unsqueeze(0), "document_ids": torch.zeros(1, len(ids), dtype=torch.int64)}
    return TrainBatch(tensors, ("x",))


def train(strategy, draft, head, batch, steps, lr=3e-3):
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    for step in range(steps):
        out = strategy.forward_loss(draft, batch, head, StepContext(step, steps, 0, 0))
        optimizer.zero_grad()
        (out.loss_sum / out.weight_sum).backward()
        optimizer.step()


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}])
def test_overfitting_one_conversation_accepts_whole_chains(target, make_strategy, flags):
    _, engine = target
    plain = decode_plain(engine, PROMPT, settings(max_new_tokens=28), CPU)
    strategy, draft, head = make(target, make_strategy, **flags)
    before = decode_speculative(engine, strategy.proposer(draft), (1, 2, 4), PROMPT, settings(), CPU)
    train(strategy, draft, head, batch_of(engine, PROMPT, plain.tokens), 800)
    after = decode_speculative(engine, strategy.proposer(draft), (1, 2, 4), PROMPT, settings(), CPU)
    assert sum(before.accepted) / before.verify_steps < 1
    assert after.accepted == [3] * 6
    assert after.tokens == plain.tokens[:24]


@pytest.mark.parametrize("train_steps", [0, 25, 60])
def test_walk_accept_length_is_decoded_accept_length(target, make_strategy, train_steps):
    """On the target's own greedy replies; the walk reads n tokens past the limit, where the last verify step still drafts."""
    _, engine = target
    strategy, draft, head = make(target, make_strategy)
    limit, n = 24, 3
    replies = [decode_plain(engine, [t, *PROMPT], settings(max_new_tokens=limit + n), CPU).tokens for t in (4, 40, 50)]
    if train_steps:
        train(strategy, draft, head, batch_of(engine, [4, *PROMPT], replies[0]), train_steps)
    for first, reply in zip((4, 40, 50), replies, strict=True):
        prompt = [first, *PROMPT]
        decoded = decode_speculative(engine, strategy.proposer(draft), (1, 2, 4), prompt, settings(), CPU)
        _, places, correct, _ = strategy.prefix_correctness(draft, batch_of(engine, prompt, reply), head, n)
        walk = walk_document(places.tolist(), prefix_lengths(correct).tolist(), last_start=len(prompt) + limit - 3)
        assert (walk.steps, walk.accepted) == (decoded.verify_steps, sum(decoded.accepted))
        assert decoded.tokens == reply[:limit]


def test_stop_tokens_and_limits_cut_the_answer_but_not_the_counts(target, make_strategy):
    _, engine = target
    strategy, draft, head = make(target, make_strategy)
    reply = decode_plain(engine, PROMPT, settings(max_new_tokens=27), CPU).tokens
    train(strategy, draft, head, batch_of(engine, PROMPT, reply), 150)
    stop = reply[5]
    cut = reply[: reply.index(stop) + 1]
    decoded = decode_speculative(engine, strategy.proposer(draft), (1, 2, 4), PROMPT, settings(stop_token_ids=frozenset([stop])), CPU)
    assert decoded.tokens == cut == decode_plain(engine, PROMPT, settings(stop_token_ids=frozenset([stop])), CPU).tokens
    assert all(a == 3 for a in decoded.accepted)
    one = decode_speculative(engine, strategy.proposer(draft), (1, 2, 4), PROMPT, settings(max_new_tokens=1), CPU)
    assert one.tokens == reply[:1] and one.accepted == []


@pytest.mark.parametrize("mode", ["target_only", "rejection"])
def test_sampling_keeps_the_target_distribution(mode):
    """Two drafted tokens over a vocabulary of 5: the first emitted token must be distributed as the target says (chi-square)."""
    torch.manual_seed(0)
    target_logits, draft_logits = torch.randn(3, 5) * 1.5, torch.randn(2, 5) * 1.5
    temperature, draws = 0.8, 6000
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(5)
    for _ in range(draws):
        if mode == "rejection":
            drawn = [draw(logits, temperature, generator) for logits in draft_logits]
            accepted, following = accept_rejection(
                target_logits, Proposal([t for t, _ in drawn], torch.stack([p for _, p in drawn])), temperature, generator
            )
            first = drawn[0][0] if accepted else following
        else:
            best = [int(row.argmax()) for row in draft_logits]
            accepted, following = accept_target_only(target_logits, Proposal(best), temperature, generator)
            first = best[0] if accepted else following
        counts[first] += 1
    expected = torch.softmax(target_logits[0] / temperature, -1) * draws
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # 99.9 % point of chi-square with 4 degrees of freedom


def test_sampled_decoding_is_reproducible_and_finishes(target, make_strategy):
    _, engine = target
    strategy, draft, _ = make(target, make_strategy)
    for mode in ("target_only", "rejection"):
        runs = [
            decode_speculative(engine, strategy.proposer(draft), (1, 2, 4), PROMPT, settings(temperature=1.0, mode=mode), CPU)
            for _ in range(2)
        ]
        assert runs[0].tokens == runs[1].tokens and len(runs[0].tokens) == 24


def test_walks_by_hand():
    assert walk_document([2, 3, 4, 5, 6, 7], [0, 2, 3, 0, 1, 0]).__dict__ == {"steps": 3, "accepted": 3}  # 2 → 3 → 6 → 8
    # A gap opens the next reply even inside the reach of the last step.
    assert walk_document([2, 3, 9, 10], [3, 0, 1, 0]).__dict__ == {"steps": 2, "accepted": 4}
    assert walk_document([0, 1, 2], [0, 0, 0], last_start=1).steps == 2
    assert walk_document([], []).accept_length == 1.0


def test_metrics_by_hand():
    assert simulated_acc_len([0.5, 0.5, 1.0]) == pytest.approx(0.5 + 0.25 + 0.25)
    assert prefix_lengths(torch.tensor([[1, 0, 1], [1, 1, 1], [0, 1, 1]]).bool()).tolist() == [1, 3, 0]
    low, high = bootstrap_interval([(3, 3), (0, 3), (6, 6), (0, 0)])
    assert 1.0 <= low < 1.75 < high <= 2.0


def test_the_evaluator_pools_documents_of_packed_batches(target, make_strategy):
    _, engine = target
    strategy, draft, head = make(target, make_strategy)
    replies = [decode_plain(engine, [t, *PROMPT], settings(), CPU).tokens for t in (4, 40)]
    train(strategy, draft, head, batch_of(engine, [4, *PROMPT], replies[0]), 60)
    single = [batch_of(engine, [t, *PROMPT], r) for t, r in zip((4, 40), replies, strict=True)]
    packed = TrainBatch({name: torch.cat([b.tensors[name] for b in single], dim=1) for name in single[0].tensors}, ("a", "b"))
    packed.tensors["document_ids"] = torch.repeat_interleave(torch.arange(2), 31).unsqueeze(0)
    evaluator = Evaluator(
        num_draft_tokens=3,
        batch_tokens=100,
        num_requests=2,
        num_baseline_requests=2,
        num_untrained_requests=0,
        max_new_tokens=8,
        temperature=0.0,
        mode="target_only",
        tree_topk=1,
        tree_num_tokens=None,
        time_limit_minutes=None,
    )
    one, two = (evaluator.from_features(strategy, draft, batches, head, SingleGroup(), CPU) for batches in ([packed], single))
    assert one == two and one["num_rows"] == 2 * 23 and 1.0 < one["walk_accept_length"] <= 4.0
    report = evaluator.by_decoding(
        engine, strategy.proposer(draft), (1, 2, 4), [[4, *PROMPT], [40, *PROMPT]], evaluator.settings(frozenset(), 0), CPU
    )
    summary = report.summary()
    assert summary["lossless_requests"] == summary["compared_requests"] == 2
    assert summary["num_verify_steps"] == sum(summary["acceptance_histogram"])
