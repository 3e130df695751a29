"""``specforge plan``: a dry run of ``train`` that prints what would be started and what it would need, and leaves nothing behind.

Exit code 1 when something would not fit, else 0.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from specforge.launch.estimate import Estimate, estimate
from specforge.launch.frontend import Ready, make_plan
from specforge.launch.plan import Plan


def show(ready: Ready) -> int:
    """Print the plan of a checked configuration."""
    from rich.console import Console

    console = Console()
    plan: Plan = make_plan(ready.config)
    role = plan.roles[0]
    needs = estimate(ready.config, ready.choices, ready.facts, role.processes, role.device)
    _print_choices(console, ready)
    _print_processes(console, ready, plan)
    _print_sizes(console, needs)
    # Memory of this machine says nothing about the nodes of a cluster.
    here = Estimate(disk=needs.disk) if plan.jobs else needs
    tight = too_large(here, role.device, role.processes, Path(ready.config["output_dir"]).expanduser())
    for line in [*(f"note: {n}" for n in [*ready.notes, *needs.notes]), *(f"warning: {w}" for w in ready.warnings)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in tight:
        console.print(f"would not fit: {line}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    if not tight and needs.memory:
        console.print("everything fits; nothing was written.", style="green")
    return 1 if tight else 0


def too_large(needs: Estimate, device: str, processes: int, output_dir: Path) -> list[str]:
    """What exceeds this machine's memory or the disk of the run folder, each with the override that helps."""
    found = []
    wanted, there = sum(needs.memory.values()), device_memory(device)
    if device == "cpu":
        wanted *= processes  # ranks of one machine share its memory
    if wanted and there and wanted > there:
        found.append(
            f"memory: about {gigabytes(wanted)} of {gigabytes(there)}. Raise trainer.micro_batches, lower trainer.global_batch_size or "
            "data.max_length, or use topology=offline so that the target is not loaded."
        )
    folder = next((p for p in (output_dir.absolute(), *output_dir.absolute().parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(folder).free
    checkpoints = sum(size for name, size in needs.disk.items() if name.startswith("checkpoints"))
    if checkpoints > free:
        found.append(
            f"disk: checkpoints of about {gigabytes(checkpoints)}, and {folder} has {gigabytes(free)} free. "
            "Lower trainer.keep_checkpoints or change output_dir."
        )
    return found


def device_memory(device: str) -> int:
    """Bytes of the smallest visible GPU, or of this machine's memory; 0 if unknown."""
    if device == "cuda":
        import torch

        return min((torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())), default=0)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def _print_choices(console: Any, ready: Ready) -> None:
    table = _table("options", "group", "option")
    for group, option in ready.choices.items():
        if option is not None:
            _row(table, group, str(option))
    console.print(table)


def _print_processes(console: Any, ready: Ready, plan: Plan) -> None:
    table = _table("processes", "role", "number", "device", "command")
    for role in plan.roles:
        command = (
            "this process"
            if plan.in_process and not plan.jobs
            else " ".join(next(p.command for p in plan.processes if p.role == role.role))
        )
        _row(table, role.role, str(role.processes), role.device, command)
    console.print(table)
    if plan.jobs:
        jobs = _table("SLURM jobs", "job", "number", "nodes", "tasks a node", "GPUs a node", "time", "partition")
        for job in plan.jobs:
            cells = (
                job.instances,
                job.nodes,
                job.tasks_per_node,
                job.gpus_per_node,
                job.settings["time"],
                job.settings["partition"] or "default",
            )
            _row(jobs, job.name, *map(str, cells))
        console.print(jobs)
    folder = f"{ready.config['output_dir']}/{ready.config['name']}/<time>-<hash>" if ready.run_dir is None else str(ready.run_dir)
    console.print(f"run folder: {folder}", markup=False, highlight=False)


def _print_sizes(console: Any, needs: Estimate) -> None:
    if needs.memory:
        table = _table("memory per device (estimate)", "what", "size")
        for name, size in needs.memory.items():
            _row(table, name, gigabytes(size))
        _row(table, "sum", gigabytes(sum(needs.memory.values())))
        console.print(table)
    if needs.disk:
        table = _table("disk (estimate)", "what", "size")
        for name, size in needs.disk.items():
            _row(table, name, gigabytes(size))
        console.print(table)
    facts = [
        ("draft parameters", None if needs.draft_parameters is None else f"{needs.draft_parameters / 1e6:.1f} M"),
        ("target parameters", None if needs.target_parameters is None else f"{needs.target_parameters / 1e6:.1f} M"),
        ("samples", None if needs.corpus is None else f"about {needs.corpus.rows}"),
        ("tokens an epoch", None if needs.corpus is None else f"about {needs.corpus.tokens}"),
        ("optimizer steps", None if needs.steps is None else str(needs.steps)),
        ("training time", None if needs.seconds is None else f"about {duration(needs.seconds)} (a rough guess from this machine's speed)"),
    ]
    table = _table("size of the run", "what", "value")
    for name, value in facts:
        if value is not None:
            _row(table, name, value)
    console.print(table)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(1, round(seconds))} seconds"


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Any, *cells: str) -> None:
    from rich.text import Text

    table.add_row(*(Text(cell) for cell in cells))
