"""Draft trees: growth against a reference that lists every path, verification against one path at a time, decoding against the chain."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from specforge.errors import ConfigError, TargetError
from specforge.evaluation.decode import DecodeSettings, decode_plain, decode_speculative
from specforge.evaluation.draft_tree import DraftTree, TreeShape, accept_greedy_tree, grow, tree_problems
from specforge.evaluation.eagle3_branches import Eagle3Branches
from specforge.evaluation.evaluator import DecodeReport
from specforge.inference.target_engine.hf import HFTargetEngine
from specforge.modeling.draft.llama import LlamaDraft
from specforge.modeling.target import TargetHead
from specforge.modeling.target_facts import TargetFacts
from specforge.modeling.wiring.eagle3 import Eagle3Draft
from specforge.runtime.contracts import CaptureSpec, PromptTask, StepContext, TargetIdentity, TrainBatch

CPU, LAYERS, PROMPT = torch.device("cpu"), (1, 2, 4), [5, 9, 13, 21, 8, 30]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}


def engine_of(folder, model, attention="sdpa"):
    model.save_pretrained(folder)
    return HFTargetEngine(
        dtype="float32",
        batch_tokens=None,
        attn_implementation=attention,
        target_folder=folder,
        device="cpu",
        identity=TargetIdentity("t", None, "c", "k", "p"),
        trust_remote_code=False,
    )


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **{**SIZES, **changes}))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return folder, engine_of(folder, llama())


def settings(**changes):
    return DecodeSettings(
        **{"num_draft_tokens": 3, "max_new_tokens": 32, "temperature": 0.0, "mode": "target_only", "stop_token_ids": frozenset(), **changes}
    )


@pytest.fixture(scope="module")
def trained(target):
    """A draft that has seen three conversations: right often, not always."""
    folder, engine = target
    facts = TargetFacts.from_folder(folder)
    torch.manual_seed(0)
    keys = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "rope")
    node = {**dict.fromkeys(keys), "num_layers": 1, "init_from": "random"}
    from specforge.training.strategies.eagle3 import Eagle3

    strategy = Eagle3(
        ttt_length=3,
        step_decay=0.8,
        draft_vocab_size=None,
        aux_hidden_state_layer_ids=list(LAYERS),
        **dict.fromkeys(("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual"), False),
        loss="soft_cross_entropy",
        kl_scale=1.0,
        kl_decay=3.0,
    )
    draft = Eagle3Draft(
        LlamaDraft(**LlamaDraft.fill_from_target(node, facts)),
        target_hidden_size=32,
        num_aux=3,
        embedding=engine.model.get_input_embeddings().weight.detach(),
        d2t=torch.zeros(64, dtype=torch.int64),
        t2d=torch.ones(64, dtype=torch.bool),
        flags=strategy.flags,
    )
    head = TargetHead.load(folder, torch.float32)
    batches = [batch_of(engine, [t, *PROMPT], decode_plain(engine, [t, *PROMPT], settings(), CPU).tokens) for t in (4, 40, 50)]
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(120):
        out = strategy.forward_loss(draft, batches[step % 3], head, StepContext(step, 120, 0, 0))
        optimizer.zero_grad()
        (out.loss_sum / out.weight_sum).backward()
        optimizer.step()
    return strategy, draft


def batch_of(engine, prompt, reply):
    ids = [*prompt, *reply]
    task = PromptTask("x", tuple(ids), tuple([0] * len(prompt) + [1] * len(reply)))
    tensors = {name: t.unsqueeze(0) for name, t in engine.capture([task], CaptureSpec(LAYERS, True, True, "float32"))[0].tensors.items()}
    tensors |= {"position_ids": torch.arange(len(ids)).unsqueeze(0), "document_ids": torch.zeros(1, len(ids), dtype=torch.int64)}
    return TrainBatch(tensors, ("x",))


# -- growth ---------------------------------------------------------------------------------------------------------------------


class Table:
    """A draft whose next-token logits depend on the path so far and nothing else; ids are doubled on the way to the target."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.vocabulary, self.seed = vocabulary, seed
        self.paths: list[tuple[int, ...]] = [()]

    def logits_after(self, path: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, path)) % 2**31)
        return torch.randn(self.vocabulary, generator=generator) * 2

    def root(self) -> torch.Tensor:
        return self.logits_after(()).unsqueeze(0)

    def extend(self, tokens: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        self.paths = [(*self.paths[s], t // 2) for t, s in zip(tokens.tolist(), sources.tolist(), strict=True)]
        return torch.stack([self.logits_after(path) for path in self.paths])

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids * 2


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def slow_tree(drafter: Table, shape: TreeShape) -> set[tuple[int, ...]]:
    """Best paths by looking at all of them: level after level the topk likeliest survive, all that were looked at compete in the end."""

    def score(path: tuple[int, ...]) -> float:
        return sum(float(torch.log_softmax(drafter.logits_after(path[:i]), -1)[token]) for i, token in enumerate(path))

    def likeliest(path: tuple[int, ...]) -> list[int]:
        logits = drafter.logits_after(path)
        return sorted(range(drafter.vocabulary), key=lambda t: -float(logits[t]))[: shape.topk]

    looked_at: list[tuple[int, ...]] = []
    beams: list[tuple[int, ...]] = [()]
    for _ in range(shape.depth):
        level = [(*beam, token) for beam in beams for token in likeliest(beam)]
        looked_at += level
        beams = sorted(level, key=score, reverse=True)[: shape.topk]
    assert len(looked_at) == shape.num_candidates
    return {tuple(2 * t for t in path) for path in sorted(looked_at, key=score, reverse=True)[: shape.num_tokens]}


@pytest.mark.parametrize("shape", [TreeShape(3, 2, 5), TreeShape(5, 4, 15), TreeShape(4, 3, 30), TreeShape(1, 3, 2), TreeShape(6, 1, 6)])
def test_growth_equals_the_best_of_all_paths(shape):
    for seed in range(5):
        tree = grow(Table(9, seed), shape)
        paths = paths_of(tree)
        assert set(paths) == slow_tree(Table(9, seed), shape) and len(paths) == len(set(paths)) == shape.num_tokens
        assert all(parent <= i for i, parent in enumerate(tree.parents))
        assert [len(p) for p in paths] == sorted(len(p) for p in paths)


def test_a_certain_draft_keeps_the_parents_of_what_it_keeps():
    """Probabilities of exactly 1 make child and parent tie."""

    class Certain(Table):
        def logits_after(self, path):
            return torch.tensor([0.0, 1e9, 0.0, 0.0])

    assert paths_of(grow(Certain(4, 0), TreeShape(4, 2, 4))) == [(2,), (2, 2), (2, 2, 2), (2, 2, 2, 2)]


def test_acceptance_follows_the_longest_path_of_the_target():
    tree = DraftTree([7, 8, 7, 9, 7], [0, 0, 1, 2, 3])
    best = {0: 7, 1: 7, 3: 5, 2: 9, 4: 1, 5: 0}
    assert accept_greedy_tree([best[i] for i in range(6)], tree) == [0, 1, 3]
    assert accept_greedy_tree([8, 0, 9, 0, 4, 0], tree) == [0, 2, 4]
    assert accept_greedy_tree([3] * 6, tree) == [0]


# -- verification by the target -------------------------------------------------------------------------------------------------


def other_targets():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

    gemma = {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 3}
    qwen = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    return {
        "llama-eager": (llama, "eager"),
        "mistral-sliding": (lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)), "sdpa"),
        "gemma3": (lambda: Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, "initializer_range": 0.2}, **gemma)), "sdpa"),
        "qwen2-sliding": (lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **qwen)), "eager"),
    }


