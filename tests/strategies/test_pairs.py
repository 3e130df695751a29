"""Gates that every strategy passes with every architecture. Pairs are read off conf/, so a new YAML joins by itself.

Each pair is composed from its files, filled from a tiny target, and learns one short conversation by heart; what a strategy's own tests
prove in detail (rows, masks and loss against slow references) is not repeated here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specforge.config.check import find_problems
from specforge.config.compose import compose_overrides
from specforge.config.derive import derive
from specforge.config.locate import config_dir
from specforge.config.rules import violations
from specforge.data.vocabulary_map import VocabularyMap
from specforge.evaluation.decode import DecodeSettings, decode_plain, decode_speculative
from specforge.evaluation.metrics import prefix_lengths, walk_document
from specforge.inference.target_engine.hf import HFTargetEngine
from specforge.modeling.target import TargetHead
from specforge.modeling.target_facts import TargetFacts
from specforge.runtime.contracts import PromptTask, StepContext, TargetIdentity, TrainBatch
from specforge.training.assembly import Parts
from specforge.training.strategies.base import DraftTrainStrategy

CPU = torch.device("cpu")
PROMPT, OTHER = (75, 109, 113, 121, 108, 130), (90, 81, 145, 200)
DRAFTED, LIMIT = 3, 12
# Small values of keys that strategies have; what is not here keeps the value of its YAML. Nothing is sampled, so that a fit is complete.
SMALL: dict[str, Any] = {
    "ttt_length": DRAFTED, "num_depths": DRAFTED, "down_sample_ratio": 1.0, "block_size": DRAFTED + 1, "num_anchors": None,
    "draft_vocab_size": None, "mask_token_id": 299, "gru_hidden_size": 24, "correction_size": 16, "markov_rank": 16,
}  # fmt: skip
# λ of Domino's schedule is below 1 from the first step on, and past its end after the fifth.
CONTEXT = [StepContext(step=step, total_steps=20, epoch=0, seed=0) for step in range(5, 20)]


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


PAIRS = [(strategy, draft) for strategy in options("strategy") for draft in options("draft")]


@dataclass
class Pair:
    """One composed pair and, after :meth:`fit`, what was seen on the way."""

    strategy: DraftTrainStrategy
    model: nn.Module
    head: TargetHead
    engine: HFTargetEngine
    facts: TargetFacts
    reply: list[int]
    batch: TrainBatch = field(init=False)
    reached: set[str] = field(default_factory=set)
    seconds_of_20_steps: float = 0.0
    walks: list[tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = self.capture(PROMPT, self.reply)

    def capture(self, prompt: tuple[int, ...], reply: list[int]) -> TrainBatch:
        ids = (*prompt, *reply)
        task = PromptTask("x", ids, tuple([0] * len(prompt) + [1] * len(reply)))
        features = self.engine.capture([task], self.strategy.capture_spec(self.facts, "float32"))[0].tensors
        places = torch.arange(len(ids)).unsqueeze(0)
        tensors = {name: t.unsqueeze(0) for name, t in features.items()}
        return TrainBatch({**tensors, "position_ids": places, "document_ids": torch.zeros_like(places)}, ("x",))

    def loss(self, batch: TrainBatch, context: StepContext) -> torch.Tensor:
        out = self.strategy.forward_loss(self.model, batch, self.head, context)
        return out.loss_sum / out.weight_sum

    def fit(self, most: int = 600) -> bool:
        """Train until every drafted token of the conversation is right; whether that was reached."""
        parameters = dict(self.model.named_parameters())
        optimizer = torch.optim.AdamW(parameters.values(), lr=4e-3, weight_decay=0.0)
        started, right = time.process_time(), 0
        for step in range(most):
            loss = self.loss(self.batch, CONTEXT[min(step, len(CONTEXT) - 1)])
            optimizer.zero_grad()
            loss.backward()
            if step < 5:
                self.reached |= {name for name, p in parameters.items() if p.grad is not None and p.grad.any()}
            optimizer.step()
            if step == 19:
                self.seconds_of_20_steps = time.process_time() - started
                self.walks.append(self.walk_and_decode(PROMPT, self.reply)[:2])
            if step % 10 == 9:
                _, _, correct, supervised = self.strategy.prefix_correctness(self.model, self.batch, self.head, DRAFTED)
                right = right + 1 if bool((correct | ~supervised).all()) else 0
                if right == 2 and step > 20:  # not by the skin of its teeth
                    return True
        return False

    def decode(self, prompt: tuple[int, ...]) -> Any:
        proposer = self.strategy.proposer(self.model, self.head)
        return decode_speculative(self.engine, proposer, self.strategy.aux_layer_ids(self.facts), prompt, settings(LIMIT), CPU)

    def walk_and_decode(self, prompt: tuple[int, ...], reply: list[int]) -> tuple[tuple[int, int], tuple[int, int], Any]:
        """(steps, accepted) of the teacher-forced walk over the target's own reply, the same of decoding, and what was decoded.

        The first legal row drafts when one token of the reply is known, each further row one more; decoding stops at the limit.
        """
        batch = self.batch if prompt == PROMPT else self.capture(prompt, reply)
        _, places, correct, _ = self.strategy.prefix_correctness(self.model, batch, self.head, DRAFTED)
        walk = walk_document(places.tolist(), prefix_lengths(correct).tolist(), last_start=int(places[0]) + LIMIT - 2)
        decoded = self.decode(prompt)
        return (walk.steps, walk.accepted), (decoded.verify_steps, sum(decoded.accepted)), decoded


def settings(limit: int) -> DecodeSettings:
    return DecodeSettings(DRAFTED, limit, 0.0, "target_only", frozenset())


@pytest.fixture(scope="module")
def engine(tiny_target_folder: Path) -> HFTargetEngine:
    return HFTargetEngine(dtype="float32", batch_tokens=None, attn_implementation="sdpa", target_folder=tiny_target_folder, device="cpu",
                          identity=TargetIdentity("t", None, "c", "k", "p"), trust_remote_code=False)  # fmt: skip


@pytest.fixture(scope="module")
def replies(engine: HFTargetEngine) -> dict[tuple[int, ...], list[int]]:
    """The target's greedy replies, long enough for the last verify step to draft past the limit."""
    return {prompt: decode_plain(engine, prompt, settings(LIMIT + DRAFTED), CPU).tokens for prompt in (PROMPT, OTHER)}


