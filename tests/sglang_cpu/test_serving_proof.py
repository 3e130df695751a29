"""A draft that knows its prompts by heart, served by the real SGLang on a CPU: lossless, and as many drafts accepted as we count."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specforge.evaluation.decode import Decoded
from specforge.export.agreement import Compared, judge
from specforge.export.verify_server import REPORT
from specforge.inference.sglang_generate import Answer, Sampling, generate_all
from specforge.inference.sglang_process import SGLangProcess

N = 3  # drafted tokens a step: a chain of 4 with the root
CHAIN = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": N, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": N + 1}
TREE = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": N, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
MAX_NEW_TOKENS = 32
pytestmark = pytest.mark.slow


def hydra(value: dict[str, Any]) -> str:
    """A mapping as an override's value."""
    return "{" + ", ".join(f"{k}: {json.dumps(v)}" for k, v in value.items()) + "}"


@pytest.fixture(scope="module")
def verified(proof, run_cli, cpu_arguments, cpu_environment) -> dict[str, Any]:
    """``export verify=server`` through the command line; its report."""
    known_here = {k: v for k, v in cpu_arguments.items() if k not in ("device", "dtype")}  # the command sets these itself
    outcome = run_cli("export", f"run={proof.run_dir}", "verify=server", f"verify_max_new_tokens={MAX_NEW_TOKENS}", "dtype=float32",
                      f"server.arguments={hydra(known_here)}", f"server.environment={hydra(cpu_environment)}", cwd=proof.folder)
    assert outcome.code == 0, outcome.out + outcome.err
    assert "verified in SGLang, float32: 32 greedy requests, 32 with the same output as without the draft" in outcome.out
    return json.loads((proof.draft / REPORT).read_text())


def test_export_verify_server_proves_the_draft(verified) -> None:
    assert verified["passed"] and not verified["problems"] and not verified["warnings"]
    assert verified["lossless_requests"] == verified["num_requests"] == 32
    assert verified["requests_with_equal_counts"] + len(verified["ties"]) >= 32
    assert verified["histogram_server"] == verified["histogram_ours"] or verified["ties"]
    assert verified["accept_length_server"] > 3.0, "the draft knows its prompts by heart; the most is 4"


@pytest.fixture(scope="module")
def ours(proof, verified) -> list[tuple[list[int], Decoded]]:
    """Prompt ids and our own decoding of the 32 prompts, made again in this process."""
    return decode_here(proof)


def decode_here(proof) -> list[tuple[list[int], Decoded]]:
    import torch

    from specforge.commands.train import load_data
    from specforge.config.freeze import read_config
    from specforge.distributed.groups import SingleGroup
    from specforge.evaluation.decode import DecodeSettings, decode_speculative
    from specforge.export import verify_server
    from specforge.training.assembly import Parts

    config = read_config(proof.run_dir)
    parts = Parts.from_config(config)
    prompts = verify_server.choose_prompts(parts, list(load_data(config, parts, SingleGroup())), 32, MAX_NEW_TOKENS)
    device = torch.device("cpu")
    with verify_server._engine(config, "float32", device) as engine:
        settings = DecodeSettings(N, MAX_NEW_TOKENS, 0.0, "target_only", frozenset(engine.stop_token_ids))
        draft = verify_server._exported_draft(parts, proof.draft, torch.float32, device)
        proposer = parts.strategy.proposer(draft)
        return [(p, decode_speculative(engine, proposer, parts.strategy.aux_layer_ids(parts.facts), p, settings, device)) for p in prompts]


def ask(server: SGLangProcess, ours: list[tuple[list[int], Decoded]]) -> list[Answer]:
    return generate_all(server.url, [prompt for prompt, _ in ours], Sampling(MAX_NEW_TOKENS), concurrency=8, timeout=300)


def no_tie(*_: Any) -> float:
    return float("inf")


def test_tree_drafting_is_lossless_and_accepts_no_less(proof, ours, verified, serve: Callable[..., SGLangProcess]) -> None:
    answers = ask(serve(proof.target, speculative_draft_model_path=proof.draft, **TREE), ours)
    assert [a.tokens for a in answers] == [decoded.tokens for _, decoded in ours]
    accept_length = 1 + sum(a.accepted for a in answers) / sum(a.verify_steps for a in answers)
    assert accept_length >= verified["accept_length_server"] - 0.02


def test_a_draft_without_its_head_is_lossless_and_still_found_out(proof, ours, serve: Callable[..., SGLangProcess], tmp_path: Path) -> None:
    """SGLang says nothing about a missing tensor; the comparison of counts does."""
    damaged = tmp_path / "draft"
    shutil.copytree(proof.draft, damaged)
    weights = load_file(damaged / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    answers = ask(serve(proof.target, speculative_draft_model_path=damaged, **CHAIN), ours)
    assert [a.tokens for a in answers] == [decoded.tokens for _, decoded in ours], "lossless all the same"
    verdict = judge([Compared(decoded, a, a, 1.0) for a, (_, decoded) in zip(answers, ours, strict=True)], N, "float32", no_tie)
    assert len(verdict.problems) > 25 and "verify steps in the server with accepted drafts" in verdict.problems[0]
