"""The sbatch script of a job and its submission, through submitit, which pickles the program and writes the script."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specforge.errors import ConfigError, MissingExtraError
from specforge.launch.plan import JobPlan
from specforge.launch.slurm_plan import gpu_count, minutes
from specforge.launch.slurm_program import JobProgram
from specforge.launch.slurm_queue import words

_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_")
_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

if TYPE_CHECKING:
    from specforge.launch.slurm import SlurmLauncher


def submit(
    launcher: SlurmLauncher,
    job: JobPlan,
    config: dict[str, Any],
    programs: Sequence[JobProgram],
    folder: Path,
    extra: Mapping[str, Any] | None = None,
) -> tuple[list[str], list[str]]:
    """Submit one job, or an array of as many as there are programs; their ids and the files of SLURM's own output.

    Raises:
        ConfigError: SLURM refused the job; the message holds its words (an unknown partition, account, limit, …).
    """
    executor = _executor(launcher, job, config, folder, extra or {})
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        # submitit lets sbatch's complaints through to the terminal as well; they are in the error.
        with outside_of_a_job(), contextlib.redirect_stderr(io.StringIO()), executor.batch():
            jobs = [executor.submit(program) for program in programs]
    except (FailedJobError, FailedSubmissionError) as error:
        said = words(str(error).split("stderr:")[-1])
        raise ConfigError(f"launcher=slurm: SLURM refused the job: {said}") from None
    return [str(one.job_id) for one in jobs], [str(one.paths.stdout) for one in jobs]


@contextlib.contextmanager
def outside_of_a_job() -> Iterator[None]:
    """Without the variables of a job or of a group of ranks that this process may be in: a job submitted here would inherit its shape.

    What leads to the cluster (SLURM_CONF, …) and the user's own defaults for sbatch (SBATCH_ACCOUNT, …) stay.
    """
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_JOB) and name not in _CLUSTER or name in _RANKS}
    try:
        yield
    finally:
        os.environ.update(hidden)


def script_text(launcher: SlurmLauncher, job: JobPlan, config: dict[str, Any], folder: Path, count: int) -> str:
    """What sbatch would get for ``count`` programs, without asking SLURM for anything."""
    executor = _executor(launcher, job, config, folder, {})
    if count > 1:
        executor.parameters["map_count"] = count
    return str(executor._make_submission_file_text(executor._submitit_command_str, "dry-run"))


def parameters(launcher: SlurmLauncher, job: JobPlan, config: dict[str, Any]) -> dict[str, Any]:
    """submitit's parameters of a job."""
    settings = job.settings
    own = {str(key).replace("_", "-").lstrip("-"): value for key, value in (settings["sbatch"] or {}).items()}
    shape: dict[str, Any] = {"nodes": job.nodes, "ntasks_per_node": job.tasks_per_node, "cpus_per_task": settings["cpus_per_task"]}
    if gpu_count(job.gpus_per_node) and "gres" not in own:  # some sites know GPUs as a generic resource only
        shape["gpus_per_node"] = job.gpus_per_node
    srun = ["--kill-on-bad-exit=1", *launcher.srun]
    if settings["cpus_per_task"]:
        srun.insert(0, f"--cpus-per-task={settings['cpus_per_task']}")  # since SLURM 22.05 a step does not inherit it
    return {
        **shape,
        **{key: settings[key] for key in ("partition", "account", "qos", "constraint", "mem")},
        "job_name": f"specforge-{config['name']}" + ("" if job.name in ("trainer", "pack") else f"-{job.name}"),
        "time": minutes(settings["time"]),
        "signal_delay_s": launcher.signal_seconds,
        "array_parallelism": launcher.parallel or 256,
        "setup": [*_setup(config), *launcher.setup],
        "srun_args": srun,
        "stderr_to_stdout": True,
        "wckey": None,
        "additional_parameters": {
            ("requeue" if launcher.requeue else "no-requeue"): True,
            **{key: value for key, value in own.items() if value is not None and value is not False},
        },
    }


def _setup(config: dict[str, Any]) -> list[str]:
    """Lines before the user's own: the package must be found on the nodes also when it is not installed but lies in a checkout."""
    import specforge

    lines = []
    source = Path(specforge.__file__).resolve().parents[1]
    if not {"site-packages", "dist-packages"} & set(source.parts):
        lines.append(f"export PYTHONPATH={shlex.quote(str(source))}${{PYTHONPATH:+:$PYTHONPATH}}")
    if config["num_threads"] is not None:
        lines.append(f"export OMP_NUM_THREADS={config['num_threads']}")
    return lines


def _executor(launcher: SlurmLauncher, job: JobPlan, config: dict[str, Any], folder: Path, extra: Mapping[str, Any]) -> Any:
    # Read when submitit is imported: ours is SIGUSR2, which the trainer watches.
    os.environ.pop("SUBMITIT_PREEMPT_SIGNAL", None)
    try:
        from submitit.slurm.slurm import SlurmExecutor
    except ImportError as error:
        raise MissingExtraError("submitit", "slurm", "launcher=slurm") from error

    class Executor(SlurmExecutor):
        """Makes scripts also on a machine without SLURM."""

        @classmethod
        def affinity(cls) -> int:
            return 2

    executor = Executor(folder, max_num_timeout=launcher.max_timeouts, python=launcher.python)
    wanted = {**parameters(launcher, job, config), **extra}
    executor._internal_update_parameters(**{key: value for key, value in wanted.items() if value is not None or key == "wckey"})
    return executor
