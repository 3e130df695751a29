"""From a configuration to jobs and scripts; SLURM itself is not asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from specforge.config.locate import config_dir
from specforge.errors import ConfigError, MissingExtraError, RunError
from specforge.launch import slurm, slurm_queue, slurm_script
from specforge.launch.base import Task, open_launcher
from specforge.launch.env import Segment
from specforge.launch.plan import make_plan, world_size
from specforge.launch.slurm_plan import check_settings, gpu_count, minutes
from specforge.launch.slurm_queue import SlurmError

TWO_ROLES = {"_target_": "cluster_parts.WithProducers", "lookahead_tokens": None}


def config(topology: dict[str, Any] | None = None, command: str = "train", device: str = "auto", **launcher: Any) -> dict[str, Any]:
    node = {**yaml.safe_load((config_dir() / "launcher" / "slurm.yaml").read_text()), **launcher}
    base = {
        "format_version": 1,
        "command": command,
        "name": "draft",
        "device": device,
        "num_threads": None,
        "launcher": node,
        "plugins": ["cluster_parts"],
    }
    return {**base, "trainer": {"global_batch_size": 64}, "cache_dir": "cache", **({"topology": topology} if topology else {})}


@pytest.mark.parametrize(
    "time, expected",
    [(90, 90), ("90", 90), ("1:30:00", 90), ("30:20", 31), ("2-12", 3600), ("2-12:30", 3630), ("1-00:00:01", 1441), ("1", 1)],
)
def test_time_limits(time, expected):
    assert minutes(time) == expected


@pytest.mark.parametrize("gpus, expected", [(8, 8), (0, 0), ("h200:4", 4), ("2", 2)])
def test_gpu_counts(gpus, expected):
    assert gpu_count(gpus) == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"time": "tomorrow"}, "launcher.time: 'tomorrow'"),
        ({"gpus_per_node": "many"}, "launcher.gpus_per_node: 'many'"),
        ({"sbatch": {"partition": "x"}}, "launcher.sbatch.partition: use launcher.partition"),
        ({"sbatch": {"--ntasks_per_node": 3}}, "use launcher.tasks_per_node"),
        ({"roles": {"producer": {"nods": 1}}}, "launcher.roles.producer: no key nods"),
        ({"roles": {"producer": {"instances": 0}}}, "launcher.roles.producer.instances: 0"),
        ({"roles": {"producer": {"sbatch": {"array": "1"}}}}, "launcher.roles.producer.sbatch.array"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    (problem,) = check_settings(config(**changes)["launcher"])
    assert message in problem


def test_one_task_a_gpu_on_every_node():
    plan = make_plan(config(nodes=4, gpus_per_node="h200:8"))
    (job,) = plan.jobs
    assert (job.name, job.nodes, job.tasks_per_node, job.gpus_per_node) == ("trainer", 4, 8, "h200:8")
    assert job.segments == (Segment("trainer", 0, 4, 8),)
    assert plan.roles[0].processes == 32 == len(plan.processes) == world_size(config(nodes=4)) and plan.roles[0].device == "cuda"
    assert [process.local_rank for process in plan.processes[7:9]] == [7, 0]
    assert json.loads(json.dumps(plan.to_json()))["jobs"][0]["nodes"] == 4


@pytest.mark.parametrize(
    "changes, tasks",
    [({"gpus_per_node": 0}, 1), ({"device": "cpu"}, 1), ({"device": "cpu", "tasks_per_node": 3}, 3), ({"tasks_per_node": 4}, 4)],
)
def test_how_many_tasks_a_node(changes, tasks):
    job = make_plan(config(**changes)).jobs[0]
    assert job.tasks_per_node == tasks and (gpu_count(job.gpus_per_node) == 0) == (tasks in (1, 3))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tasks_per_node": 9}, "9 ranks on nodes with gpus_per_node=8"),
        ({"device": "cuda", "gpus_per_node": 0}, "launcher.gpus_per_node=0"),
        ({"nodes": 9}, "64 samples cannot be shared by 72 ranks"),
        ({"roles": {"cook": {"nodes": 1}}}, "launcher.roles.cook: this run has the roles trainer"),
    ],
)
def test_plans_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(config(**changes))


def test_two_roles_are_a_job_each_with_settings_of_their_own():
    given = config(TWO_ROLES, nodes=2, partition="gpu", roles={"producer": {"instances": 3, "partition": "cpu", "time": 60}})
    trainer, producer = make_plan(given).jobs
    assert (trainer.name, trainer.nodes, trainer.tasks_per_node, trainer.instances, trainer.settings["partition"]) == (
        "trainer",
        2,
        8,
        1,
        "gpu",
    )
    assert (producer.name, producer.nodes, producer.tasks_per_node, producer.instances) == ("producer", 1, 1, 3)
    assert producer.gpus_per_node == 0 and producer.settings["partition"] == "cpu" and producer.settings["time"] == 60
    assert [segment.instance for segment in producer.segments] == [0, 1, 2]


def test_or_they_share_an_allocation_with_the_trainer_on_its_first_nodes():
    (job,) = make_plan(config(TWO_ROLES, nodes=2, pack=True)).jobs
    assert (job.name, job.nodes, job.tasks_per_node, job.gpus_per_node, job.instances) == ("pack", 4, 8, 8, 1)
    assert job.segments == (Segment("trainer", 0, 2, 8), Segment("producer", 0, 1, 1), Segment("producer", 1, 1, 1))


def test_another_command_is_one_task_with_one_gpu():
    launcher = open_launcher(config(command="evaluate", gpus_per_node="h200:8"))
    (job,) = launcher._jobs(config(command="evaluate", gpus_per_node="h200:8"))
    assert (job.name, job.nodes, job.tasks_per_node, job.gpus_per_node) == ("evaluate", 1, 1, "h200:1")


def script(tmp_path: Path, count: int = 1, **launcher: Any) -> list[str]:
    given = config(**launcher)
    made = open_launcher(given)
    return slurm_script.script_text(made, make_plan(given).jobs[0], given, tmp_path, count).splitlines()


def test_every_setting_reaches_the_script(tmp_path):
    lines = script(
        tmp_path, nodes=2, partition="gpu", account="acc", qos="high", constraint="h200", mem="64G", cpus_per_task=6, time="2:00:00",
        signal_seconds=300, sbatch={"exclusive": True, "mail_type": "END", "nice": None, "hold": False}, srun=["--cpu-bind=none"],
        setup=["module load cuda"], python="singularity run image python",
    )  # fmt: skip
    for line in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=6", "--partition=gpu", "--account=acc", "--qos=high",
                 "--constraint=h200", "--mem=64G", "--time=120", "--signal=USR2@300", "--requeue", "--exclusive", "--mail-type=END",
                 "--job-name=specforge-draft", "--open-mode=append"):  # fmt: skip
        assert f"#SBATCH {line}" in lines
    assert not any("nice" in line or "hold" in line or "wckey" in line or "array" in line for line in lines)
    assert lines.index("module load cuda") < next(i for i, line in enumerate(lines) if line.startswith("srun "))
    (command,) = [line for line in lines if line.startswith("srun ")]
    assert "--cpus-per-task=6 --kill-on-bad-exit=1 --cpu-bind=none singularity run image python -u -m submitit.core._submit" in command


def test_what_is_not_set_is_not_asked_for(tmp_path):
    text = "\n".join(script(tmp_path, requeue=False))
    assert not any(word in text for word in ("partition", "account", "qos", "constraint", "--mem", "cpus-per-task"))
    assert "#SBATCH --no-requeue" in text and "#SBATCH --time=1440" in text


def test_a_site_that_knows_gpus_as_gres(tmp_path):
    lines = script(tmp_path, sbatch={"gres": "gpu:h200:8"})
    assert "#SBATCH --gres=gpu:h200:8" in lines and not any("gpus-per-node" in line for line in lines)


def test_a_sweep_is_an_array_with_a_limit(tmp_path):
    assert "#SBATCH --array=0-9%3" in script(tmp_path, count=10, parallel=3)


# -- submitting ------------------------------------------------------------------------------------------------------------------------


def frozen(folder: Path, **changes: Any) -> Task:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config(**changes)))
    return Task(folder / "config.yaml", folder)


def test_no_slurm_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    task = frozen(tmp_path / "run")
    with pytest.raises(ConfigError, match="sbatch is not found, so there is no SLURM on this machine"):
        open_launcher(config()).start(task)
    assert not (task.run_dir / "jobs").exists()


def test_no_submitit_here(tmp_path, monkeypatch):
    import builtins

    original = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("submitit"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r"specforge\[slurm\]"):
        script(tmp_path)


def test_a_dry_run_needs_no_slurm(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    task = frozen(tmp_path / "run", topology=TWO_ROLES, dry_run=True)
    assert open_launcher(config(topology=TWO_ROLES, dry_run=True)).start(task) == 0
    assert "#SBATCH --array=0-1%2" in (task.run_dir / "jobs" / "producer.sbatch").read_text()
    assert "array" not in (task.run_dir / "jobs" / "trainer.sbatch").read_text() and "nothing was submitted" in capsys.readouterr().err


def test_a_sweep_over_runs_of_several_roles_must_pack_them(tmp_path):
    tasks = [frozen(tmp_path / name, topology=TWO_ROLES) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="Add launcher.pack=true"):
        open_launcher(config()).submit_many(tasks, lambda *_: None, tmp_path)


def test_points_that_need_other_nodes_are_no_array(tmp_path):
    tasks = [frozen(tmp_path / "a", nodes=1), frozen(tmp_path / "b", nodes=2)]
    with pytest.raises(ConfigError, match="the points of one array need the same nodes"):
        open_launcher(config()).submit_many(tasks, lambda *_: None, tmp_path)


def test_submissions_keep_the_users_cluster_and_lose_the_job_around_them(monkeypatch):
    for name, value in {"SLURM_CONF": "c", "SBATCH_ACCOUNT": "me", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    import os

    with slurm_script.outside_of_a_job():
        assert os.environ["SLURM_CONF"] == "c" and os.environ["SBATCH_ACCOUNT"] == "me"
        assert not {"SLURM_JOB_ID", "SLURM_NTASKS", "RANK"} & set(os.environ)
    assert os.environ["SLURM_JOB_ID"] == "1" and os.environ["RANK"] == "3"


def test_half_a_run_is_taken_back(tmp_path, monkeypatch):
    cancelled: list[str] = []
    monkeypatch.setattr(slurm_queue, "cluster_name", lambda: "c")
    monkeypatch.setattr(slurm_queue, "cancel", lambda ids: cancelled.extend(ids))
    monkeypatch.setattr(slurm_queue, "node_addresses", lambda: ["127.0.0.1"])

    def submit(launcher, job, given, programs, folder, extra):
        if job.name == "producer":
            assert extra == {"dependency": "after:17"}
            raise ConfigError("launcher=slurm: SLURM refused the job: no")
        return ["17"], ["log"]

    monkeypatch.setattr(slurm, "submit", submit)
    task = frozen(tmp_path / "run", topology=TWO_ROLES)
    with pytest.raises(ConfigError, match="refused"):
        open_launcher(config(topology=TWO_ROLES)).start(task)
    assert cancelled == ["17"] and sorted(path.name for path in task.run_dir.iterdir()) == ["config.yaml"]


def test_slurms_words_are_passed_on_without_its_prefix():
    said = "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition name specified\n"
    assert slurm_queue.words(said) == "invalid partition specified: x; Batch job submission failed: Invalid partition name specified"
    assert issubclass(SlurmError, RunError)


def test_only_continuing_a_run_inherits_its_launcher(tiny_work, run_cli, tmp_path):
    made = run_cli(*tiny_work.short, "launcher=slurm", "launcher.dry_run=true", "launcher.partition=gpu", cwd=tmp_path)
    assert made.code == 0, made.err
    run = f"run={made.run_dir}"

    def launcher(*words: str) -> dict[str, Any]:
        shown = run_cli(*words, run, "--cfg", "job", cwd=tmp_path)
        assert shown.code == 0, shown.err
        return yaml.safe_load(shown.out)["launcher"]

    assert launcher("train")["partition"] == "gpu" and launcher("train", "launcher=local")["_target_"].endswith("LocalLauncher")
    assert launcher("evaluate")["_target_"].endswith("LocalLauncher") and launcher("export")["_target_"].endswith("LocalLauncher")
    assert launcher("evaluate", "launcher=slurm", "launcher.partition=cpu")["partition"] == "cpu"
    shown = run_cli("plan", *tiny_work.short, "launcher=slurm", "launcher.nodes=2", "launcher.tasks_per_node=2", cwd=tmp_path)
    assert shown.code == 0 and "SLURM jobs" in shown.out and "trainer" in shown.out, shown.out + shown.err


@pytest.mark.parametrize(
    "words, says",
    [
        (["launcher.sbatch={partition: x}"], ["launcher.sbatch.partition: use launcher.partition"]),
        (["launcher.time=soon"], ["launcher.time: 'soon'"]),
        (["launcher.nodes=9"], ["trainer.global_batch_size: 4 samples cannot be shared by 9 ranks"]),
        (["launcher.roles={cook: {nodes: 1}}"], ["launcher.roles.cook: this run has the roles trainer"]),
        (["device=cuda", "launcher.gpus_per_node=0"], ["launcher.gpus_per_node=0"]),
    ],
)
def test_mistakes_cost_nothing(tiny_work, refused, words, says):
    refused(*tiny_work.short, "launcher=slurm", *words, says=says)
