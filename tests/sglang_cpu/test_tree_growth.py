"""Our draft trees against SGLang's own selection functions, called directly on made-up probabilities; no server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from specforge.evaluation.draft_tree import TreeShape, grow

SHAPES = [TreeShape(3, 2, 5), TreeShape(5, 4, 15), TreeShape(4, 8, 60), TreeShape(2, 3, 7), TreeShape(1, 4, 3)]
VOCABULARY = 50

# Runs where the stand-in kernels are, since importing SGLang's module imports them. Input: the shapes; output: one tree a shape.
SERVER_SIDE = """
import json, sys
import torch
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.speculative.spec_utils import select_top_k_tokens
sys.path.insert(0, sys.argv[1])
from test_tree_growth import logits_of

def tree(depth, topk, num_tokens):
    hidden = torch.zeros(1, 1)                      # the "state" is the number of the path that led there
    top = torch.softmax(logits_of(hidden), -1).topk(topk, -1)
    scores, found = None, ([], [], [])
    probabilities, ids = top.values, top.indices
    for step in range(depth):
        tokens, hidden, scores, info = select_top_k_tokens(step, probabilities, ids, hidden, scores, topk)
        for kept, part in zip(found, info):
            kept.append(part)
        if step == depth - 1:
            break
        hidden = hidden * 53 + tokens.unsqueeze(-1) + 1
        top = torch.softmax(logits_of(hidden), -1).topk(topk, -1)
        probabilities, ids = top.values, top.indices
    parents, chosen, tokens = organize_draft_results(*found, num_tokens + 1)
    chosen, parents = chosen[0].tolist(), parents[0].tolist()
    node = {c: i + 1 for i, c in enumerate(chosen)}
    return tokens[0].tolist(), [node[parents[c // topk]] if c // topk else 0 for c in chosen]

print(json.dumps([tree(*shape) for shape in json.loads(sys.argv[2])]))
"""


def logits_of(state: torch.Tensor) -> torch.Tensor:
    """state [rows, 1] -> logits [rows, V], another for each state."""
    rows = [torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(int(s) % 2**40)) * 2 for s in state.flatten().double()]
    return torch.stack(rows)


class Numbered:
    """The same draft for :func:`grow`; the state of a branch is a number, as in the script."""

    def __init__(self) -> None:
        self.state = torch.zeros(1, 1)

    def root(self) -> torch.Tensor:
        return logits_of(self.state)

    def extend(self, tokens: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        self.state = self.state[sources] * 53 + tokens.unsqueeze(-1) + 1
        return logits_of(self.state)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids


def test_trees_are_those_of_the_servers_own_functions(cpu_environment: dict[str, str]) -> None:
    shapes = json.dumps([(s.depth, s.topk, s.num_tokens) for s in SHAPES])
    folder = str(Path(__file__).resolve().parent)
    done = subprocess.run(
        [sys.executable, "-c", SERVER_SIDE, folder, shapes],
        env={**os.environ, **cpu_environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    for shape, (tokens, parents) in zip(SHAPES, theirs, strict=True):
        ours = grow(Numbered(), shape)
        assert (ours.tokens, ours.parents) == (tokens, parents), shape
