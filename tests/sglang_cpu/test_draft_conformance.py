"""Two recurrent steps of SGLang's own draft model against the training unroll, on the features that SGLang read; no decoding of ours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specforge.config.freeze import read_config
from specforge.export.published import read_published
from specforge.inference.sglang_generate import Sampling, generate
from specforge.inference.sglang_process import SGLangProcess
from specforge.modeling.target import load_embedding
from specforge.runtime.contracts import TrainBatch
from specforge.training.assembly import Parts
from specforge.training.strategies.eagle3_rows import align

RECORDER = Path(__file__).resolve().parent / "recorder" / "draft_recorder.py"
STEPS = 3  # the first step and two recurrent ones
pytestmark = pytest.mark.slow


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """The recorder as SGLang finds it: a module beside the metadata that names its entry point."""
    shutil.copy(RECORDER, tmp_path)
    metadata = tmp_path / "draft_recorder-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: draft-recorder\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\ndraft_recorder = draft_recorder:register\n")
    (tmp_path / "records").mkdir()
    return {"PYTHONPATH": str(tmp_path), "DRAFT_RECORD_FOLDER": str(tmp_path / "records")}


def trainer_logits(parts: Parts, draft_folder: Path, ids: list[int], features: torch.Tensor) -> list[torch.Tensor]:
    """Logits [Vd] of the row at the prompt's last token, step by step, from the module that training runs."""
    published = read_published(draft_folder)
    draft: Any = parts.strategy.build_model(parts.architecture, parts.facts, published.vocabulary(parts.facts.vocab_size),
                                            load_embedding(parts.folder, torch.float32))
    published.load_into(draft, parts)
    length, rows = len(ids), features.shape[0]
    mask = torch.zeros(1, length, dtype=torch.bool)
    mask[0, rows : rows + 2] = True  # one row has weight: the one whose inputs end with the prompt
    aux = torch.zeros(1, length, features.shape[1])
    aux[0, :rows] = features
    batch = TrainBatch({"input_ids": torch.tensor([ids]), "loss_mask": mask, "position_ids": torch.arange(length)[None],
                        "document_ids": torch.zeros(1, length, dtype=torch.int64), "aux_hidden_states": aux}, ("0",))
    aligned = align(batch, STEPS, by_document=True)
    with torch.no_grad():
        return [logits[0] for logits in draft(aligned.inputs, lambda k, normed, head: draft.logits(normed))]


def test_trainer_logits_are_those_of_the_served_draft(proof, serve: Callable[..., SGLangProcess], plugin: dict[str, str], run_cli) -> None:
    if not proof.draft.exists():
        assert run_cli("export", f"run={proof.run_dir}", "dtype=float32", cwd=proof.folder).code == 0
    server = serve(proof.target, plugin, speculative_algorithm="EAGLE3", speculative_draft_model_path=proof.draft,
                   speculative_num_steps=STEPS, speculative_eagle_topk=1, speculative_num_draft_tokens=STEPS + 1)
    prompt = [7 * i % 250 + 20 for i in range(37)]
    answer = generate(server.url, prompt, Sampling(4, ignore_eos=True), timeout=120, rid="conformance")
    records = [torch.load(file, weights_only=True) for file in sorted(Path(plugin["DRAFT_RECORD_FOLDER"]).glob("*.pt"))]
    records = [r for r in records if r["rids"] == ["conformance"]][:STEPS]
    assert [r["extend"] for r in records] == [True, False, False], "prefill, then two recurrent steps"
    prefill = records[0]
    assert prefill["input_ids"].tolist() == [*prompt[1:], answer.tokens[0]] and prefill["features"].shape == (37, 3 * 64)
    parts = Parts.from_config(read_config(proof.run_dir))
    drafted = [int(r["input_ids"][0]) for r in records[1:]]
    ids = [*prompt, answer.tokens[0], *drafted, 0]
    expected = trainer_logits(parts, proof.draft, ids, prefill["features"])
    for k, (record, logits) in enumerate(zip(records, expected, strict=True)):
        served = record["logits"][-1].float()
        assert served.shape == logits.shape and served.std() > 0.1
        torch.testing.assert_close(logits, served, rtol=1e-4, atol=1e-4, msg=lambda text, k=k: f"step {k}: {text}")
        if k + 1 < STEPS:
            vocabulary = read_published(proof.draft).vocabulary(parts.facts.vocab_size)
            assert int(vocabulary.target_ids[served.argmax()]) == drafted[k]
    assert os.listdir(plugin["DRAFT_RECORD_FOLDER"])