@pytest.mark.parametrize("name", ["llama", "llama-eager", "mistral-sliding", "gemma3", "qwen2-sliding"])
def test_one_tree_forward_equals_a_forward_for_each_path(target, name, tmp_path):
    """Logits, features and, after a path is kept, what follows it; in layers with a window too."""
    if name == "llama":
        engine = target[1]
    else:
        torch.manual_seed(1)
        build, attention = other_targets()[name]
        engine = engine_of(tmp_path, build(), attention)
    tokens, parents = [11, 3, 4, 5, 6, 7, 3], [-1, 0, 0, 1, 1, 2, 5]
    _, _, cache = engine.forward_cached(torch.tensor([PROMPT]), None, LAYERS)
    logits, aux, cache = engine.forward_cached(torch.tensor([tokens]), cache, LAYERS, parents=parents)
    for node in range(len(tokens)):
        path = [node]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        text = [*PROMPT, *(tokens[i] for i in reversed(path))]
        alone, alone_aux, _ = engine.forward_cached(torch.tensor([text]), None, LAYERS)
        assert torch.allclose(logits[node], alone[-1], atol=2e-4, rtol=1e-4)
        assert torch.allclose(aux[node], alone_aux[-1], atol=2e-4, rtol=1e-4)
    cache = engine.keep_in_cache(cache, len(PROMPT), [len(PROMPT) + i for i in (0, 2, 5)])
    following, _, _ = engine.forward_cached(torch.tensor([[9, 1]]), cache, LAYERS)
    alone, _, _ = engine.forward_cached(torch.tensor([[*PROMPT, 11, 4, 7, 9, 1]]), None, LAYERS)
    assert torch.allclose(following, alone[-2:], atol=2e-4, rtol=1e-4)


