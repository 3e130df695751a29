"""launcher=slurm on a real SLURM: submit, arrays, every way a job can be cut off, two roles, and what SLURM refuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster
import torch
from safetensors.torch import load_file

from specforge.launch.job_record import read_ended, read_submissions
from specforge.launch.rendezvous import current
from specforge.launch.slurm_queue import job_states

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(slurm_cluster.why_not() is not None, reason=str(slurm_cluster.why_not())),
]

HERE = Path(__file__).parent
# 24 steps, a checkpoint each 10; while its file is there a run stands still after some steps.
PACE = ["trainer.epochs=8", "trainer.global_batch_size=4", "trainer.eval_every=24", "trainer.save_every=10", "trainer.log_every=1",
        "scheduler=constant", "scheduler._target_=cluster_parts.Paced", "plugins=[cluster_parts]"]  # fmt: skip
# The lost one goes on from its checkpoint of step 10, the others from the step that they were held at.
HELD_AT = {"timed": 5, "requeued": 3, "preempted": 4, "lost": 12}
TIMES = ("seconds", "steps_per_second", "tokens_per_second")


@pytest.fixture(scope="module")
def slurm() -> Iterator[slurm_cluster.LoopbackCluster]:
    import specforge

    with slurm_cluster.cluster() as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(started.conf))
        # The nodes find the package and the plug-ins as this process does.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(specforge.__file__).resolve().parents[1]), str(HERE)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # the scripts of launchers/ start python
        yield started


class Cluster:
    """The command line in a folder of its own, on the cluster."""

    def __init__(self, folder: Path, work: Any, run_cli: Callable[..., Any]) -> None:
        self.folder, self.work, self.run_cli = folder, work, run_cli

    def cli(self, *arguments: str) -> Any:
        return self.run_cli(*arguments, cwd=self.folder)

    def words(self, name: str, *more: str, hold_at: int | None = None) -> list[str]:
        file = self.folder / f"hold-{name}"
        if hold_at is not None:
            file.touch()
        hold = [f"+scheduler.hold={file}", f"+scheduler.hold_at={hold_at or 0}"]
        return [*self.work.base, *PACE, *hold, f"output_dir={self.folder / 'runs' / name}", *more]

    def submit(self, name: str, *more: str, hold_at: int | None = None) -> Path:
        """Submit a run and return its folder without waiting."""
        outcome = self.cli(*self.words(name, "launcher=slurm", "launcher.poll_seconds=0.2", *more, hold_at=hold_at))
        assert outcome.code == 0, outcome.err
        return (self.folder / outcome.run_dir).absolute()

    def let_go(self, name: str) -> None:
        (self.folder / f"hold-{name}").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def cluster(
    slurm: slurm_cluster.LoopbackCluster, tiny_work: Any, run_cli: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("slurm"), tiny_work, run_cli)


@pytest.fixture(scope="module")
def reference(cluster: Cluster) -> Path:
    """The run that nobody disturbs, in this process."""
    outcome = cluster.cli(*cluster.words("reference"))
    assert outcome.code == 0, outcome.err
    return cluster.folder / outcome.run_dir


def until(ready: Callable[[], Any], what: str, run_dir: Path, seconds: float = 180.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := ready()):
        if time.monotonic() > deadline:
            logs = "\n".join(f"== {path}\n{path.read_text()[-2000:]}" for path in [*run_dir.rglob("*.log"), *run_dir.rglob("*log.out")])
            queue = subprocess.run(["squeue", "-t", "all"], capture_output=True, text=True).stdout
            logs += (Path(os.environ["SLURM_CONF"]).parent / "slurmctld.log").read_text()[-4000:]
            raise AssertionError(f"{what} did not come within {seconds:g} seconds\n{queue}\n{logs}")
        time.sleep(0.1)
    return value


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines if line.endswith("}")]


def weight_file(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip() / "model.safetensors"


def job_of(run_dir: Path) -> str:
    return read_submissions(run_dir)[-1].leader.id


def state_of(run_dir: Path) -> str:
    return job_states([job_of(run_dir)])[job_of(run_dir)].state


def finished(run_dir: Path) -> bool:
    """Ended for good, by its own word and by SLURM's."""
    ended = read_ended(run_dir)
    return ended is not None and not ended.requeued and not any(s.active for s in job_states([job_of(run_dir)]).values())


def scontrol(*words: str) -> None:
    subprocess.run(["scontrol", *words], check=True, capture_output=True)


