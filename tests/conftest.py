"""Fixtures that several packages' tests share: a tiny EAGLE-3 draft, a tiny head and batches of made-up documents."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specforge.modeling.draft.llama import LlamaDraft
from specforge.modeling.target import TargetHead
from specforge.modeling.target_facts import TargetFacts
from specforge.modeling.wiring.eagle3 import Eagle3Draft
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.eagle3 import Eagle3

# A library that is imported while pytest captures keeps that test's stream for its log; a later message to it is no error of ours.
logging.raiseExceptions = False

TINY_TARGET = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@pytest.fixture
def tiny_target_facts() -> TargetFacts:
    return TargetFacts.from_config(dict(TINY_TARGET), "tiny")


@pytest.fixture
def make_strategy() -> Callable[..., Eagle3]:
    def make(**changes: Any) -> Eagle3:
        arguments: dict[str, Any] = {
            "ttt_length": 3,
            "step_decay": 0.8,
            "draft_vocab_size": None,
            "aux_hidden_state_layer_ids": [1, 2, 4],
            "fc_norm": False,
            "norm_before_fc": False,
            "norm_output": False,
            "norm_before_residual": False,
            "loss": "soft_cross_entropy",
            "kl_scale": 1.0,
            "kl_decay": 3.0,
        }
        return Eagle3(**{**arguments, **changes})

    return make


@pytest.fixture
def tiny_architecture() -> LlamaDraft:
    return LlamaDraft(
        num_layers=1,
        hidden_size=16,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        init_from="random",
    )


@pytest.fixture
def make_draft(tiny_architecture: LlamaDraft) -> Callable[..., Eagle3Draft]:
    def make(strategy: Eagle3, kept: Sequence[int] | None = None, seed: int = 0) -> Eagle3Draft:
        torch.manual_seed(seed)
        ids = torch.arange(40) if kept is None else torch.tensor(sorted(kept))
        t2d = torch.zeros(40, dtype=torch.bool)
        t2d[ids] = True
        draft = Eagle3Draft(
            tiny_architecture,
            target_hidden_size=16,
            num_aux=3,
            embedding=torch.randn(40, 16),
            d2t=ids - torch.arange(len(ids)),
            t2d=t2d,
            flags=strategy.flags,
        )
        for parameter in draft.parameters():  # norms away from one, so that a missing norm shows
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        return draft

    return make


@pytest.fixture
def tiny_head() -> TargetHead:
    torch.manual_seed(7)
    return TargetHead(torch.randn(40, 16))


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    def make(masks: Sequence[Sequence[Sequence[int]]], width: int, seed: int = 0) -> TrainBatch:
        """``masks[b]`` lists the loss masks of the documents packed in row b; the rest of ``width`` is padding."""
        generator = torch.Generator().manual_seed(seed)
        shape = (len(masks), width)
        loss_mask, positions = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.int64)
        documents = torch.full(shape, -1)
        number = 0
        for b, row in enumerate(masks):
            start = 0
            for mask in row:
                end = start + len(mask)
                loss_mask[b, start:end] = torch.tensor(mask, dtype=torch.bool)
                positions[b, start:end] = torch.arange(len(mask))
                documents[b, start:end] = number
                number, start = number + 1, end
        return TrainBatch(
            {
                "input_ids": torch.randint(0, 40, shape, generator=generator),
                "loss_mask": loss_mask,
                "position_ids": positions,
                "document_ids": documents,
                "aux_hidden_states": torch.randn(*shape, 48, generator=generator),
                "final_hidden_states": torch.randn(*shape, 16, generator=generator),
            },
            tuple(str(i) for i in range(number)),
        )

    return make


# -- a tiny real target and the real command line, for the end-to-end tests -----------------------------------------------------

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = ["user assistant system", "the sun rises in the east and sets in the west", "how many rivers cross the old town of the north"] * 4


@dataclass(frozen=True)
class Outcome:
    """What one command left: exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def run_dir(self) -> Path:
        """The run folder that the command announced, absolute."""
        start = "specforge: run folder "
        return Path(next(line.removeprefix(start) for line in self.err.splitlines() if line.startswith(start)))


@pytest.fixture(scope="session")
def make_tiny_target() -> Callable[..., Path]:
    """``make_tiny_target(folder, seed=0, **sizes)`` saves a random Llama target of 6 layers with a byte-level tokenizer of 300 ids."""

    def make(folder: Path, seed: int = 0, **sizes: Any) -> Path:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|im_start|>", "<|im_end|>"]
        backend.train_from_iterator(
            _CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
        tokenizer.chat_template = _CHATML
        tokenizer.save_pretrained(folder)
        settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
                    "vocab_size": 300, "max_position_embeddings": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                    "initializer_range": 0.4, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, **sizes}  # fmt: skip
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.lm_head.weight.data *= 3  # a choice far from the next one, so that what is learnt by heart is not undone by a tie
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_target_folder(tmp_path_factory: pytest.TempPathFactory, make_tiny_target: Callable[..., Path]) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture(scope="session")
def run_cli() -> Callable[..., Outcome]:
    """``run_cli(*arguments, cwd=folder)`` runs the command line in this process, with its cache in ``cwd``."""
    from specforge import cli

    def call(*arguments: str, cwd: Path) -> Outcome:
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setenv("SPECFORGE_CACHE", str(cwd / "cache"))
            patch.chdir(cwd)
            outcome = cli.main(list(arguments))
        return Outcome(outcome, out.getvalue(), err.getvalue())

    return call


