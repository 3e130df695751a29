"""Tiny block strategies and drafts, and their rows, masks and states index by index, one slot and one key at a time (conventions.md §2)."""

from __future__ import annotations

import torch

from specforge.data.vocabulary_map import VocabularyMap
from specforge.modeling.draft.llama import LlamaAttention, LlamaDraft
from specforge.modeling.target_facts import TargetFacts
from specforge.runtime.contracts import StepContext
from specforge.training.strategies.dflash import DFlash
from specforge.training.strategies.domino import Domino
from specforge.training.strategies.dpace import DPace
from specforge.training.strategies.dspark import DSpark

CONTEXT = StepContext(step=3, total_steps=10, epoch=0, seed=0)  # Domino: λ = 0.4
# Two-turn documents, a reply that opens its document, a reply of one token, an unsupervised document.
MASKS = [[[0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0, 1]], [[0, 0, 1, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0]]]
FACTS = TargetFacts.from_config(
    {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 40,
        "rope_theta": 10000.0,
    },
    "tiny",
)
_BLOCK = {"block_size": 4, "num_anchors": None, "mask_token_id": 39, "aux_hidden_state_layer_ids": [1, 2, 4]}
_MARKOV = {"markov_rank": 5, "confidence_head": True, "confidence_head_with_markov": True}
_TERMS = {"ce_weight": 0.1, "l1_weight": 0.9, "confidence_weight": 1.0}
_OWN = {
    "dflash": (DFlash, {"loss_decay_gamma": 3.0}),
    "dpace": (DPace, {"weighting": "full", "alpha": 0.5}),
    "domino": (
        Domino,
        {
            "loss_decay_gamma": 3.0,
            "gru_hidden_size": 7,
            "correction_size": 5,
            "base_loss_fraction": 0.5,
            "candidate_pool_size": 0,
        },
    ),
    "dspark": (DSpark, {"loss_decay_gamma": 3.0, "markov_head_type": "vanilla", **_MARKOV, **_TERMS}),
}
NAMES = tuple(_OWN)


class SlidingLlama(LlamaDraft):
    """Every second layer sees a window of 4 tokens, as sliding layers of a real architecture do."""

    def attention(self, input_width, hidden_width, layer_idx):
        attention = LlamaAttention(input_width, hidden_width, self.num_heads, self.num_kv_heads, self.head_dim)
        if layer_idx % 2:
            attention.facts = attention.facts.__class__(**{**attention.facts.__dict__, "window": 4})
        return attention


def make_block_strategy(name, **changes):
    kind, own = _OWN[name]
    return kind(**{**_BLOCK, **own, **changes})


def make_block_draft(strategy, num_layers=1, seed=0, sliding=False, **sizes):
    torch.manual_seed(seed)
    dimensions = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, **sizes}
    architecture = (SlidingLlama if sliding else LlamaDraft)(
        num_layers=num_layers,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        init_from="random",
        **dimensions,
    )
    whole = VocabularyMap(torch.zeros(40, dtype=torch.int64), torch.ones(40, dtype=torch.bool), 1.0)
    draft = strategy.build_model(architecture, FACTS, whole, torch.randn(40, 16))
    for name, parameter in draft.named_parameters():
        if name.endswith(("norm.weight", "layernorm.weight")):  # norms away from one, so that a missing norm shows
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.startswith(("embed_proj.2", "markov_head")):  # the heads start small; here they must matter
            torch.nn.init.normal_(parameter, std=0.5)
    return draft


def documents_of(batch):
    """(batch row, places) of every document."""
    for number in range(len(batch.sample_ids)):
        b, places = (batch.tensors["document_ids"] == number).nonzero(as_tuple=True)
        yield int(b[0]), places.tolist()


def slow_anchors(batch):
    """Of every legal anchor of every document: the document's values by name, and the anchor's position in it."""
    for b, places in documents_of(batch):
        document = {name: batch.tensors[name][b, places[0] : places[-1] + 1] for name in batch.tensors}
        m = document["loss_mask"].tolist()
        for a in range(len(places) - 1):
            if m[a] and m[a + 1]:
                yield document, a


def slow_reach(document, anchor):
    """How many tokens after ``anchor`` are in its reply: ∏ m[a … a+j] is 1 for j up to that."""
    reach = 0
    while anchor + reach + 1 < len(document["loss_mask"]) and document["loss_mask"][anchor + reach + 1]:
        reach += 1
    return reach


def slow_block(draft, document, anchor, size):
    """Final states [size, H] of one block: every slot looks at its keys one by one."""
    context = [draft.hidden_norm(draft.fc(document["aux_hidden_states"][j])) for j in range(anchor)]
    tokens = [document["input_ids"][anchor]] + [torch.tensor(draft.mask_token_id)] * (size - 1)
    x = [draft.embed(token) for token in tokens]
    turn = [draft.rotary(torch.tensor(p), torch.float32) for p in range(anchor + size)]
    for layer in draft.layers:
        attention, window = layer.self_attn, layer.self_attn.facts.window
        normed = [layer.input_layernorm(row) for row in x]
        seen_context = [attention.keys_values(c, turn[j]) for j, c in enumerate(context)]
        seen_own = [attention.keys_values(row, turn[anchor + k]) for k, row in enumerate(normed)]
        following = []
        for k in range(size):
            visible = [kv for j, kv in enumerate(seen_context) if window is None or j >= anchor + k - (window - 1)]
            visible += [kv for other, kv in enumerate(seen_own) if window is None or 0 <= k - other <= window - 1]
            q = attention.queries(normed[k], turn[anchor + k])
            group = q.shape[0] // visible[0][0].shape[0]
            scores = torch.stack([(q * key.repeat_interleave(group, 0)).sum(-1) for key, _ in visible]) * attention.facts.scale
            share = torch.softmax(scores, dim=0)
            o = sum(s.unsqueeze(-1) * v.repeat_interleave(group, 0) for s, (_, v) in zip(share, visible, strict=True))
            h = x[k] + attention.output(o)
            following.append(h + layer.mlp(layer.post_attention_layernorm(h)))
        x = following
    return torch.stack([draft.norm(row) for row in x])


def assert_same_gradients(fast, slow):
    for (name, a), b in zip(fast.named_parameters(), slow.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, name
        assert torch.allclose(a.grad, b.grad, atol=2e-4, rtol=1e-3), (name, (a.grad - b.grad).abs().max())
        assert a.grad.abs().sum() > 0, name
