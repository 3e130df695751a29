"""``launcher=slurm``: a run is a job, a sweep is one array, several roles are a job each or share one allocation.

The front end writes the frozen run, submits through submitit, stores the job ids in the run folder and returns; ``launcher.wait=true``
stays and follows. What a job does is in ``slurm_program.py``, how its script is made in ``slurm_script.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from specforge.config import freeze
from specforge.errors import ConfigError, RunError
from specforge.launch import slurm_queue
from specforge.launch.base import Changed, Launcher, Task
from specforge.launch.job_record import JobEntry, add_submission
from specforge.launch.plan import JobPlan, Plan
from specforge.launch.slurm_plan import check_settings, command_job, plan_of
from specforge.launch.slurm_program import JobProgram
from specforge.launch.slurm_script import script_text, submit

Count = Annotated[int, Field(ge=1)]


class SlurmLauncher(Launcher):
    """The values of ``conf/launcher/slurm.yaml``, where each is explained."""

    remote: ClassVar[bool] = True

    def __init__(
        self,
        *,
        nodes: Count,
        gpus_per_node: int | str,
        tasks_per_node: Count | None,
        cpus_per_task: Count | None,
        mem: str | None,
        time: Count | str,
        partition: str | None,
        account: str | None,
        qos: str | None,
        constraint: str | None,
        sbatch: dict[str, str | int | bool | None] | None,
        srun: list[str] | None,
        setup: list[str] | None,
        python: str | None,
        roles: dict[str, dict[str, Any]] | None,
        pack: bool,
        parallel: Count | None,
        requeue: bool,
        max_timeouts: Annotated[int, Field(ge=0)],
        signal_seconds: Count,
        wait: bool,
        poll_seconds: Annotated[float, Field(gt=0)],
        dry_run: bool,
    ) -> None:
        self.settings = {
            "nodes": nodes,
            "gpus_per_node": gpus_per_node,
            "tasks_per_node": tasks_per_node,
            "cpus_per_task": cpus_per_task,
            "mem": mem,
            "time": time,
            "partition": partition,
            "account": account,
            "qos": qos,
            "constraint": constraint,
            "sbatch": sbatch,
        }
        self.srun, self.setup, self.python = srun or [], setup or [], python
        self.roles, self.pack, self.parallel = roles, pack, parallel
        self.requeue, self.max_timeouts, self.signal_seconds = requeue, max_timeouts, signal_seconds
        self.wait, self.poll_seconds, self.dry_run = wait, poll_seconds, dry_run

    @classmethod
    def rules(cls, choices: dict[str, str], config: dict[str, Any]) -> list[str]:
        """What the signature cannot say."""
        return check_settings(config["launcher"])

    @staticmethod
    def make_plan(config: dict[str, Any]) -> Plan:
        """The plan of a training run on a cluster; asks nothing of this machine."""
        return plan_of(config)

    def start(self, task: Task) -> int:
        config = freeze.read_config_file(task.config_file, task.run_dir)
        jobs = self._jobs(config)
        folder = task.run_dir / "jobs"
        if self.dry_run:
            self._write_scripts(config, jobs, [task], folder)
            return 0
        require_slurm()
        self._warn(task.run_dir, config)
        require_free(task.run_dir)
        if len(jobs) > 1 or jobs[0].name == "pack":
            from specforge.launch.rendezvous import forget

            forget(task.run_dir)
        with _removed_when_refused(folder):
            self._submit_roles(config, jobs, task, folder)
        return self._follow([task])[0] or 0 if self.wait else 0

    def submit_many(self, tasks: Sequence[Task], changed: Changed, folder: Path) -> list[int | None]:
        configs = [freeze.read_config_file(task.config_file, task.run_dir) for task in tasks]
        jobs = [self._jobs(config) for config in configs]
        if any(len(one) > 1 for one in jobs):
            raise ConfigError("launcher.pack: a sweep over runs of several roles needs each in one allocation. Add launcher.pack=true")
        if any(_shape(one[0]) != _shape(jobs[0][0]) for one in jobs):
            raise ConfigError(
                "launcher: the points of one array need the same nodes, GPUs and time. Sweep over launcher keys in runs of their own."
            )
        scripts = folder / "jobs"
        if self.dry_run:
            self._write_scripts(configs[0], jobs[0], tasks, scripts)
            return [None] * len(tasks)
        require_slurm()
        self._warn(folder, configs[0])
        for task in tasks:
            require_free(task.run_dir)
        programs = [self._program(task, one[0]) for task, one in zip(tasks, jobs, strict=True)]
        with _removed_when_refused(scripts):
            ids, logs = submit(self, jobs[0][0], configs[0], programs, scripts)
        cluster = slurm_queue.cluster_name()
        for index, (task, identifier, log) in enumerate(zip(tasks, ids, logs, strict=True)):
            add_submission(task.run_dir, cluster, [_entry(jobs[index][0], identifier, log, leads=True)])
            changed(index, "submitted", None, f"job {identifier}")
        _tell(
            f"{len(tasks)} points submitted as job array {ids[0].split('_')[0]}"
            + ("" if self.wait else "; see them with: specforge status")
        )
        return self._follow(tasks, changed) if self.wait else [None] * len(tasks)

    def _jobs(self, config: dict[str, Any]) -> tuple[JobPlan, ...]:
        return plan_of(config).jobs if config["command"] == "train" else (command_job(config),)

    def _program(self, task: Task, job: JobPlan, instance: int = 0, leads: bool = True) -> JobProgram:
        segments = job.segments if job.instances == 1 else (job.segments[instance],)
        return JobProgram(str(task.config_file.absolute()), str(task.run_dir.absolute()), segments, leads, self.requeue)

    def _submit_roles(self, config: dict[str, Any], jobs: Sequence[JobPlan], task: Task, folder: Path) -> None:
        """The leader first; the others may start once it has. Ids are written down one by one: what runs can always be stopped."""
        entries: list[JobEntry] = []
        cluster = slurm_queue.cluster_name()
        try:
            for job in jobs:
                leads = job is jobs[0]
                after = {} if leads else {"dependency": f"after:{entries[0].id}"}
                programs = [self._program(task, job, instance, leads) for instance in range(job.instances)]
                ids, logs = submit(self, job, config, programs, folder, after)
                entries += [_entry(job, identifier, log, leads) for identifier, log in zip(ids, logs, strict=True)]
        except Exception:
            slurm_queue.cancel(entry.id for entry in entries)  # half a run is of no use
            raise
        add_submission(task.run_dir, cluster, entries)
        shown = ", ".join(f"{entry.name} {entry.id}" for entry in entries)
        _tell(f"submitted to SLURM: {shown}" + ("" if self.wait else f"; see it with: specforge status {_short(task.run_dir)}"))

    def _write_scripts(self, config: dict[str, Any], jobs: Sequence[JobPlan], tasks: Sequence[Task], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for job in jobs:
            count = len(tasks) if len(tasks) > 1 else job.instances
            path = folder / f"{job.name}.sbatch"
            freeze.write_atomic(path, script_text(self, job, config, folder, count))
            _tell(f"dry run: {_short(path)} is what sbatch would get; nothing was submitted")

    def _follow(self, tasks: Sequence[Task], changed: Changed | None = None) -> list[int | None]:
        from specforge.launch.follow import follow

        return list(follow(tasks, self.poll_seconds, changed))

    def _warn(self, folder: Path, config: dict[str, Any]) -> None:
        from specforge.launch.visibility import unseen_folders

        for line in unseen_folders(
            {"the run folder": folder, "cache_dir": Path(config["cache_dir"]).expanduser(), "the working folder": Path.cwd()}
        ):
            _tell(f"warning: {line}")


def require_slurm() -> None:
    """Raises :class:`ConfigError` where SLURM's commands are missing."""
    if not slurm_queue.have_slurm():
        raise ConfigError(
            "launcher=slurm: sbatch is not found, so there is no SLURM on this machine. Run this on a login node of the cluster, look at "
            "the script with launcher.dry_run=true, or use launcher=local."
        )


