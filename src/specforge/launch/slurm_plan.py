"""From a frozen configuration to SLURM allocations: which role gets how many nodes, in which job. Pure; asks neither SLURM nor this machine."""

from __future__ import annotations

import math
import re
from typing import Any

from specforge.errors import ConfigError
from specforge.launch.env import Segment
from specforge.launch.plan import FILES, JobPlan, Plan, ProcessPlan, RolePlan
from specforge.launch.roles import Role, roles_of

# What a role may have of its own (launcher.roles.<role>.<key>).
ROLE_KEYS = (
    "nodes",
    "gpus_per_node",
    "tasks_per_node",
    "cpus_per_task",
    "mem",
    "time",
    "partition",
    "account",
    "qos",
    "constraint",
    "sbatch",
)
ROLE_COUNT = "instances"
# sbatch's options that have a key of their own, or that submitit and the plan must decide.
RESERVED: dict[str, str] = {
    "nodes": "launcher.nodes",
    "ntasks": "launcher.tasks_per_node",
    "ntasks-per-node": "launcher.tasks_per_node",
    "gpus-per-node": "launcher.gpus_per_node",
    "cpus-per-task": "launcher.cpus_per_task",
    "mem": "launcher.mem",
    "time": "launcher.time",
    "partition": "launcher.partition",
    "account": "launcher.account",
    "qos": "launcher.qos",
    "constraint": "launcher.constraint",
    "array": "launcher.parallel (the limit of a sweep)",
    "signal": "launcher.signal_seconds",
    "requeue": "launcher.requeue",
    "no-requeue": "launcher.requeue",
    "output": "nothing: a rank's output is in the run folder under logs/",
    "error": "nothing: a rank's output is in the run folder under logs/",
    "open-mode": "nothing: it must stay append",
}
PACK = "pack"


def check_settings(launcher: dict[str, Any]) -> list[str]:
    """Everything about the launcher's node that its signature cannot say."""
    problems = _check_one(launcher, "launcher")
    for name, own in (launcher.get("roles") or {}).items():
        unknown = sorted(set(own) - {*ROLE_KEYS, ROLE_COUNT})
        if unknown:
            problems.append(f"launcher.roles.{name}: no key {', '.join(unknown)}. Allowed: {', '.join((*ROLE_KEYS, ROLE_COUNT))}.")
        problems += _check_one({**launcher, **own}, f"launcher.roles.{name}", only=own)
        for key in ("nodes", "tasks_per_node", ROLE_COUNT):
            if key in own and own[key] is not None and (not isinstance(own[key], int) or own[key] < 1):
                problems.append(f"launcher.roles.{name}.{key}: {own[key]!r} — must be a whole number of at least 1.")
    return problems


def _check_one(node: dict[str, Any], path: str, only: dict[str, Any] | None = None) -> list[str]:
    problems = []
    given = node if only is None else only
    try:
        if "time" in given:
            minutes(given["time"])
    except ConfigError as error:
        problems.append(f"{path}.{error}")
    try:
        if "gpus_per_node" in given:
            gpu_count(given["gpus_per_node"])
    except ConfigError as error:
        problems.append(str(error))
    for key in given.get("sbatch") or {}:
        own = RESERVED.get(str(key).replace("_", "-").lstrip("-"))
        if own is not None:
            problems.append(f"{path}.sbatch.{key}: use {own}.")
    return problems


def minutes(time: int | str) -> int:
    """A time limit in whole minutes, rounded up as SLURM does: minutes, or one of SLURM's forms.

    Raises:
        ConfigError: it is none of them.
    """
    if isinstance(time, int):
        return time
    days, _, rest = time.rpartition("-")
    parts = rest.split(":")
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        raise ConfigError(f"time: {time!r} — allowed are minutes (90) and SLURM's forms '1:30:00', '2-12' and '2-12:00:00' (days first).")
    numbers = [int(part) for part in parts]
    if days:
        hours, mins, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, mins, seconds = numbers
    else:
        hours, (mins, seconds) = 0, (*numbers, 0)[:2]
    return max(1, math.ceil(((int(days or 0) * 24 + hours) * 60 + mins) + seconds / 60))