def kill_node(node: str, job: str) -> None:
    """A node that is gone: its daemon and everything that it started die at once. Those that could report it to SLURM die first."""
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    ours = {
        int(line.split()[0]): line.split(maxsplit=1)[1] for line in listing if _has(line.split()[0], "SLURM_CONF", os.environ["SLURM_CONF"])
    }
    daemon = [pid for pid, line in ours.items() if "slurmd" in line and line.split()[-2:] == ["-N", node]]
    steps = [pid for pid, line in ours.items() if line.startswith(f"slurmstepd: [{job}.")]
    assert len(daemon) == 1 and len(steps) >= 2, ours
    for pid in [*daemon, *steps, *(pid for pid in ours if _has(str(pid), "SLURMD_NODENAME", node))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _has(pid: str, name: str, value: str) -> bool:
    try:
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


# -- jobs that are cut off: all at once, for most of their time is waiting ------------------------------------------------------------


@pytest.fixture(scope="module")
def cut_off(slurm: slurm_cluster.LoopbackCluster, cluster: Cluster, reference: Path) -> dict[str, Path]:
    """Four runs, each held after some steps and cut off in its own way. Only the time limit is still to come when this returns."""
    on = {"timed": "n1", "requeued": "n2", "preempted": "n4", "lost": "n3"}
    runs = {
        name: cluster.submit(name, f"launcher.sbatch={{nodelist: {node}}}", *_limit(name), hold_at=HELD_AT[name])
        for name, node in on.items()
    }
    threading.Thread(target=_lengthen, args=(runs["timed"],), daemon=True).start()
    for name in ("requeued", "preempted", "lost"):
        run_dir = runs[name]
        until(lambda run_dir=run_dir, name=name: len(rows_of(run_dir)) >= HELD_AT[name], f"the steps of {name}", run_dir)
        if name == "requeued":
            scontrol("requeue", job_of(run_dir))
        if name == "preempted":
            subprocess.run(["sbatch", "-p", "urgent", "-w", "n4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"], check=True)
        if name == "lost":
            kill_node(on[name], job_of(run_dir))
            scontrol("update", f"NodeName={on[name]}", "State=DOWN", "Reason=gone")
            until(lambda run_dir=run_dir: state_of(run_dir) == "PENDING", "the requeue by SLURM itself", run_dir)
            cluster.let_go(name)
            slurm.start_node(on[name])  # it is repaired, for the other nodes have enough to do
            scontrol("update", f"NodeName={on[name]}", "State=RESUME")
    for name in ("requeued", "preempted"):
        until(lambda name=name: read_ended(runs[name]), f"the save of {name}", runs[name])
    return runs


def _lengthen(run_dir: Path) -> None:
    """Once the time limit has cut a run off: what is left of it could take longer than a minute when other tests run beside it."""
    until(lambda: read_ended(run_dir), "the save before the time limit", run_dir)
    scontrol("update", f"JobId={job_of(run_dir)}", "TimeLimit=10")


@pytest.fixture(scope="module")
def disturbed(cut_off: dict[str, Path], together: dict[str, Any]) -> dict[str, Path]:
    """The same runs at their end, after everything else: most of their time is waiting."""
    for name, run_dir in cut_off.items():
        until(lambda run_dir=run_dir: finished(run_dir), f"the end of {name}", run_dir)
    return cut_off


def _limit(name: str) -> list[str]:
    # SLURM counts in minutes, looks every 30 seconds and warns 30 seconds early: this warns after 20 to 50 seconds.
    return ["launcher.time=1", "launcher.signal_seconds=10"] if name == "timed" else []


@pytest.mark.parametrize("name", ["requeued", "timed", "preempted", "lost"])
def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(name: str, disturbed: dict[str, Path], reference: Path) -> None:
    run_dir = disturbed[name]
    assert weight_file(run_dir).read_bytes() == weight_file(reference).read_bytes()
    assert rows_of(run_dir) == rows_of(reference)
    ended = read_ended(run_dir)
    assert ended is not None and ended.exit_code == 0 and ended.restarts >= 1 and ended.job == job_of(run_dir)
    first, second = (run_dir / "logs" / f"{ended.job}.{k}" / "rank_0.log" for k in (ended.restarts - 1, ended.restarts))
    assert first.exists() and "resumed from" in second.read_text()
    step = 10 if name == "lost" else HELD_AT[name] + 1
    assert f"step_{step:07d}: step {step} of 24" in second.read_text()
    if name != "lost":
        assert f"stopped by a signal at step {step} of 24" in first.read_text()


# -- jobs that nobody cuts off, and two that somebody stops -----------------------------------------------------------------------


def scripts_by_hand(cluster: Cluster) -> dict[str, Path]:
    """The scripts of launchers/ for sbatch, each given run folders that a dry run made."""
    runs = {}
    cpu = ["--gpus-per-node=0", "--ntasks-per-node=1", "-o", "/dev/null"]
    for name, options in (("single_node", []), ("multi_node", ["--nodes=2"]), ("sweep_array", ["--array=0-0%1"])):
        run_dir = runs[name] = cluster.submit(name, "launcher.dry_run=true")
        argument = run_dir
        if name == "sweep_array":
            argument = cluster.folder / "runs.txt"
            argument.write_text(f"{run_dir}/\n")
        script = HERE.parents[1] / "launchers" / f"slurm_{name}.sbatch"
        subprocess.run(["sbatch", *cpu, *options, str(script), str(argument)], check=True, cwd=cluster.folder)
    return runs


@pytest.fixture(scope="module")
def together(cut_off: dict[str, Path], cluster: Cluster) -> dict[str, Any]:
    """One run over two nodes that is waited for, while a sweep, two runs of two roles and two that will be stopped go on beside it."""
    stopped = {name: cluster.submit(name, hold_at=6) for name in ("cancelled", "forbidden")}
    roles = ["topology._target_=cluster_parts.WithProducers"]
    runs = {
        "roles": cluster.submit("roles", *roles),
        "packed": cluster.submit("packed", *roles, "launcher.pack=true"),
    }
    by_hand = scripts_by_hand(cluster)
    arguments = [*cluster.words("sweep", "launcher=slurm", "launcher.parallel=2"), "optimizer.lr=1e-3,2e-3,1e30"]
    swept = cluster.cli("-m", *arguments)
    again = cluster.cli("-m", *arguments)
    pair = cluster.cli(*cluster.words("pair", "launcher=slurm", "launcher.nodes=2", "launcher.wait=true", "launcher.poll_seconds=0.2"))
    for name, run_dir in stopped.items():
        until(lambda run_dir=run_dir: len(rows_of(run_dir)) >= 6, f"the steps of {name}", run_dir)
    busy = cluster.cli(f"run={stopped['cancelled']}", "launcher=local")
    running = cluster.cli("status", str(stopped["cancelled"]))
    stop = cluster.cli("stop", str(stopped["cancelled"]))
    scontrol("update", f"JobId={job_of(stopped['forbidden'])}", "Requeue=0")
    subprocess.run(["scancel", "-s", "USR2", job_of(stopped["forbidden"])], check=True)
    sweep = Path(next(line for line in swept.err.splitlines() if "sweep folder" in line).split("sweep folder ")[1])
    points = [Path(point["run_dir"]) for point in json.loads((cluster.folder / sweep / "sweep.json").read_text())["points"]]
    for run_dir in [*stopped.values(), *runs.values(), *points]:
        until(lambda run_dir=run_dir: finished(run_dir), f"the end of {run_dir}", run_dir)
    for name in stopped:
        cluster.let_go(name)
    return {**stopped, **runs, "pair": pair, "swept": swept, "again": again, "sweep": cluster.folder / sweep, "points": points, "busy": busy,
            "running": running, "stop": stop, "arguments": arguments, "by hand": by_hand}  # fmt: skip


def test_two_nodes_equal_one_process_and_wait_gives_its_output(together: dict[str, Any], cluster: Cluster, reference: Path) -> None:
    pair = together["pair"]
    assert pair.code == 0 and "is running" in pair.err and "step 24/24" in pair.err, pair.err
    run_dir = cluster.folder / pair.run_dir
    ours, theirs = load_file(weight_file(run_dir)), load_file(weight_file(reference))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-4)
    logs = run_dir / "logs" / "latest"
    assert sorted(path.name for path in logs.iterdir()) == ["rank_0.log", "rank_1.log"]
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["roles"][0]["processes"] == 2 and plan["jobs"][0]["nodes"] == 2
    states = job_states([job_of(run_dir)])
    assert states[job_of(run_dir)].state == "COMPLETED" and len(states[job_of(run_dir)].nodes) == len("n[1-2]")