def test_a_target_that_cannot_mask_a_tree_says_so(target):
    engine = target[1]
    _, _, cache = engine.forward_cached(torch.tensor([PROMPT]), None, ())
    config = engine.model.config
    before = config._attn_implementation
    try:
        config._attn_implementation_internal = "flex_attention"
        with pytest.raises(TargetError, match="attn_implementation=flex_attention.*evaluator.tree_topk=1"):
            engine.forward_cached(torch.tensor([[1, 2]]), cache, (), parents=[-1, 0])
    finally:
        config._attn_implementation_internal = before


# -- decoding with a draft ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForcedTree(DecodeSettings):
    """A tree of topk 1, which an evaluation decodes as a chain."""

    @property
    def tree(self):
        return TreeShape(self.num_draft_tokens, 1, self.num_draft_tokens)


PROMPTS = [[t, *PROMPT] for t in (4, 40, 50, 12, 33, 60)]


def decode(target, trained, prompt, chosen):
    strategy, draft = trained
    return decode_speculative(target[1], strategy.proposer(draft), LAYERS, prompt, chosen, CPU)


def test_a_tree_of_one_branch_is_the_chain(target, trained):
    for prompt in PROMPTS:
        chain, tree = (decode(target, trained, prompt, s) for s in (settings(), ForcedTree(**settings().__dict__)))
        assert (chain.tokens, chain.accepted) == (tree.tokens, tree.accepted)


def test_trees_change_no_output_and_accept_more(target, trained):
    plain = [decode_plain(target[1], prompt, settings(), CPU) for prompt in PROMPTS]

    def report(**changes):
        chosen = settings(**changes)
        return DecodeReport(chosen, len(PROMPTS), [decode(target, trained, prompt, chosen) for prompt in PROMPTS], plain).summary()

    chain, small, large = report(), report(tree_topk=2, tree_num_tokens=5), report(tree_topk=4, tree_num_tokens=20)
    assert all(s["lossless_requests"] == s["compared_requests"] == 6 for s in (chain, small, large))
    assert 1.3 < chain["accept_length"] < small["accept_length"] < large["accept_length"]
    assert chain["tree"] is None and large["tree"] == {"depth": 3, "topk": 4, "num_tokens": 20}
    for s in (chain, small, large):  # entry j: verify steps that accepted j drafts of one path, never more than the depth
        histogram = s["acceptance_histogram"]
        assert len(histogram) == 4 and sum(histogram) == s["num_verify_steps"]
        assert s["accept_length"] == pytest.approx(1 + sum(j * c for j, c in enumerate(histogram)) / sum(histogram))


def test_a_verify_step_accepts_what_its_tree_holds_of_the_answer(target, trained):
    """Against an oracle: grow the tree after each committed text by hand and look how far the greedy answer goes in it."""
    strategy, draft = trained
    engine, shape = target[1], TreeShape(3, 3, 8)
    prompt = PROMPTS[3]
    answer = decode_plain(engine, prompt, settings(max_new_tokens=40), CPU).tokens
    decoded = decode(target, trained, prompt, settings(tree_topk=3, tree_num_tokens=8))
    text, expected = 1, []
    while text < 32:
        committed = [*prompt, *answer[:text]]
        _, aux, _ = engine.forward_cached(torch.tensor([committed[:-1]]), None, LAYERS)
        proposer = strategy.proposer(draft)
        proposer.observe(aux, committed[1:])
        paths = set(paths_of(proposer.propose_tree(shape)))
        accepted = max((k for k in range(1, 4) if tuple(answer[text : text + k]) in paths), default=0)
        expected.append(accepted)
        text += accepted + 1
    assert decoded.accepted == expected and sum(expected) > 0


