"""The command line as a user meets it: words, flags, exit codes, messages, time; most through a real process."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specforge import cli
from specforge.config import freeze
from specforge.errors import ConfigError, NumericalError, RunError
from specforge.launch import frontend

SOURCE = str(Path(cli.__file__).resolve().parents[1])


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiny_target(tmp_path: Path) -> list[str]:
    """Overrides for a target folder that holds no model."""
    folder = tmp_path / "target"
    folder.mkdir()
    facts = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 12, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 40, "rope_theta": 10000.0}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(facts))
    header = json.dumps({"w": {"dtype": "F32", "shape": [40, 16], "data_offsets": [0, 2560]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2560))
    (folder / "tokenizer.json").write_text("{}")
    return ["target=hf", f"target.path={folder}", "strategy.draft_vocab_size=null", "device=cpu", "name=t"]


@pytest.fixture
def fake_command(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], Path]]:
    """Commands that only note how they were called."""
    calls: list[tuple[str, dict[str, Any], Path]] = []

    def module(command: str) -> Any:
        def run(config: dict[str, Any], run_dir: Path) -> int:
            calls.append((command, config, run_dir))
            return 0

        return types.SimpleNamespace(run=run)

    def role(run_dir: Path) -> int:
        calls.append(("train", freeze.read_config(run_dir), run_dir))
        return 0

    monkeypatch.setattr(frontend, "command_module", module)
    monkeypatch.setattr("specforge.launch.worker.run_role", role)
    return calls


def specforge(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": SOURCE, **(environment or {})}
    command = [sys.executable, "-m", "specforge", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)


@pytest.mark.parametrize(
    ("line", "word", "rest"),
    [
        ([], "train", []),
        (["seed=1"], "train", ["seed=1"]),
        (["-m", "seed=1,2"], "train", ["-m", "seed=1,2"]),
        (["+a=1"], "train", ["+a=1"]),
        (["evaluate", "run=x"], "evaluate", ["run=x"]),
        (["show_sample"], "show-sample", []),
        (["diff", "a", "b"], "diff", ["a", "b"]),
    ],
)
def test_the_command_word_is_taken_off(line: Sequence[str], word: str, rest: list[str]) -> None:
    assert cli.split_command(line) == (word, rest)


def test_a_typo_of_a_command_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian", "seed=1"]) == 2
    printed = capsys.readouterr().err
    assert "trian: no such command. Did you mean 'train'?" in printed and "Traceback" not in printed


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("a: wrong"), 2, "specforge: a: wrong"),
        (ConfigError(["a: wrong", "b: wrong"]), 2, "2 problems"),
        (RunError("died"), 1, "died"),
        (NumericalError("nan"), 3, "nan"),
        (KeyboardInterrupt(), 130, "nothing is lost"),
        (OSError(errno.ENOSPC, "full", "/x"), 1, "disk full (/x)"),
        (SystemExit(0), 0, ""),
    ],
)
def test_every_error_has_its_exit_code(error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise error

    assert cli.guarded(fail) == code
    assert words in capsys.readouterr().err


def test_an_unexpected_error_is_not_hidden() -> None:
    def fail() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.guarded(fail)


def test_train_freezes_a_run_and_hands_it_to_the_worker(tiny_target: list[str], fake_command: list[Any], tmp_path: Path) -> None:
    assert cli.main([*tiny_target, "optimizer.lr=5e-4"]) == 0
    [(_, config, run_dir)] = fake_command
    assert run_dir.parent == tmp_path / "outputs" / "t"
    assert config["optimizer"]["lr"] == 5e-4 and config["draft"]["hidden_size"] == 16 and config["choices"]["target"] == "hf"
    assert {"config.yaml", "overrides.yaml", "env.json", "plan.json"} <= {p.name for p in run_dir.iterdir()}
    assert json.loads((run_dir / "plan.json").read_text())["processes"][0]["role"] == "trainer"


def test_run_continues_in_the_same_folder(tiny_target: list[str], fake_command: list[Any], tmp_path: Path) -> None:
    assert cli.main(tiny_target) == 0
    run_dir = fake_command[0][2]
    assert cli.main(["train", f"run={run_dir}"]) == 0
    assert fake_command[1][2] == run_dir and fake_command[1][1] == fake_command[0][1]
    assert not list(run_dir.glob("config.*.yaml")), "nothing changed, so nothing is kept aside"
    assert cli.main([f"run={run_dir}", "trainer.epochs=9"]) == 0
    assert fake_command[2][1]["trainer"]["epochs"] == 9 and (run_dir / "config.1.yaml").exists()
    with freeze.lock(run_dir):
        assert cli.main([f"run={run_dir}"]) == 1
    assert len(list((tmp_path / "outputs" / "t").iterdir())) == 1


def test_evaluate_works_on_a_run_without_touching_it(tiny_target: list[str], fake_command: list[Any]) -> None:
    assert cli.main([*tiny_target, "seed=5"]) == 0
    run_dir = fake_command[0][2]
    before = (run_dir / "config.yaml").read_bytes()
    assert cli.main(["evaluate", f"run={run_dir}", "evaluator.max_new_tokens=3"]) == 0
    command, config, place = fake_command[1]
    assert (command, place) == ("evaluate", run_dir)
    assert config["seed"] == 5 and config["evaluator"]["max_new_tokens"] == 3 and config["checkpoint"] == "best"
    assert (run_dir / "config.yaml").read_bytes() == before
    assert len(list((run_dir / "evaluate").glob("config-*.yaml"))) == 1


def test_show_sample_leaves_no_run_folder(tiny_target: list[str], fake_command: list[Any], tmp_path: Path) -> None:
    assert cli.main(["show-sample", *tiny_target, "index=2"]) == 0
    assert fake_command[0][1]["index"] == 2 and not (tmp_path / "outputs").exists()


def test_bad_input_leaves_nothing(
    tiny_target: list[str], fake_command: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*tiny_target, "optimizer.lr=abc", "trainer.epochs=-1"]) == 2
    assert "2 problems" in capsys.readouterr().err
    assert cli.main([*tiny_target, "strategy.draft_vocab_size=41"]) == 2
    assert "larger than the target's vocabulary of 40" in capsys.readouterr().err
    assert fake_command == [] and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["prepare", "data.train_path=absent.jsonl"], "data.train_path=absent.jsonl: no such file"),
        (["export"], "Name it with run="),
        (["evaluate"], "draft_folder="),
        (["evaluate", "run=nowhere"], "is not a run folder"),
    ],
)
def test_a_missing_input_makes_no_run_folder(
    line: list[str], words: str, tiny_target: list[str], fake_command: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*line, *(tiny_target if "run=nowhere" not in line else [])]) == 2
    assert words in capsys.readouterr().err
    assert fake_command == [] and not (tmp_path / "outputs").exists()


def test_a_folder_of_another_command_is_no_training_run(
    tiny_target: list[str], fake_command: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["capture", *tiny_target]) == 0
    assert cli.main(["train", f"run={fake_command[0][2]}"]) == 2
    assert "is a folder of the command capture" in capsys.readouterr().err


def test_plan_prints_and_leaves_nothing(
    tiny_target: list[str], fake_command: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *tiny_target]) == 0
    printed = capsys.readouterr().out
    for words in ("eagle3", "trainer", "draft weights", "AdamW moments", "checkpoints", "optimizer steps", "everything fits"):
        assert words in printed
    assert fake_command == [] and {p.name for p in tmp_path.iterdir()} == {"target"}


def test_plan_says_what_does_not_fit(tiny_target: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("specforge.commands.plan.device_memory", lambda device: 1000)
    assert cli.main(["plan", *tiny_target]) == 1
    assert "would not fit: memory" in capsys.readouterr().out


def test_plan_does_not_prepare_an_absent_target(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["plan", "target=hf", "target.path=owner/name", "device=cpu"]) == 0
    assert "not on disk" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_draft_parameters_are_counted_on_the_meta_device(tiny_target: list[str]) -> None:
    from specforge.launch.estimate import draft_parameters, target_parameters

    ready = frontend.make_ready("train", tiny_target)
    assert ready is not None and ready.facts is not None
    hidden, inner, heads, kv, width, vocabulary = 16, 24, 4, 2, 4, 40
    attention = 2 * hidden * (heads + 2 * kv) * width + heads * width * hidden
    # Feed-forward, fc of three layers, head, four norms.
    expected = attention + 3 * hidden * inner + 3 * hidden * hidden + vocabulary * hidden + 4 * hidden
    assert draft_parameters(ready.config, ready.facts) == expected
    assert target_parameters(Path(ready.config["target"]["resolved_path"])) == 640


def test_interrupt_says_what_is_kept(tiny_target: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(run_dir: Path) -> int:
        for step in (5, 100, 200):
            folder = run_dir / "checkpoints" / f"step_{step:07d}"
            folder.mkdir(parents=True)
            if step < 200:  # the last one was being written
                (folder / "_SUCCESS").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr("specforge.training.checkpoint.open_checkpoint", lambda path: types.SimpleNamespace(path=path))

    monkeypatch.setattr("specforge.launch.worker.run_role", interrupted)
    assert cli.main(tiny_target) == 130
    printed = capsys.readouterr().err
    assert "checkpoint step_0000100" in printed and "Go on with: specforge run=outputs/t/" in printed


def test_doctor_reports_and_exits_by_what_is_required(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from specforge.commands import doctor

    assert cli.main(["doctor", "--json"]) == 0
    items = {f["item"]: f for f in json.loads(capsys.readouterr().out)}
    assert items["torch"]["status"] == "ok" and {"Python", "CPU", "SLURM", "Mooncake", "disk of the cache"} <= set(items)
    have = doctor.installed
    versions = {"torch": "2.9.1+cpu", "sglang": None}
    monkeypatch.setattr(doctor, "installed", lambda package: versions[package] if package in versions else have(package))
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "2.9.1+cpu" in printed and "wrong" in printed
    [sglang] = [f for f in doctor.findings() if f.item.startswith("extra sglang")]
    assert sglang.status == "missing" and sglang.hint == "pip install 'specforge[sglang]'"


def test_sweep_points_expand_in_order() -> None:
    from specforge.config.points import expand

    assert expand(["seed=1,2", "optimizer.lr=1e-4", "strategy=eagle3,eagle3_1"]) == [
        ["seed=1", "optimizer.lr=1e-4", "strategy=eagle3"],
        ["seed=1", "optimizer.lr=1e-4", "strategy=eagle3_1"],
        ["seed=2", "optimizer.lr=1e-4", "strategy=eagle3"],
        ["seed=2", "optimizer.lr=1e-4", "strategy=eagle3_1"],
    ]
    assert [p[0] for p in expand(["seed=range(0,6,2)"])] == ["seed=0", "seed=2", "seed=4"]
    assert [p[0] for p in expand(["strategy=glob(eagle*)"])] == ["strategy=eagle3", "strategy=eagle3_1"]
    assert [p[0] for p in expand(["name=choice(a,b)"])] == ["name=a", "name=b"]
    assert expand(["seed=[1,2]"]) == [["seed=[1,2]"]]
    assert expand([]) == [[]]
    for bad in ("optimizer.lr=interval(0,1)", "strategy=glob(nothing*)", "seed=range(0,100000)"):
        with pytest.raises(ConfigError):
            expand([bad])


def test_sweep_globs_over_the_users_own_folder(tmp_path: Path) -> None:
    from specforge.config.points import expand

    (tmp_path / "my" / "experiment").mkdir(parents=True)
    for name in ("my_one", "my_two"):
        (tmp_path / "my" / "experiment" / f"{name}.yaml").write_text("# @package _global_\nseed: 1\n")
    assert [p[0] for p in expand(["experiment=glob(my_*)"], [str(tmp_path / "my")])] == ["experiment=my_one", "experiment=my_two"]


def test_sweep_checks_every_point_before_the_first(tiny_target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", *tiny_target, "optimizer.lr=1e-4,-1,x"]) == 2
    printed = capsys.readouterr().err
    assert "2 problems" in printed and "optimizer.lr=-1: optimizer.lr: -1" in printed and "optimizer.lr=x: " in printed
    assert not (tmp_path / "outputs").exists()


def test_a_failing_point_stops_nothing(
    tiny_target: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[dict[str, Any]] = []

    def submit_many(self: Any, tasks: Any, changed: Any, folder: Path) -> list[int | None]:
        for index, task in enumerate(tasks):
            ran.append(freeze.read_config_file(task.config_file, task.run_dir))
            code = 3 if ran[-1]["seed"] == 1 else 0
            changed(index, "failed" if code else "done", code, "")
        return [3, 0]

    monkeypatch.setattr("specforge.launch.local.LocalLauncher.submit_many", submit_many)
    assert cli.main(["train", *tiny_target, "seed=1,2", "--multirun"]) == 1
    assert [config["seed"] for config in ran] == [1, 2]
    printed = capsys.readouterr().out
    assert "failed (exit code 3)" in printed and "done" in printed and "seed=2" in printed
    assert len(list((tmp_path / "outputs" / "t").iterdir())) == 2


def test_points_run_in_processes_of_their_own(tiny_target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real children: the target has no usable tokenizer, so each point ends with an error of its own, in a run folder of its own."""
    assert cli.main(["prepare", "-m", *tiny_target, "seed=1,2"]) == 1
    assert len(list((tmp_path / "outputs" / "t").iterdir())) == 2
    assert capsys.readouterr().out.count("failed (exit code 2)") == 2