def test_a_sweep_is_one_array_and_is_not_submitted_twice(together: dict[str, Any], cluster: Cluster) -> None:
    assert together["swept"].code == 0, together["swept"].err
    ids = [job_of(run_dir) for run_dir in together["points"]]
    array = ids[0].split("_")[0]
    assert ids == [f"{array}_{k}" for k in range(3)] and f"submitted as job array {array}" in together["swept"].err
    script = (together["sweep"] / "jobs" / f"{array}_submission.sh").read_text()
    assert "#SBATCH --array=0-2%2" in script
    assert "3 of 3 points are in the queue already" in together["again"].err and "submitted as job" not in together["again"].err
    assert [read_ended(run_dir).exit_code for run_dir in together["points"]] == [0, 0, 3]
    assert job_states(ids)[ids[2]].state == "FAILED"
    shown = cluster.cli("status", str(together["sweep"]), "--json")
    states = {one["run_dir"]: one["state"] for one in json.loads(shown.out)}
    assert [states[str(run_dir)] for run_dir in together["points"]] == ["done", "done", "failed"]
    later = cluster.cli("-m", *together["arguments"][:-1], "optimizer.lr=1e-3,2e-3")
    assert later.code == 0 and "2 of 2 points are finished already and are skipped" in later.err


@pytest.mark.parametrize("name", ["roles", "packed"])
def test_two_roles_meet_and_leave_together(name: str, together: dict[str, Any], reference: Path) -> None:
    run_dir = together[name]
    log = (run_dir / "logs" / "latest" / "rank_0.log").read_text()
    assert "attempt 1: ['producer-0', 'producer-1']" in log
    assert weight_file(run_dir).read_bytes() == weight_file(reference).read_bytes()
    jobs = read_submissions(run_dir)[-1].jobs
    assert [job.name for job in jobs] == (["trainer", "producer", "producer"] if name == "roles" else ["pack"])
    until(lambda: not any(state.active for state in job_states(job.id for job in jobs).values()), "the end of the producers", run_dir)
    attempt = current(run_dir)
    assert attempt is not None and attempt.number == 1 and (attempt.folder / "DONE").exists()
    for instance in (0, 1):
        (path,) = {path.resolve() for path in run_dir.glob(f"logs/*/producer-{instance}-rank_0.log")}
        assert f"producer {instance} in attempt 1, world 1" in path.read_text() and "left: DONE" in path.read_text()
    assert {state.state for state in job_states(job.id for job in jobs).values()} == {"COMPLETED"}
    if name == "packed":
        assert len(job_states([jobs[0].id])[jobs[0].id].nodes) == len("n[1-3]")


