"""The block strategies through the command line: a mask token that must be given, training, the walk, decoding without a difference."""

from __future__ import annotations

import json

import pytest
import yaml

# The tiny target's 300 ids are all tokens; 299 is rare in its conversations.
COMMON = ["strategy.mask_token_id=299", "strategy.num_anchors=8", "trainer.epochs=2", "trainer.global_batch_size=4"]


def overrides(tiny_work, name, *more):
    base = [a for a in tiny_work.base if not a.startswith("strategy.")]
    return [*base, f"strategy={name}", f"strategy.block_size={3 if name == 'dspark' else 4}", *more]


@pytest.mark.parametrize("name", ["dflash", "dpace", "domino", "dspark"])
def test_train_and_evaluate(tiny_work, run_cli, name):
    trained = run_cli(*overrides(tiny_work, name, *COMMON, "draft.num_layers=2"), cwd=tiny_work.folder)
    assert trained.code == 0, trained.err
    run_dir = tiny_work.folder / trained.run_dir
    strategy = yaml.safe_load((run_dir / "config.yaml").read_text())["strategy"]
    assert strategy["aux_hidden_state_layer_ids"] == [1, 3] and strategy["mask_token_id"] == 299
    evaluated = run_cli("evaluate", f"run={run_dir}", cwd=tiny_work.folder)
    assert evaluated.code == 0, evaluated.err
    (report,) = (run_dir / "evaluate").glob("*.json")
    for draft in json.loads(report.read_text())["drafts"].values():
        assert draft["decoding"]["num_draft_tokens"] == 3 and len(draft["held_out_features"]["per_position_accuracy"]) == 3
        assert draft["decoding"]["compared_requests"] in (0, draft["decoding"]["lossless_requests"])


def test_mistakes_name_the_override(tiny_work, refused):
    refused(*overrides(tiny_work, "dflash"), says=["strategy.mask_token_id: null", "<|im_start|> = 0"])
    refused(*overrides(tiny_work, "dflash", "strategy.mask_token_id=300"), says=["strategy.mask_token_id: 300", "0 to 299"])
    refused(
        *overrides(tiny_work, "dflash", "strategy.mask_token_id=299", "evaluator.num_draft_tokens=4"),
        says=["evaluator.num_draft_tokens=3", "strategy.block_size=5"],
    )
    refused(*overrides(tiny_work, "dflash", "strategy.mask_token_id=299", "draft.num_layers=4"), says=["aux_hidden_state_layer_ids: null"])