def require_free(run_dir: Path) -> None:
    """A run folder belongs to one job at a time.

    Raises:
        RunError: a job of an earlier submission has not ended.
    """
    from specforge.launch.job_record import read_submissions

    submissions = read_submissions(run_dir)
    if not submissions or not slurm_queue.have_slurm():
        return
    states = slurm_queue.job_states(job.id for submission in submissions for job in submission.jobs)
    busy = [f"{identifier} ({state.state})" for identifier, state in states.items() if state.active]
    if busy:
        raise RunError(
            f"run: {run_dir} — is in use by SLURM job {', '.join(busy)}. Wait for it, or stop it with: specforge stop {_short(run_dir)}"
        )


class _removed_when_refused:
    """Takes back the folder of scripts when nothing could be submitted, so that the front end can take back the run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.new = folder, not folder.exists()

    def __enter__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.new:
            import shutil

            shutil.rmtree(self.folder, ignore_errors=True)


def _entry(job: JobPlan, identifier: str, log: str, leads: bool) -> JobEntry:
    return JobEntry(identifier, job.name, leads, job.nodes, job.tasks_per_node, log)


def _shape(job: JobPlan) -> tuple[Any, ...]:
    return job.nodes, job.tasks_per_node, job.gpus_per_node, sorted(job.settings.items(), key=str)


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _tell(line: str) -> None:
    print(f"specforge: {line}", file=sys.stderr, flush=True)
