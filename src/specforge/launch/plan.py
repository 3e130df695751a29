"""Which processes a run is made of: a pure function of the frozen configuration, written to ``plan.json`` before anything starts."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specforge.errors import ConfigError
from specforge.launch.env import Segment
from specforge.launch.roles import TRAINER, Role, roles_of

__all__ = ["TRAINER", "JobPlan", "Plan", "ProcessPlan", "RolePlan", "command_of", "device_type", "make_plan", "visible_gpus", "world_size"]


@dataclass(frozen=True)
class ProcessPlan:
    """One process: ``command`` has ``{run_dir}`` for the run folder and ``python`` for this interpreter; ``env`` is added to ours."""

    role: str
    rank: int
    world_size: int
    local_rank: int
    command: tuple[str, ...]
    env: dict[str, str]
    instance: int = 0


@dataclass(frozen=True)
class RolePlan:
    """A kind of process: ``instances`` independent groups of ``processes`` ranks each, on ``nodes`` machines, on which device."""

    role: str
    processes: int
    device: str  # "cpu" or "cuda"
    instances: int = 1
    nodes: int = 1


@dataclass(frozen=True)
class JobPlan:
    """One submission to a cluster: an allocation of equal nodes, ``instances`` of it as an array, and who works on which of its nodes."""

    name: str
    nodes: int
    tasks_per_node: int
    gpus_per_node: int | str
    instances: int
    segments: tuple[Segment, ...]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The whole run. ``files`` are the paths that it will make, relative to the run folder; ``jobs`` is empty on this machine."""

    launcher: str
    roles: tuple[RolePlan, ...]
    processes: tuple[ProcessPlan, ...]
    env: dict[str, str]
    files: tuple[str, ...]
    grace_seconds: float
    jobs: tuple[JobPlan, ...] = ()

    @property
    def in_process(self) -> bool:
        """Whether the run stays in the process that asked for it."""
        return len(self.processes) == 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


FILES = ("config.yaml", "plan.json", "metrics.jsonl", "checkpoints/latest", "checkpoints/best")


def make_plan(config: dict[str, Any], num_gpus: int | None = None) -> Plan:
    """The plan of a training run. ``num_gpus`` is what this machine shows; null asks torch (the only fact not in ``config``).

    Raises :class:`ConfigError` when the ranks cannot be placed or the global batch has fewer samples than there are ranks.
    """
    from specforge.config.build import component_class

    launcher = component_class(config["launcher"], config.get("plugins") or ())
    if getattr(launcher, "remote", False):
        plan: Plan = launcher.make_plan(config)
    else:
        plan = _local_plan(config, visible_gpus() if num_gpus is None else num_gpus)
    batch, processes = config["trainer"]["global_batch_size"], plan.roles[0].processes
    if processes > batch:
        raise ConfigError(
            f"trainer.global_batch_size: {batch} samples cannot be shared by {processes} ranks. Raise it to at least {processes}."
        )
    return plan


def world_size(config: dict[str, Any]) -> int:
    """Ranks of the trainer, for rules that look at a configuration before all of it is known to be good."""
    return make_plan({**config, "trainer": {"global_batch_size": 1 << 60}}).roles[0].processes


def _local_plan(config: dict[str, Any], num_gpus: int) -> Plan:
    launcher = config["launcher"]
    device = device_type(config["device"], num_gpus)
    roles = roles_of(config)
    others = roles[1:]
    kinds = {role.name: role.device or device for role in roles}
    taken = sum(role.instances * (role.processes or 1) for role in others if kinds[role.name] == "cuda")
    # An explicit index (cuda:1) means that one device.
    one_device = ":" in config["device"]
    available = 1 if device == "cpu" or one_device else num_gpus - taken
    processes = launcher["processes"] if launcher["processes"] is not None else available
    if device == "cuda" and (processes > available or processes < 1):
        shared = f", of which the other roles take {taken}" if taken else ""
        raise ConfigError(
            f"launcher.processes: {processes} ranks need as many GPUs, and device={config['device']} shows "
            f"{1 if one_device else num_gpus}{shared}. Set launcher.processes={max(available, 1)} or device=cpu."
        )
    ranks: list[ProcessPlan] = []
    gpus = _GpuNumbers(len(others) > 0 and device == "cuda" and not one_device)
    for role in roles:
        count = processes if role is roles[0] else role.processes or 1
        for instance in range(role.instances):
            ranks += _ranks(role, instance, count, gpus.take(count) if kinds[role.name] == "cuda" else {})
    many = len(ranks) > 1
    return Plan(
        launcher="local",
        roles=tuple(RolePlan(r.name, processes if r is roles[0] else r.processes or 1, kinds[r.name], r.instances) for r in roles),
        processes=tuple(ranks),
        env={} if config["num_threads"] is None else {"OMP_NUM_THREADS": str(config["num_threads"])},
        files=(*FILES, *(f"logs/latest/{log_name(rank.role, rank.instance, rank.rank)}" for rank in ranks if many)),
        grace_seconds=launcher["grace_seconds"],
    )


def _ranks(role: Role, instance: int, count: int, extra: dict[str, str]) -> list[ProcessPlan]:
    command: tuple[str, ...] = ("python", "-m", "specforge.launch.worker", "--run-dir", "{run_dir}", "--role", role.name)
    if role.instances > 1:
        command = (*command, "--instance", str(instance))
    ranks = []
    for rank in range(count):
        env = {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count), **extra}
        ranks.append(ProcessPlan(role.name, rank, count, rank, command, env, instance))
    return ranks


class _GpuNumbers:
    """Gives each group of ranks GPUs of its own, when several groups share this machine."""

    def __init__(self, shared: bool) -> None:
        self.shared, self.next = shared, 0

    def take(self, count: int) -> dict[str, str]:
        if not self.shared:
            return {}
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        numbers = range(self.next, self.next + count)
        self.next += count
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[n] if visible else str(n) for n in numbers)}


def log_name(role: str, instance: int, rank: int) -> str:
    """File of a rank's output in a folder of ``logs/``: ``rank_0.log`` of the trainer, ``producer-1-rank_0.log`` of another role."""
    return f"rank_{rank}.log" if role == TRAINER else f"{role}-{instance}-rank_{rank}.log"


def device_type(device: str, num_gpus: int) -> str:
    """``cpu`` or ``cuda`` for the configured ``device`` (auto, cpu, cuda, cuda:1)."""
    if device == "auto":
        return "cuda" if num_gpus else "cpu"
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device: {device!r} is not known. Allowed: auto, cpu, cuda, cuda:<index>.")
    if kind == "cuda" and not num_gpus:
        raise ConfigError(f"device: {device!r}, but torch sees no CUDA device here. Use device=auto or device=cpu.")
    return kind


def visible_gpus() -> int:
    """CUDA devices that torch sees, respecting CUDA_VISIBLE_DEVICES; does not initialise one."""
    import torch

    return torch.cuda.device_count()


def command_of(process: ProcessPlan, run_dir: Path, python: str) -> list[str]:
    """The process's command with its two placeholders filled."""
    return [python if part == "python" else part.replace("{run_dir}", str(run_dir)) for part in process.command]
