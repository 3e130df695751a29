"""Run folders made by hand, with known numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from specforge.config import freeze

CONFIG = {"name": "r", "seed": 0, "output_dir": "outputs", "cache_dir": "c", "optimizer": {"_target_": "x.AdamW", "lr": 1e-3},
          "data": {"eval_path": "held.jsonl"}, "launcher": {"processes": None}, "tracker": {}}  # fmt: skip


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``make_run(name, walks, lr=..., accept=...)``: a run with one evaluation a value of ``walks``, ten steps apart."""
    monkeypatch.setattr(freeze, "environment", lambda device: {"host": "h1", "python": "3.11", "packages": {"torch": "2.13"}, "cpu_count": 2,
                        "accelerators": ["H200", "H200"], "git": {"commit": "a" * 40, "dirty": True}, "device": "cuda"})  # fmt: skip

    def make(
        name: str = "r",
        walks: Sequence[float | None] = (1.1, 1.2, 1.3),
        *,
        folder: str | None = None,
        accept: float | None = None,
        finished: bool = True,
        extra: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Path:
        run_dir = tmp_path / (folder or name)
        run_dir.mkdir()
        config = {**CONFIG, "name": name, "optimizer": {**CONFIG["optimizer"], "lr": changes.pop("lr", 1e-3)}, **changes}
        freeze.freeze(
            run_dir, config, command="train", choices={"strategy": "eagle3"}, overrides=[f"name={name}", "data.train_path=a b.jsonl"]
        )
        freeze.write_plan(run_dir, {"roles": [{"role": "trainer", "processes": 2, "device": "cuda"}]})
        rows = []
        for k, walk in enumerate(walks, 1):
            for step in (10 * k - 5, 10 * k):
                rows.append({"step": step, "kind": "train", "loss": 20.0 / step, "lr": 1e-3, "gradient_norm": 2.0, "tokens_per_second": 1000.0 + step,
                             "steps_per_second": 2.0, "seconds": 0.5 * step, **(extra or {})})  # fmt: skip
            if walk is not None:
                rows.append({"step": 10 * k, "kind": "eval", "walk_accept_length": walk, "simulated_acc_len": walk - 1,
                             "per_position_accuracy": [walk / 4, walk / 5], "num_draft_tokens": 2})  # fmt: skip
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if accept is not None:
            write_evaluation(run_dir, accept, 10 * len(walks))
        if finished:
            (run_dir / "_SUCCESS").write_text("{}")
        return run_dir

    return make


def write_evaluation(run_dir: Path, accept: float, step: int, name: str = "20260101-000000", **changes: Any) -> None:
    """An ``evaluate/<name>.json`` with an untrained and a trained draft."""

    def draft(value: float, histogram: list[int]) -> dict[str, Any]:
        return {"decoding": {"accept_length": value, "accept_length_interval_95": [value - 0.1, value + 0.1], "acceptance_histogram": histogram,
                "num_verify_steps": sum(histogram), "num_draft_tokens": 2, "mode": "greedy", "temperature": 0.0, "max_new_tokens": 64, **changes},
                "held_out_features": {}}  # fmt: skip

    drafts = {"untrained": draft(1.02, [98, 2, 0]), f"trained (step_{step:07d})": draft(accept, [50, 30, 20])}
    folder = run_dir / "evaluate"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"prompts": "held.jsonl", "template": "t1", "drafts": drafts}))


@pytest.fixture
def evaluate() -> Callable[..., None]:
    return write_evaluation
