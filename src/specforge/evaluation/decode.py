"""Speculative decoding of one request with our own draft, step for step as serving does it, and the same without a draft.

conventions.md §7 defines what is counted: the token that prefill samples is no verify step; the last step counts before a stop or
a limit cuts it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from specforge.evaluation.acceptance import accept_greedy, accept_rejection, accept_target_only
from specforge.evaluation.draft_tree import TreeShape, accept_greedy_tree, tree_shape
from specforge.evaluation.proposer import Proposal, Proposer

SamplingMode = Literal["target_only", "rejection"]


class CachedTarget(Protocol):
    """The target as decoding needs it: a forward over new tokens of one request on top of a cache that can be cut back."""

    def forward_cached(
        self, input_ids: torch.Tensor, cache: Any, aux_layer_ids: Sequence[int], parents: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """input_ids [1, T] -> (logits [T, V] float32, aux [T, K·H], cache).

        With ``parents`` (T entries) the tokens are a tree: token i follows token ``parents[i]``, or the last cached one for −1.
        """

    def crop_cache(self, cache: Any, length: int) -> Any: ...

    def keep_in_cache(self, cache: Any, length: int, places: Sequence[int]) -> Any:
        """Keep the first ``length`` positions and ``places`` of those behind them; needed for trees only."""


@dataclass(frozen=True)
class DecodeSettings:
    """What a stored accept_length must say besides its prompts (conventions §7)."""

    num_draft_tokens: int
    max_new_tokens: int
    temperature: float
    mode: SamplingMode
    stop_token_ids: frozenset[int]
    seed: int = 0
    tree_topk: int = 1
    tree_num_tokens: int | None = None

    @property
    def tree(self) -> TreeShape | None:
        """The tree of each verify step, or None for a chain. Raises :class:`ConfigError` for one that cannot be verified."""
        return tree_shape(self.num_draft_tokens, self.tree_topk, self.tree_num_tokens, self.temperature)


@dataclass
class Decoded:
    """One request's answer (stop token included) and its counts."""

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)  # draft tokens accepted in each verify step, before any cut
    seconds: float = 0.0

    @property
    def verify_steps(self) -> int:
        return len(self.accepted)


def _generator(settings: DecodeSettings, request: int) -> torch.Generator | None:
    if settings.temperature == 0.0:
        return None
    return torch.Generator().manual_seed(settings.seed * 1_000_003 + request)


def _pick(logits: torch.Tensor, settings: DecodeSettings, generator: torch.Generator | None) -> int:
    if generator is None:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits.float() / settings.temperature, dim=-1).cpu(), 1, generator=generator))


def _cut(tokens: list[int], settings: DecodeSettings) -> tuple[list[int], bool]:
    """The answer up to its first stop token or the limit, and whether it is finished."""
    for i, token in enumerate(tokens[: settings.max_new_tokens]):
        if token in settings.stop_token_ids:
            return tokens[: i + 1], True
    return tokens[: settings.max_new_tokens], len(tokens) >= settings.max_new_tokens


@torch.no_grad()
def decode_plain(target: CachedTarget, prompt: Sequence[int], settings: DecodeSettings, device: torch.device, request: int = 0) -> Decoded:
    """Ordinary decoding, one token a target forward."""
    started = time.perf_counter()
    generator = _generator(settings, request)
    logits, _, cache = target.forward_cached(torch.tensor([list(prompt)], device=device), None, ())
    tokens = [_pick(logits[-1], settings, generator)]
    while not _cut(tokens, settings)[1]:
        logits, _, cache = target.forward_cached(torch.tensor([[tokens[-1]]], device=device), cache, ())
        tokens.append(_pick(logits[-1], settings, generator))
    return Decoded(_cut(tokens, settings)[0], seconds=time.perf_counter() - started)


@torch.no_grad()
def decode_speculative(
    target: CachedTarget,
    proposer: Proposer,
    aux_layer_ids: Sequence[int],
    prompt: Sequence[int],
    settings: DecodeSettings,
    device: torch.device,
    request: int = 0,
) -> Decoded:
    """Draft n tokens, verify them in one target forward, keep the accepted ones and the target's own next token; repeat."""
    started = time.perf_counter()
    tree = settings.tree
    generator = _generator(settings, request)
    drafts_sampled = generator if settings.mode == "rejection" else None
    logits, aux, cache = target.forward_cached(torch.tensor([list(prompt)], device=device), None, aux_layer_ids)
    tokens = [_pick(logits[-1], settings, generator)]
    proposer.start()
    proposer.observe(aux, [*prompt[1:], tokens[0]])
    in_cache = len(prompt)
    result = Decoded(tokens)
    while not _cut(tokens, settings)[1]:
        if tree is not None:
            fresh, aux, cache = _verify_tree(target, proposer, tree, tokens[-1], cache, in_cache, aux_layer_ids, device)
        else:
            proposal = proposer.propose(settings.num_draft_tokens, settings.temperature, drafts_sampled)
            verify = torch.tensor([[tokens[-1], *proposal.tokens]], device=device)
            logits, aux, cache = target.forward_cached(verify, cache, aux_layer_ids)
            accepted, following = _accept(logits, proposal, settings, generator)
            fresh = [*proposal.tokens[:accepted], following]
            cache = target.crop_cache(cache, in_cache + len(fresh))
        result.accepted.append(len(fresh) - 1)
        tokens.extend(fresh)
        in_cache += len(fresh)
        proposer.observe(aux[: len(fresh)], fresh)
    result.tokens = _cut(tokens, settings)[0]
    result.seconds = time.perf_counter() - started
    return result


def _verify_tree(
    target: CachedTarget,
    proposer: Proposer,
    shape: TreeShape,
    last: int,
    cache: Any,
    in_cache: int,
    aux_layer_ids: Sequence[int],
    device: torch.device,
) -> tuple[list[int], torch.Tensor, Any]:
    """Draft a tree, verify all of it in one forward, keep the accepted path in the cache -> (new tokens, aux of their rows, cache)."""
    tree = proposer.propose_tree(shape)
    verify = torch.tensor([[last, *tree.tokens]], device=device)
    logits, aux, cache = target.forward_cached(verify, cache, aux_layer_ids, parents=[-1, *tree.parents])
    best = logits.argmax(-1).tolist()
    path = accept_greedy_tree(best, tree)
    cache = target.keep_in_cache(cache, in_cache, [in_cache + node for node in path])
    return [*(tree.tokens[node - 1] for node in path[1:]), best[path[-1]]], aux[path], cache


def _accept(logits: torch.Tensor, proposal: Proposal, settings: DecodeSettings, generator: torch.Generator | None) -> tuple[int, int]:
    if generator is None:
        return accept_greedy(logits, proposal)
    logits = logits.cpu()
    if settings.mode == "target_only":
        return accept_target_only(logits, proposal, settings.temperature, generator)
    return accept_rejection(logits, proposal, settings.temperature, generator)


def stop_tokens(generation_config: dict[str, Any], eos_token_ids: Collection[int]) -> frozenset[int]:
    """Stop ids of a target: generation_config.json's where it states them, else config.json's."""
    eos = generation_config.get("eos_token_id")
    listed = eos if isinstance(eos, list) else ([] if eos is None else [eos])
    return frozenset(listed or eos_token_ids)