def composed(strategy: str, draft: str, folder: Path) -> dict[str, Any]:
    """The configuration of a pair, filled from the target, without a problem of types or rules."""
    base = ["sizes=none", "target=hf", f"target.path={folder}", "device=cpu", f"evaluator.num_draft_tokens={DRAFTED}"]
    found = compose_overrides("train", [*base, f"strategy={strategy}", f"draft={draft}"])
    node = found.config["strategy"]
    config = {**found.config, "strategy": {**node, **{key: value for key, value in SMALL.items() if key in node}}}
    assert find_problems(config) == []
    derived = derive(config, lambda _: None)
    assert derived.facts is not None
    errors = [v.message for v in violations(derived.config, found.choices, derived.facts) if v.severity == "error"]
    assert errors == []
    return derived.config


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: "-".join(pair))
def pair(request: pytest.FixtureRequest, tiny_target_folder: Path, engine: HFTargetEngine, replies) -> Iterator[Pair]:
    torch.manual_seed(0)
    config, told = composed(*request.param, tiny_target_folder), []
    vocabulary = VocabularyMap.identity(300)
    warm = Parts.from_config(config).new_draft(vocabulary, told.append)
    # Fits start from nothing: the sharp attention of this random target is a bad place to leave.
    parts = Parts.from_config({**config, "draft": {**config["draft"], "init_from": "random"}})
    model = parts.new_draft(vocabulary, told.append)
    assert warm.state_dict().keys() == model.state_dict().keys()
    head = TargetHead.load(tiny_target_folder, torch.float32)
    yield Pair(parts.strategy, model, head, engine, parts.facts, replies[PROMPT])


def test_the_future_changes_nothing(pair: Pair) -> None:
    """The loss of a reply that ends at p, and its gradient, do not depend on tokens, features or teachers behind it.

    Tokens are read up to p − 1 and taught at p; features are read up to p − 1. So everything later may be anything.
    """
    for p in (len(PROMPT) + 4, len(PROMPT) + 9):
        cut = {name: t.clone() for name, t in pair.batch.tensors.items()}
        cut["loss_mask"][:, p + 1 :] = False
        other = {name: t.clone() for name, t in cut.items()}
        other["input_ids"][:, p + 1 :] = (other["input_ids"][:, p + 1 :] + 17) % 299
        for name in ("aux_hidden_states", "final_hidden_states"):
            if name in other:
                other[name][:, p:] += 3.0
        values, gradients = [], []
        for tensors in (cut, other):
            pair.model.zero_grad()
            loss = pair.loss(TrainBatch(tensors, ("x",)), CONTEXT[0])
            loss.backward()
            values.append(loss.item())
            gradients.append([p.grad.clone() for p in pair.model.parameters() if p.grad is not None])
        assert values[0] == pytest.approx(values[1], rel=1e-6)
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*gradients, strict=True))
        # What lies before it is seen, so the comparison above can fail.
        other["aux_hidden_states"][:, len(PROMPT) : p - 2] *= -1.0
        assert abs(pair.loss(TrainBatch(other, ("x",)), CONTEXT[0]).item() / values[0] - 1.0) > 1e-5


def test_one_conversation_is_learned_by_heart(pair: Pair, replies) -> None:
    """Every parameter has a gradient, twenty steps take seconds, and whole chains or blocks are accepted in decoding."""
    before = pair.decode(PROMPT)
    assert sum(before.accepted) < DRAFTED * before.verify_steps
    assert pair.fit(), "the conversation was not learned"
    assert pair.reached == {name for name, _ in pair.model.named_parameters()}
    assert pair.seconds_of_20_steps < 6.0
    walk, counted, decoded = pair.walk_and_decode(PROMPT, pair.reply)
    assert walk == counted == (LIMIT // (DRAFTED + 1), LIMIT // (DRAFTED + 1) * DRAFTED)
    assert decoded.accepted == [DRAFTED] * len(decoded.accepted) and decoded.tokens == pair.reply[:LIMIT]
    # Half-trained on the same conversation, and fully trained on one it has never seen.
    walk, counted, decoded = pair.walk_and_decode(OTHER, replies[OTHER])
    assert walk == counted and decoded.tokens == replies[OTHER][:LIMIT]
    for walk, counted in pair.walks:
        assert walk == counted


def test_pairs_are_those_of_the_files() -> None:
    assert {"llama", "qwen3", "deepseek_mla"} <= set(options("draft"))
    assert {"eagle3", "eagle3_1", "peagle", "dflash", "dpace", "domino", "dspark"} <= set(options("strategy"))
    assert len(PAIRS) == len(options("draft")) * len(options("strategy"))