@pytest.fixture(scope="session")
def start_cli(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """The same in a process of its own; ``before`` is Python that runs in it first, to stop it or slow it down at an exact place."""
    import specforge as package

    source = str(Path(package.__file__).resolve().parents[1])

    def call(*arguments: str, cwd: Path, before: str = "", wait: bool = True) -> Any:
        program = ["-m", "specforge"]
        if before:
            script = tmp_path_factory.mktemp("program") / "program.py"
            after = "from specforge.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
            script.write_text(f"import os, signal, sys\n{before}\n{after}")
            program = [str(script)]
        env = {**os.environ, "PYTHONPATH": source, "SPECFORGE_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, *program, *arguments], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        if not wait:
            return process
        out, err = process.communicate(timeout=120)
        return Outcome(process.returncode, out, err)

    return call


@pytest.fixture(scope="session")
def tiny_work(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path, run_cli: Callable[..., Outcome]) -> TinyWork:
    """A folder with conversations whose answers come from the tiny target through ``regenerate``, and the overrides of a short run."""
    folder = tmp_path_factory.mktemp("tiny-work")
    words = ["sun", "moon", "river", "stone", "bridge", "garden", "window", "paper", "winter", "market", "letter", "island"]
    for name, count in (("train", 12), ("heldout", 4)):
        prompts = [f"the {words[i]} and the {words[(5 * i + 3 + count) % 12]} of {i + count}" for i in range(count)]
        rows: list[dict[str, Any]] = [{"id": f"{name}-{i}", "prompt": prompt} for i, prompt in enumerate(prompts)]
        rows[1] = {"id": f"{name}-1", "messages": [{"role": "system", "content": "sing"}, {"role": "user", "content": "how many"},
                                                   {"role": "user", "content": "and the rivers of the town"}]}  # fmt: skip
        (folder / f"{name}-prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = run_cli(
            "regenerate",
            "target=hf",
            f"target.path={tiny_target_folder}",
            f"input={name}-prompts.jsonl",
            f"output={name}.jsonl",
            "max_new_tokens=25",
            "batch_size=5",
            "device=cpu",
            "num_threads=1",
            cwd=folder,
        )
        assert done.code == 0, done.err
    return TinyWork(folder, tiny_target_folder)


@dataclass(frozen=True)
class TinyWork:
    """``folder`` holds train.jsonl (12 conversations) and heldout.jsonl (4)."""

    folder: Path
    target: Path

    @property
    def base(self) -> list[str]:
        """Target, data and device: what every command needs."""
        return ["target=hf", f"target.path={self.target}", "data=jsonl", f"data.train_path={self.folder / 'train.jsonl'}",
                f"data.eval_path={self.folder / 'heldout.jsonl'}", "data.max_length=128", "device=cpu", "num_threads=1", "name=t",
                "strategy.ttt_length=3", "strategy.draft_vocab_size=100", "evaluator.max_new_tokens=24", "optimizer.lr=3e-3"]  # fmt: skip

    @property
    def short(self) -> list[str]:
        """``base`` and a training run of 3 epochs of 3 steps."""
        return [*self.base, "trainer.epochs=3", "trainer.global_batch_size=4"]


@pytest.fixture
def refused(run_cli, tmp_path: Path) -> Callable[..., str]:
    """``refused(*arguments, says=[...], code=2)`` runs a command that must fail in the words of its one message, and gives the message."""

    def call(*arguments: str, says: list[str], code: int = 2, leaves: bool = False) -> str:
        outcome = run_cli(*arguments, cwd=tmp_path)
        shown = outcome.out + outcome.err
        assert outcome.code == code, shown
        assert "Traceback" not in shown
        steps = ("specforge: run folder", "specforge: warning")
        messages = [line for line in outcome.err.splitlines() if line.startswith("specforge: ") and not line.startswith(steps)]
        assert len(messages) == 1, shown
        for words in says:
            assert words in outcome.err, f"{words!r} is not in:\n{outcome.err}"
        if not leaves:
            left = list((tmp_path / "outputs").rglob("config.yaml"))
            assert left == [], f"a run folder is left: {left}"
        return outcome.err

    return call
