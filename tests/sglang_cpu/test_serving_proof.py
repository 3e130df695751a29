"""A draft that knows its prompts by heart, served by the real SGLang on a CPU: lossless, and as many drafts accepted as we count."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specforge.evaluation.decode import Decoded
from specforge.export import verify_server
from specforge.export.agreement import Compared, judge
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


@dataclass(frozen=True)
class Verified:
    """What ``verify=server`` reported, what it asked, and what our own decoding made of it."""

    report: dict[str, Any]
    prompts: list[list[int]]
    ours: list[Decoded]


@pytest.fixture(scope="module")
def verified(proof, run_cli, serve, cpu_arguments, cpu_environment) -> Verified:
    """``export verify=server`` through the command line."""
    serve.stop()  # the command starts its own
    known_here = {k: v for k, v in cpu_arguments.items() if k not in ("device", "dtype")}  # the command sets these itself
    kept: dict[str, Any] = {}
    simulate = verify_server._simulate

    def remember(engine: Any, parts: Any, folder: Path, checked: Any, device: Any) -> Any:
        kept["prompts"], kept["ours"] = checked.prompts, simulate(engine, parts, folder, checked, device)
        return kept["ours"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_server, "_simulate", remember)
        outcome = run_cli("export", f"run={proof.run_dir}", "verify=server", f"verify_max_new_tokens={MAX_NEW_TOKENS}", "dtype=float32",
                          f"server.arguments={hydra(known_here)}", f"server.environment={hydra(cpu_environment)}", cwd=proof.folder)
    assert outcome.code == 0, outcome.out + outcome.err
    assert "verified in SGLang, float32: 32 greedy requests, 32 with the same output as without the draft" in outcome.out
    return Verified(json.loads((proof.draft / verify_server.REPORT).read_text()), kept["prompts"], [decoded for decoded, _ in kept["ours"]])


def test_export_verify_server_proves_the_draft(verified) -> None:
    report = verified.report
    assert report["passed"] and not report["problems"] and not report["warnings"]
    assert report["lossless_requests"] == report["num_requests"] == 32
    assert report["requests_with_equal_counts"] + len(report["ties"]) >= 32
    assert report["histogram_server"] == report["histogram_ours"] or report["ties"]
    assert report["accept_length_server"] > 3.0, "the draft knows its prompts by heart; the most is 4"


def ask(server: SGLangProcess, verified: Verified) -> list[Answer]:
    return generate_all(server.url, verified.prompts, Sampling(MAX_NEW_TOKENS), concurrency=8, timeout=300)


def no_tie(*_: Any) -> float:
    return float("inf")


def test_tree_drafting_is_lossless_and_accepts_no_less(proof, verified, serve: Callable[..., SGLangProcess]) -> None:
    answers = ask(serve(proof.target, speculative_draft_model_path=proof.draft, **TREE), verified)
    assert [a.tokens for a in answers] == [decoded.tokens for decoded in verified.ours]
    accept_length = 1 + sum(a.accepted for a in answers) / sum(a.verify_steps for a in answers)
    assert accept_length >= verified.report["accept_length_server"] - 0.02


def test_a_draft_without_its_head_is_lossless_and_still_found_out(proof, verified, serve: Callable[..., SGLangProcess], tmp_path: Path) -> None:
    """SGLang says nothing about a missing tensor; the comparison of counts does."""
    damaged = tmp_path / "draft"
    shutil.copytree(proof.draft, damaged)
    weights = load_file(damaged / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    answers = ask(serve(proof.target, speculative_draft_model_path=damaged, **CHAIN), verified)
    assert [a.tokens for a in answers] == [decoded.tokens for decoded in verified.ours], "lossless all the same"
    verdict = judge([Compared(decoded, a, a, 1.0) for a, decoded in zip(answers, verified.ours, strict=True)], N, "float32", no_tie)
    assert len(verdict.problems) > 25 and "verify steps in the server with accepted drafts" in verdict.problems[0]
