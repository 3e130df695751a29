"""Every other pair that SGLang serves: a draft that knows its prompts by heart is lossless there and accepts exactly what our decoding accepts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specforge.config.freeze import read_config
from specforge.evaluation.decode import DecodeSettings
from specforge.export import verify_server
from specforge.export.agreement import Compared, judge
from specforge.inference.sglang_generate import Answer, Sampling, generate_all
from specforge.inference.sglang_process import SGLangProcess
from specforge.training.assembly import Parts

GATE = Path(__file__).resolve().parent / "cpu_gate" / "cpu_gate.py"
NUM_PROMPTS, MAX_NEW_TOKENS = 16, 32
EAGLE = ["strategy.draft_vocab_size=280", "strategy.ttt_length=4", "strategy.aux_hidden_state_layer_ids=[1,2,4]", "evaluator.num_draft_tokens=3"]
BLOCK = ["draft.num_layers=2", "strategy.mask_token_id=299", "strategy.aux_hidden_state_layer_ids=[1,3]", "strategy.num_anchors=null"]
# Yarn, since SGLang's CPU engine has no other rotation for latent attention.
ROPE = ("draft.rope={rope_type: yarn, rope_theta: 10000.0, factor: 4.0, original_max_position_embeddings: 64, beta_fast: 32, beta_slow: 1, "
        "mscale: 1.0, mscale_all_dim: 1.0}")  # fmt: skip
MLA = ["draft.q_lora_rank=32", "draft.kv_lora_rank=32", "draft.qk_nope_head_dim=16", "draft.qk_rope_head_dim=16", "draft.v_head_dim=16", ROPE]
# name: (strategy, draft, overrides, drafted tokens a step, least accept_length of a draft that knows the prompts)
PAIRS = {
    "eagle3_1-llama": ("eagle3_1", "llama", EAGLE, 3, 3.0),
    "eagle3-mla": ("eagle3", "deepseek_mla", [*EAGLE, *MLA], 3, 3.0),
    "eagle3_1-mla": ("eagle3_1", "deepseek_mla", [*EAGLE, *MLA], 3, 3.0),
    "eagle3-llama-two-layers": ("eagle3", "llama", [*EAGLE, "draft.num_layers=2"], 3, 3.0),
    "dflash": ("dflash", "qwen3", [*BLOCK, "strategy.block_size=4", "evaluator.num_draft_tokens=3"], 3, 2.5),
    "dpace": ("dpace", "qwen3", [*BLOCK, "strategy.block_size=4", "evaluator.num_draft_tokens=3"], 3, 2.5),
    "domino": ("domino", "qwen3", [*BLOCK, "strategy.block_size=4", "strategy.gru_hidden_size=32", "strategy.correction_size=32",
                                   "evaluator.num_draft_tokens=3"], 3, 2.5),
    "dspark-rnn": ("dspark", "qwen3", [*BLOCK, "strategy.block_size=3", "strategy.markov_rank=16", "strategy.markov_head_type=rnn",
                                       "evaluator.num_draft_tokens=3"], 3, 2.5),
}  # fmt: skip
# On every machine: one of each loader that the other files leave out. SPECFORGE_ALL_PAIRS=1 runs them all.
FEW = ("eagle3_1-mla", "domino", "dspark-rnn")
pytestmark = pytest.mark.slow


@pytest.fixture
def gate(tmp_path: Path) -> dict[str, str]:
    """The plug-in that opens SGLang's CPU engine, as SGLang finds it: a module beside the metadata that names its entry point."""
    shutil.copy(GATE, tmp_path)
    metadata = tmp_path / "cpu_gate-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-gate\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\ncpu_gate = cpu_gate:register\n")
    return {"PYTHONPATH": str(tmp_path)}


def train(proof, run_cli, name: str) -> Path:
    """A run that learns the proof's conversations by heart, and its export."""
    strategy, draft, overrides, _, _ = PAIRS[name]
    data = [f"data.train_path={proof.folder}/train.jsonl", f"data.eval_path={proof.folder}/train.jsonl", "data.max_length=200"]
    outcome = run_cli("target=hf", f"target.path={proof.target}", "device=cpu", "num_threads=1", "data=jsonl", *data, f"name={name}",
                      f"strategy={strategy}", f"draft={draft}", "draft.init_from=random", *overrides, "optimizer.lr=4e-3",
                      "trainer.epochs=100", "trainer.global_batch_size=8", "trainer.save_every=10000", "trainer.eval_every=10000",
                      "trainer.log_every=100", f"data.max_samples={NUM_PROMPTS}", cwd=proof.folder)  # fmt: skip
    assert outcome.code == 0, outcome.out + outcome.err
    run_dir: Path = proof.folder / outcome.run_dir
    outcome = run_cli("export", f"run={run_dir}", "dtype=float32", cwd=proof.folder)
    assert outcome.code == 0, outcome.out + outcome.err
    return run_dir


@pytest.mark.parametrize("name", PAIRS if os.environ.get("SPECFORGE_ALL_PAIRS") else FEW)
def test_the_served_draft_accepts_what_ours_accepts(name, proof, run_cli, serve: Callable[..., SGLangProcess], gate, cpu_environment) -> None:
    run_dir, num_draft_tokens, least = train(proof, run_cli, name), *PAIRS[name][3:]
    folder, config = run_dir / "export" / "sglang", read_config(run_dir)
    parts = Parts.from_config(config)
    rows = [json.loads(line) for line in (proof.folder / "train.jsonl").read_text().splitlines()][:NUM_PROMPTS]
    device = torch.device("cpu")
    with verify_server._engine(config, "float32", device) as engine:
        settings = DecodeSettings(num_draft_tokens, MAX_NEW_TOKENS, 0.0, "target_only", frozenset(engine.stop_token_ids))
        checked = SimpleNamespace(prompts=prompts_of(rows, parts), settings=settings, dtype="float32")
        ours = verify_server._simulate(engine, parts, folder, checked, device)
    arguments = parts.strategy.serving_arguments(num_draft_tokens)
    server = serve(proof.target, gate, speculative_draft_model_path=folder, speculative_draft_attention_backend="intel_amx", **arguments)
    answers: list[Answer] = generate_all(server.url, checked.prompts, Sampling(MAX_NEW_TOKENS), concurrency=4, timeout=300)
    verdict = judge([Compared(d, a, a, margin) for a, (d, margin) in zip(answers, ours, strict=True)], num_draft_tokens, "float32", no_tie)
    assert not verdict.problems, verdict.problems[:3]
    assert [a.tokens for a in answers] == [decoded.tokens for decoded, _ in ours]
    accept_length = 1 + sum(a.accepted for a in answers) / sum(a.verify_steps for a in answers)
    print(f"{name}: accept_length {accept_length:.3f} in the server, {verdict.facts['accept_length_ours']:.3f} ours")
    assert accept_length >= least


def prompts_of(rows: list[dict[str, Any]], parts: Parts) -> list[list[int]]:
    """The ids before each answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(parts.folder)
    return [tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False) for row in rows]


def no_tie(*_: object) -> float:
    return float("inf")
