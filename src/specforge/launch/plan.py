"""Which processes a run is made of: a pure function of the frozen configuration, written to ``plan.json`` before anything starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specforge.errors import ConfigError

TRAINER = "trainer"


@dataclass(frozen=True)
class ProcessPlan:
    """One process: ``command`` has ``{run_dir}`` for the run folder and ``python`` for this interpreter; ``env`` is added to ours."""

    role: str
    rank: int
    world_size: int
    local_rank: int
    command: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True)
class RolePlan:
    """A kind of process and how many of it there are, on which device."""

    role: str
    processes: int
    device: str  # "cpu" or "cuda"


@dataclass(frozen=True)
class Plan:
    """The whole run. ``files`` are the paths that it will make, relative to the run folder."""

    launcher: str
    roles: tuple[RolePlan, ...]
    processes: tuple[ProcessPlan, ...]
    env: dict[str, str]
    files: tuple[str, ...]
    grace_seconds: float

    @property
    def in_process(self) -> bool:
        """Whether the run stays in the process that asked for it."""
        return len(self.processes) == 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(config: dict[str, Any], num_gpus: int | None = None) -> Plan:
    """The plan of a training run. ``num_gpus`` is what this machine shows; null asks torch (the only fact not in ``config``).

    Raises :class:`ConfigError` when the ranks cannot be placed or the global batch has fewer samples than there are ranks.
    """
    launcher = config["launcher"]
    if num_gpus is None:
        num_gpus = visible_gpus()
    device = device_type(config["device"], num_gpus)
    # An explicit index (cuda:1) means that one device.
    one_device = ":" in config["device"]
    available = 1 if device == "cpu" or one_device else num_gpus
    processes = launcher["processes"] if launcher["processes"] is not None else available
    if device == "cuda" and processes > available:
        raise ConfigError(
            f"launcher.processes: {processes} ranks need as many GPUs, and device={config['device']} shows {available}. "
            f"Set launcher.processes={max(available, 1)} or device=cpu."
        )
    batch = config["trainer"]["global_batch_size"]
    if processes > batch:
        raise ConfigError(
            f"trainer.global_batch_size: {batch} samples cannot be shared by {processes} ranks. Raise it to at least {processes}."
        )
    command = ("python", "-m", "specforge.launch.worker", "--run-dir", "{run_dir}", "--role", TRAINER)
    ranks = tuple(
        ProcessPlan(
            TRAINER,
            rank,
            processes,
            rank,
            command,
            {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)},
        )
        for rank in range(processes)
    )
    logs = tuple(f"logs/latest/rank_{rank}.log" for rank in range(processes)) if processes > 1 else ()
    return Plan(
        launcher="local",
        roles=(RolePlan(TRAINER, processes, device),),
        processes=ranks,
        env={} if config["num_threads"] is None else {"OMP_NUM_THREADS": str(config["num_threads"])},
        files=("config.yaml", "plan.json", "metrics.jsonl", "checkpoints/latest", "checkpoints/best", *logs),
        grace_seconds=launcher["grace_seconds"],
    )


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