def test_help_is_fast_and_reads_well() -> None:
    start = time.perf_counter()
    done = specforge("--help")
    took = time.perf_counter() - start
    assert done.returncode == 0 and done.stderr == ""
    for words in ("specforge [COMMAND]", "show-sample", "strategy: dflash, domino, dpace, dspark, eagle3, eagle3_1, peagle", "--config-dir", "specforge -m"):
        assert words in done.stdout
    assert took < 4, "the promise is 2 s on a machine of its own"


def test_cfg_job_needs_no_torch_and_leaves_nothing(tmp_path: Path) -> None:
    probe = "import sys; from specforge.cli import main; main(sys.argv[1:]); print('torch' in sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", probe, "--cfg", "job", "seed=4"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": SOURCE}, timeout=60, check=False)
    assert done.returncode == 0 and "seed: 4" in done.stdout and "hydra:" not in done.stdout
    assert done.stderr.strip() == "False"
    assert list(tmp_path.iterdir()) == []


def test_flags_of_hydra_work_behind_a_command_word() -> None:
    assert "checkpoint: best" in specforge("evaluate", "--cfg", "job").stdout
    assert "max_new_tokens" in specforge("regenerate", "--cfg", "job", "-p", "_global_").stdout
    assert "base" in specforge("train", "--info", "defaults-tree").stdout
    done = specforge("--cfg", "job", "draft=lama")
    assert done.returncode == 2 and "Did you mean 'draft=llama'?" in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    ("line", "expected", "unwanted"),
    [
        ("specforge ev", ["evaluate", "evaluator="], []),
        ("specforge evaluate che", ["checkpoint="], []),
        ("specforge train strategy=", ["strategy=eagle3", "strategy=eagle3_1"], ["evaluate"]),
        ("specforge -m strategy=eagle3 optimizer.l", ["optimizer.lr="], []),
        ("specforge diff ", [], ["draft="]),
    ],
)
def test_completion(line: str, expected: list[str], unwanted: list[str]) -> None:
    done = specforge("-sc", "query=bash", environment={"COMP_LINE": line, "COMP_POINT": str(len(line))})
    assert done.returncode == 0 and set(expected) <= set(done.stdout.split()) and not set(unwanted) & set(done.stdout.split())


