"""A tiny byte-level tokenizer and small chat templates of the kinds that real models have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Keeps the thinking of the last reply only, as reasoning models do.
STRIPS_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last and m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The generation prompt supplies an empty think block; history does not show it.
EMPTY_THINK_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
# The generation prompt opens the think block; history drops what was thought.
OPEN_THINK_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# No special token opens a turn, so a reply's first token can reach over the end of its prompt.
PLAIN = (
    "{% for m in messages %}{{ 'USER: ' + m.content + ' ' if m.role == 'user' else 'ASSISTANT: ' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

TEMPLATES = {
    "CHATML": CHATML,
    "MARKED": MARKED,
    "STRIPS_THINKING": STRIPS_THINKING,
    "EMPTY_THINK_PROMPT": EMPTY_THINK_PROMPT,
    "OPEN_THINK_PROMPT": OPEN_THINK_PROMPT,
    "PLAIN": PLAIN,
}

CORPUS = [
    "user assistant system tool USER: ASSISTANT: <think> </think>",
    "The quick brown fox jumps over the lazy dog. How are you today? I am fine, thank you.",
    "one two three four five six seven eight nine ten hello hi yes no maybe",
    "What is the capital of France? Paris is the capital of France.",
] * 3


def make_tokenizer(folder: Path, chat_template: str | None, *, trim_offsets: bool = False) -> Path:
    """A Hugging Face tokenizer folder with a byte-level BPE of about 400 entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if trim_offsets:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>", "</s>", "<|endoftext|>"]
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)


@pytest.fixture(scope="session")
def templated(tokenizer_folder: Path):
    """``templated(name or jinja, **arguments)`` gives a ChatTemplate with the tiny tokenizer; names are those of TEMPLATES."""
    from specforge.data.chat_template import ChatTemplate, load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder)
    return lambda jinja="CHATML", **arguments: ChatTemplate(tokenizer, TEMPLATES.get(jinja, jinja), arguments)


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    return TEMPLATES


@pytest.fixture(scope="session")
def new_tokenizer():
    """``new_tokenizer(folder, jinja, trim_offsets=False)`` writes another tokenizer folder."""
    return make_tokenizer


@pytest.fixture
def write_jsonl(tmp_path: Path):
    """``write_jsonl(rows, name)``: objects are written as JSON, strings as they are."""

    def write(rows, name: str = "chats.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
