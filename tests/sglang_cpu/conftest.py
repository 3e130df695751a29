"""A real SGLang server on this machine's CPU, one at a time; without SGLang every test of this folder is skipped with the reason.

``make test-sglang`` installs SGLang beside these tests. Its CPU kernels are replaced by plain torch (``stand_in/sgl_kernel``), since the
package's own need AMX.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import specforge
from specforge.inference import sglang_process
from specforge.inference.sglang_process import SGLangProcess

HERE = Path(__file__).resolve().parent
STAND_IN = HERE / "stand_in"
NUM_PROMPTS = 36  # a few more than 32, since an answer may be empty
NEW_TOKENS = 32

# Both attention flags, because the one flag for both is quietly changed back on a CPU without AMX.
CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "prefill_attention_backend": "intel_amx",
    "decode_attention_backend": "intel_amx",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 8192,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is None:
        skip = pytest.mark.skip(reason="SGLang is not installed here; make test-sglang runs these tests")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def cpu_arguments() -> dict[str, Any]:
    """Flags with which SGLang serves on a CPU."""
    return dict(CPU_ARGUMENTS)


@pytest.fixture(scope="session")
def cpu_environment() -> dict[str, str]:
    """Environment in which SGLang, in a process of its own, finds the stand-in kernels and this package."""
    source = Path(specforge.__file__).resolve().parents[1]
    path = [str(STAND_IN), str(source), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # One thread: the models here are so small that threads only wait for each other.
    return {"PYTHONPATH": os.pathsep.join(path), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session", autouse=True)
def quick_end() -> Iterator[None]:
    """A server of a test has nothing to finish when it is stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_process, "_GRACE_SECONDS", 0.5)
        yield


class OneServer:
    """``serve(model_path, environment={}, **arguments)`` gives a running server.

    The same call again gives the same server; another call ends it and starts another, so that one runs at a time.
    """

    def __init__(self, arguments: dict[str, Any], environment: dict[str, str], make_folder: Callable[[str], Path]) -> None:
        self._arguments, self._environment, self._make_folder = arguments, environment, make_folder
        self._key = ""
        self._server: SGLangProcess | None = None

    def __call__(self, model_path: Path, environment: dict[str, str] | None = None, **arguments: Any) -> SGLangProcess:
        key = repr((str(model_path), environment, arguments))
        if self._server is None or key != self._key:
            self.stop()
            merged = {**self._environment, **(environment or {})}
            if "PYTHONPATH" in (environment or {}):
                merged["PYTHONPATH"] = os.pathsep.join((merged["PYTHONPATH"], self._environment["PYTHONPATH"]))
            self._server = SGLangProcess(model_path=str(model_path), port=None, arguments={**self._arguments, **arguments}, environment=merged,
                                         log_path=self._make_folder("server") / "server.log", start_timeout_seconds=240)
            self._server.start()
            self._server.wait_ready()
            self._key = key
        self._server.check_alive()
        return self._server

    def stop(self) -> None:
        """End the server; for a test that starts others."""
        if self._server is not None:
            self._server.stop()
            self._server = None


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory, cpu_arguments: dict[str, Any], cpu_environment: dict[str, str]) -> Iterator[OneServer]:
    one = OneServer(cpu_arguments, cpu_environment, tmp_path_factory.mktemp)
    yield one
    one.stop()


@dataclass(frozen=True)
class Proof:
    """A target, a draft that knows its conversations by heart, and the folder of both."""

    folder: Path
    target: Path
    run_dir: Path

    @property
    def draft(self) -> Path:
        """The export in the layout that a server loads; made by the first test that exports."""
        return self.run_dir / "export" / "sglang"


@pytest.fixture(scope="session")
def proof(tmp_path_factory: pytest.TempPathFactory, make_tiny_target: Callable[..., Path], run_cli: Callable[..., Any]) -> Proof:
    """Prompts answered by the target itself, and a draft trained on nothing else until it knows them."""
    folder = tmp_path_factory.mktemp("proof")
    target = make_tiny_target(folder / "target", hidden_size=64, intermediate_size=128, initializer_range=0.2)
    words = ["sun", "moon", "river", "stone", "bridge", "garden", "window", "paper", "winter", "market", "letter", "island"]
    prompts = [{"id": f"p{i}", "prompt": f"the {words[i % 12]} and the {words[(7 * i + i // 12) % 12]} of {i}"} for i in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    common = ["target=hf", f"target.path={target}", "device=cpu", "num_threads=1"]

    def call(*arguments: str) -> Any:
        outcome = run_cli(*arguments, cwd=folder)
        assert outcome.code == 0, outcome.out + outcome.err
        return outcome

    call("regenerate", *common, "input=prompts.jsonl", "output=train.jsonl", f"max_new_tokens={NEW_TOKENS}", "batch_size=16")
    trained = call(*common, "data=jsonl", f"data.train_path={folder}/train.jsonl", f"data.eval_path={folder}/train.jsonl",
                   "data.max_length=200", "name=proof", "strategy.draft_vocab_size=280", "strategy.ttt_length=4",
                   "strategy.aux_hidden_state_layer_ids=[1,2,4]", "optimizer.lr=4e-3", "trainer.epochs=120", "trainer.global_batch_size=8",
                   "trainer.save_every=10000", "trainer.eval_every=240", "trainer.log_every=120")  # fmt: skip
    return Proof(folder, target, folder / trained.run_dir)
