"""Where the mask token comes from: the tokenizer's own, a free id, else an error that proposes one."""

from __future__ import annotations

import json

import pytest

from specforge.errors import ConfigError
from specforge.modeling.mask_token import mask_token_id


def tokenizer(folder, size=8, mask=None, special=()):
    vocabulary = {f"t{i}": i for i in range(size)}
    added = [{"id": number, "content": name, "special": True} for name, number in special]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({} if mask is None else {"mask_token": mask}))
    return folder


@pytest.mark.parametrize("mask", ["[MASK]", {"content": "[MASK]"}])
def test_the_tokenizers_own_mask_token_comes_first(tmp_path, mask):
    assert mask_token_id(tokenizer(tmp_path, mask=mask, special=[("[MASK]", 9)]), 16) == 9


def test_else_the_lowest_id_that_no_token_has(tmp_path):
    folder = tokenizer(tmp_path, special=[("<s>", 8), ("</s>", 10)])
    assert mask_token_id(folder, 16) == 9
    assert mask_token_id(tokenizer(tmp_path, mask="<mask>", special=[("<mask>", 20)]), 16) == 8, "an id without an embedding is no mask"


def test_else_an_error_that_proposes_a_reserved_token(tmp_path):
    folder = tokenizer(tmp_path, special=[("<|end|>", 8), ("<|reserved_5|>", 9)])
    with pytest.raises(ConfigError, match=r"strategy.mask_token_id: null .*<\|reserved_5\|>: strategy.mask_token_id=9"):
        mask_token_id(folder, 10)
    with pytest.raises(ConfigError, match=r"Its special tokens: <\|end\|> = 8"):
        mask_token_id(tokenizer(tmp_path, special=[("<|end|>", 8)]), 9)


def test_composition_fills_mask_and_layers(tiny_target_folder, run_cli, tmp_path):
    """The tiny target has 300 ids and 300 tokens, so the mask must be given; the layers follow the draft's depth."""
    base = ["--cfg", "job", "-p", "strategy", "target=hf", f"target.path={tiny_target_folder}", "strategy=dflash"]
    refused = run_cli("plan", *base[4:], "data=jsonl", "data.train_path=x.jsonl", cwd=tmp_path)
    assert refused.code == 2 and "strategy.mask_token_id: null" in refused.err and "<|im_start|> = 0" in refused.err
    from specforge.config.compose import compose_overrides
    from specforge.config.derive import derive

    composed = compose_overrides("train", [*base[4:], "strategy.mask_token_id=299", "draft.num_layers=2"])
    strategy = derive(composed.config, lambda _: None).config["strategy"]
    assert strategy["mask_token_id"] == 299 and strategy["aux_hidden_state_layer_ids"] == [1, 3]