def test_a_job_in_the_queue_holds_its_run_folder(together: dict[str, Any]) -> None:
    assert together["busy"].code == 1 and f"is in use by SLURM job {job_of(together['cancelled'])} (RUNNING)" in together["busy"].err
    assert "specforge stop" in together["busy"].err and together["running"].code == 0 and "running" in together["running"].out


def test_a_stopped_run_is_saved_and_not_queued_again(together: dict[str, Any], cluster: Cluster, reference: Path) -> None:
    assert together["stop"].code == 0 and f"cancelled job {job_of(together['cancelled'])}" in together["stop"].err
    for name, reason, code in (("cancelled", "the job was cancelled", 143), ("forbidden", "forbid it", 140)):
        run_dir = together[name]
        ended = read_ended(run_dir)
        assert ended is not None and (ended.exit_code, ended.requeued, ended.restarts) == (code, False, 0), ended
        output = "".join(path.read_text() for path in (run_dir / "jobs").glob("*_0_log.out"))
        assert reason in output and f"specforge run={run_dir}" in output
        (status,) = json.loads(cluster.cli("status", str(run_dir), "--json").out)
        assert status["state"] == "stopped" and status["step"] == 7
    nothing = cluster.cli("stop", str(together["cancelled"]))
    assert nothing.code == 1 and "runs or waits" in nothing.err
    goes_on = cluster.cli(f"run={together['cancelled']}", "launcher=local")
    assert goes_on.code == 0, goes_on.err
    assert weight_file(together["cancelled"]).read_bytes() == weight_file(reference).read_bytes()


@pytest.mark.parametrize("name", ["single_node", "multi_node", "sweep_array"])
def test_the_scripts_for_people(name: str, together: dict[str, Any], reference: Path) -> None:
    run_dir = together["by hand"][name]
    until(lambda: (run_dir / "_SUCCESS").exists(), f"the end of {name}", run_dir)
    ours, theirs = load_file(weight_file(run_dir)), load_file(weight_file(reference))
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-4 if name == "multi_node" else 0.0)


# -- what SLURM refuses -------------------------------------------------------------------------------------------------------------


def test_slurms_own_words_for_an_unknown_partition(cluster: Cluster) -> None:
    outcome = cluster.cli(*cluster.words("refused", "launcher=slurm", "launcher.partition=nowhere"))
    assert outcome.code == 2 and "invalid partition specified: nowhere" in outcome.err and "Traceback" not in outcome.err
    assert not (cluster.folder / "runs" / "refused").exists() or not any((cluster.folder / "runs" / "refused").iterdir())


def test_a_dry_run_submits_nothing(cluster: Cluster) -> None:
    def known() -> set[str]:
        return set(subprocess.run(["squeue", "-h", "-t", "all", "-o", "%i"], capture_output=True, text=True, check=True).stdout.split())

    before = known()
    run_dir = cluster.submit("dry", "launcher.dry_run=true", "launcher.nodes=3", "launcher.partition=main")
    script = (run_dir / "jobs" / "trainer.sbatch").read_text()
    assert "#SBATCH --nodes=3" in script and "#SBATCH --partition=main" in script and (run_dir / "plan.json").exists()
    # It is a script that SLURM takes.
    subprocess.run(["sbatch", "--test-only", str(run_dir / "jobs" / "trainer.sbatch")], check=True, capture_output=True)
    assert known() == before