def gpu_count(gpus: int | str) -> int:
    """GPUs of a node: a number, or SLURM's ``type:number``.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(gpus, int) and gpus >= 0:
        return gpus
    found = re.fullmatch(r"(?:[\w.-]+:)?(\d+)", str(gpus))
    if found is None:
        raise ConfigError(f"launcher.gpus_per_node: {gpus!r} — allowed are a number and type:number, for example 8 or h200:8.")
    return int(found[1])


def plan_of(config: dict[str, Any]) -> Plan:
    """The plan of a training run: the roles, their jobs, and every rank.

    Raises:
        ConfigError: ``launcher.roles`` names a role that the run does not have, or a device that the nodes do not offer.
    """
    launcher, roles = config["launcher"], roles_of(config)
    own = launcher.get("roles") or {}
    unknown = sorted(set(own) - {role.name for role in roles})
    if unknown:
        raise ConfigError(f"launcher.roles.{unknown[0]}: this run has the roles {', '.join(role.name for role in roles)}.")
    jobs = [_job(role, {**_settings(launcher), **own.get(role.name, {})}, config) for role in roles]
    if launcher["pack"] and (len(jobs) > 1 or jobs[0].instances > 1):
        jobs = [_packed(jobs)]
    devices = {role.name: _device(role, config, {**launcher, **own.get(role.name, {})}) for role in roles}
    segments = [segment for job in jobs for segment in job.segments]
    return Plan(
        launcher="slurm",
        roles=tuple(_role(role, segments, devices[role.name]) for role in roles),
        processes=tuple(_process(segment, rank) for segment in segments for rank in range(segment.nodes * segment.processes)),
        env={} if config["num_threads"] is None else {"OMP_NUM_THREADS": str(config["num_threads"])},
        files=(*FILES, "jobs.json", "jobs/", "logs/latest/rank_0.log"),
        grace_seconds=0.0,
        jobs=tuple(jobs),
    )


def command_job(config: dict[str, Any]) -> JobPlan:
    """The job of a command that is no training run: one task, with one GPU if the nodes have any."""
    launcher = _settings(config["launcher"])
    gpus = launcher["gpus_per_node"]
    one = re.sub(r"\d+$", "1", str(gpus)) if gpu_count(gpus) else 0
    return JobPlan(config["command"].replace("_", "-"), 1, 1, one if isinstance(gpus, str) else int(one), 1, (), _kept(launcher))


def _settings(launcher: dict[str, Any]) -> dict[str, Any]:
    return {key: launcher[key] for key in ROLE_KEYS}


def _kept(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in ROLE_KEYS if key not in ("nodes", "gpus_per_node", "tasks_per_node")}


def _job(role: Role, settings: dict[str, Any], config: dict[str, Any]) -> JobPlan:
    nodes = settings["nodes"] if role.leads or "nodes" in ((config["launcher"].get("roles") or {}).get(role.name) or {}) else role.nodes
    gpus = settings["gpus_per_node"] if (role.device or config["device"]) != "cpu" else 0
    tasks = settings["tasks_per_node"] or role.processes or max(1, gpu_count(gpus))
    if not role.leads and role.processes and "tasks_per_node" not in ((config["launcher"].get("roles") or {}).get(role.name) or {}):
        tasks = role.processes
    if gpu_count(gpus) and tasks > gpu_count(gpus):
        raise ConfigError(
            f"launcher.tasks_per_node: {tasks} ranks on nodes with gpus_per_node={gpus}; a rank needs a GPU of its own. "
            f"Set launcher.tasks_per_node={gpu_count(gpus)} or device=cpu."
        )
    instances = settings.get(ROLE_COUNT, role.instances)
    segments = tuple(Segment(role.name, instance, nodes, tasks) for instance in range(instances))
    return JobPlan(role.name, nodes, tasks, gpus, instances, segments, _kept(settings))


def _packed(jobs: list[JobPlan]) -> JobPlan:
    """One allocation for all roles, the leader on its first nodes. Its nodes are equal, so they are what the largest role needs."""
    largest = max(jobs, key=lambda job: (gpu_count(job.gpus_per_node), job.tasks_per_node))
    segments = tuple(segment for job in jobs for segment in job.segments)
    tasks = max(job.tasks_per_node for job in jobs)
    return JobPlan(PACK, sum(s.nodes for s in segments), tasks, largest.gpus_per_node, 1, segments, jobs[0].settings)


def _device(role: Role, config: dict[str, Any], settings: dict[str, Any]) -> str:
    wanted = role.device or config["device"]
    gpus = gpu_count(settings["gpus_per_node"])
    if wanted == "auto":
        return "cuda" if gpus else "cpu"
    if wanted.startswith("cuda") and not gpus:
        raise ConfigError(
            f"device: {wanted!r}, but launcher.gpus_per_node=0. Set launcher.gpus_per_node to the GPUs of a node, or device=cpu."
        )
    return wanted.split(":")[0]


def _role(role: Role, segments: list[Segment], device: str) -> RolePlan:
    mine = [segment for segment in segments if segment.role == role.name]
    return RolePlan(role.name, mine[0].nodes * mine[0].processes, device, len(mine), mine[0].nodes)


def _process(segment: Segment, rank: int) -> ProcessPlan:
    command = ("python", "-m", "specforge.launch.worker", "--run-dir", "{run_dir}", "--role", segment.role)
    return ProcessPlan(segment.role, rank, segment.nodes * segment.processes, rank % segment.processes, command, {}, segment.instance)
