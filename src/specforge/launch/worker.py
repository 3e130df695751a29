"""One process of a run: reads the frozen configuration, becomes one rank of its role, and works.

    python -m specforge.launch.worker --run-dir outputs/<name>/<run>
    torchrun --nproc-per-node 8 -m specforge.launch.worker --run-dir outputs/<name>/<run>
    srun --ntasks-per-node 8 python -m specforge.launch.worker --run-dir outputs/<name>/<run>

It never composes a configuration, so nothing that changes in conf/ after the start can reach a run.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import random
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specforge.errors import ConfigError, SpecForgeError
from specforge.launch.env import RankFacts, rank_facts, task_facts
from specforge.launch.plan import device_type, visible_gpus
from specforge.launch.roles import TRAINER, role_named, roles_of

PARENT_VARIABLE = "SPECFORGE_PARENT_PID"


def run_role(run_dir: Path, role: str = TRAINER, facts: RankFacts | None = None, instance: int = 0) -> int:
    """Set up this rank (threads, device, seed, group), run the role, leave the group; returns the exit code.

    ``facts`` null reads torchrun's variables from the environment, or is alone.
    """
    from specforge.config.freeze import read_config
    from specforge.distributed.groups import open_group

    config = read_config(run_dir)
    chosen = role_named(config, role)
    facts = rank_facts(os.environ) if facts is None else facts
    device = choose_device(chosen.device or config["device"], facts)
    set_threads(config["num_threads"], facts, device.type)
    set_seed(config["seed"])
    module, function = chosen.run.split(":")
    work = functools.partial(getattr(importlib.import_module(module), function), config, run_dir)
    group = open_group(facts, device, config["parallel"]["timeout_minutes"])
    try:
        if len(roles_of(config)) == 1:
            return int(work(group, device))
        from specforge.launch.membership import work_together

        return work_together(lambda: int(work(group, device)), run_dir, chosen, roles_of(config)[0], instance, group)
    finally:
        group.close()


def choose_device(configured: str, facts: RankFacts) -> Any:
    """The torch device of this rank; CUDA ranks take the GPU of their local rank and make it the current one."""
    import torch

    gpus = visible_gpus()
    if device_type(configured, gpus) == "cpu":
        return torch.device("cpu")
    index = int(configured.split(":")[1]) if ":" in configured else facts.local_rank
    if facts.source == "slurm" and gpus == 1:
        index = 0  # a cluster may show each task its own GPU only
    if index >= gpus:
        raise ConfigError(f"device: rank {facts.rank} needs cuda:{index}, and torch sees {gpus} CUDA devices. Lower launcher.processes.")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def set_threads(configured: int | None, facts: RankFacts, device_kind: str) -> None:
    """``num_threads`` if set; else CPU ranks that share this machine share its cores, and anything else keeps torch's choice."""
    import torch

    if configured is not None:
        torch.set_num_threads(configured)
    elif device_kind == "cpu" and facts.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // facts.local_world_size))


def set_seed(seed: int) -> None:
    """Seed every global generator alike on all ranks, so that they initialise the same draft."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def end_with_parent(environ: Mapping[str, str] = os.environ) -> None:
    """Ask the kernel for a SIGTERM when the launcher dies, however it dies, so that no rank is left alone (Linux only)."""
    if PARENT_VARIABLE not in environ or not sys.platform.startswith("linux"):
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != int(environ[PARENT_VARIABLE]):  # it died before the request was made
        os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specforge.launch.worker", description="Run one rank of a frozen run folder.")
    parser.add_argument("--run-dir", type=Path, required=True, help="a run folder with config.yaml")
    parser.add_argument("--role", default=TRAINER, help="which kind of process of the run this is")
    parser.add_argument("--instance", type=int, default=0, help="number of this instance of a role that has several")
    options = parser.parse_args(arguments)
    end_with_parent()
    try:
        return run_role(options.run_dir, options.role, task_facts(os.environ), options.instance)
    except SpecForgeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