def test_proposals_after_acceptance_equal_those_of_a_fresh_start(trained):
    strategy, draft = trained
    torch.manual_seed(5)
    aux, tokens, shape = torch.randn(12, 96), list(range(10, 22)), TreeShape(3, 3, 9)
    grown, fresh = strategy.proposer(draft), strategy.proposer(draft)
    for start, end in ((0, 6), (6, 9), (9, 10), (10, 12)):
        grown.observe(aux[start:end], tokens[start:end])
        trees = [grown.propose_tree(shape), grown.propose_tree(shape)]
        chain = grown.propose(3, 0.0, None).tokens
        fresh.start()
        fresh.observe(aux[:end], tokens[:end])
        expected = fresh.propose_tree(shape)
        assert trees[0] == trees[1] == expected and fresh.propose(3, 0.0, None).tokens == chain


def test_branches_read_their_own_slot_of_the_cache_as_in_the_server(trained):
    """Until branches cross, a branch is a chain of its own. After crossing, the state is the new parent's and the older keys the slot's."""
    _, draft = trained
    torch.manual_seed(2)
    aux, committed = torch.randn(5, 96), torch.arange(5)
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    with torch.no_grad():
        u, residual = layer.attention_input(draft.embed(committed + 1), draft.fuse(aux))
        keys, values = attention.keys_values(u, draft.rotary(committed, torch.float32))
        state = residual[-1:]
        branches = Eagle3Branches(draft, [(keys, values)], state, draft.norm(state))

        def step(text_keys, token, g, position):
            u, residual = layer.attention_input(draft.embed(torch.tensor([token])), g)
            rope = draft.rotary(torch.tensor([position]), torch.float32)
            text_keys = [torch.cat(pair) for pair in zip(text_keys, attention.keys_values(u, rope), strict=True)]
            q = attention.queries(u, rope)[0].unflatten(0, (2, 2))
            scores = torch.einsum("kgd,skd->kgs", q, text_keys[0]) * attention.facts.scale
            o = torch.einsum("kgs,skd->kgd", scores.softmax(-1), text_keys[1]).flatten(0, 1)
            return text_keys, layer.finish(residual, o[None])

        first = branches.extend(torch.tensor([7, 8]), torch.tensor([0, 0]))
        slots = [step([keys, values], token, state, 5) for token in (7, 8)]
        assert torch.allclose(first, torch.cat([draft.logits(draft.norm(h)) for _, h in slots]), atol=1e-5)
        crossed = branches.extend(torch.tensor([9, 10]), torch.tensor([1, 1]))  # both continue what slot 1 said
        expected = [step(slots[j][0], token, slots[1][1], 6) for j, token in enumerate((9, 10))]
        assert torch.allclose(crossed, torch.cat([draft.logits(draft.norm(h)) for _, h in expected]), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((3, 4, None, 0.0), []),
        ((3, 1, 3, 0.7), []),
        ((3, 4, 10, 0.7), ["temperature 0 only"]),
        ((3, 2, 11, 0.0), ["10 candidates"]),
        ((3, 1, 5, 0.0), ["evaluator.tree_topk to 2 or more"]),
    ],
)
def test_impossible_trees_are_refused_with_what_to_change(arguments, says):
    problems = tree_problems(*arguments)
    assert len(problems) == len(says) and all(words in p and "Set evaluator." in p for words, p in zip(says, problems, strict=True))
    n, topk, tokens, temperature = arguments
    chosen = settings(num_draft_tokens=n, tree_topk=topk, tree_num_tokens=tokens, temperature=temperature)
    if says:
        with pytest.raises(ConfigError):
            _ = chosen.tree
    else:
        assert (chosen.tree is None) == (topk == 1) and (topk == 1 or chosen.tree.num_tokens == 12)


def test_the_command_line_refuses_a_tree_that_no_draft_makes(refused, tiny_work):
    base = [a for a in tiny_work.base if not a.startswith("strategy.ttt_length")]
    refused("plan", *base, "strategy=peagle", "strategy.mask_token_id=299", "evaluator.tree_topk=2", says=["strategy=peagle", "no tree"])
    refused("plan", *tiny_work.base, "evaluator.tree_topk=2", "evaluator.temperature=0.5", says=["temperature 0 only"])


def test_by_hand_number_of_candidates():
    assert [TreeShape(d, k, 1).num_candidates for d, k in itertools.product((1, 3), (1, 4))] == [1, 4, 3, 36]
    assert math.isclose(TreeShape(8, 10, 60).num_candidates, 710)