def test_completion_installs_for_the_console_script() -> None:
    assert specforge("-sc", "install=bash").stdout.rstrip().endswith("hydra_bash_completion specforge")
    assert specforge("train", "-sc", "install=bash").stdout.rstrip().endswith("hydra_bash_completion specforge")


def test_version_and_pipe() -> None:
    assert specforge("--version").stdout.startswith("specforge ")
    pipe = subprocess.run(f"{sys.executable} -m specforge --cfg job | head -1", shell=True, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": SOURCE}, check=False)  # fmt: skip
    assert pipe.stdout.startswith("target:") and "Traceback" not in pipe.stderr


def test_ctrl_c_in_a_real_process(tiny_target: list[str], tmp_path: Path) -> None:
    """SIGINT while the command waits: exit code 130 and one line, no traceback."""
    (tmp_path / "slow_strategy.py").write_text(
        "import os, signal, time\nfrom specforge.training.strategies.eagle3 import Eagle3\n"
        "class Slow(Eagle3):\n    name = 'slow'\n    def rules(self, choices, config):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n        time.sleep(30)\n        return []\n"
    )
    done = specforge(*tiny_target, "strategy._target_=slow_strategy.Slow", "plugins=[slow_strategy]")
    assert done.returncode == 130 != -signal.SIGINT
    assert "nothing is lost" in done.stderr and "Traceback" not in done.stderr
