"""The run folder: a frozen configuration that workers read and never compose, with what is needed to know how it came about.

``config.yaml`` holds the resolved values at its root, beside ``format_version``, ``command`` and ``choices``; ``overrides.yaml`` the
command line; ``env.json`` commit, versions, host and device; ``plan.json`` the processes.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import json
import os
import platform
import re
import socket
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from specforge import __version__
from specforge.errors import ConfigError, RunError

FORMAT_VERSION = 1
CONFIG_FILE = "config.yaml"

# Two runs that differ in these only are the same experiment. Prefixes of dotted keys.
EXCLUDED_FROM_SIGNATURE: tuple[str, ...] = (
    "name",
    "output_dir",
    "cache_dir",
    "run",
    "launcher",
    "tracker",
    "num_threads",
    "target.resolved_path",
    "format_version",
    "command",
    "choices",
)
_HEADER = "# Frozen by specforge: this run reads nothing else. Change a value with: specforge {command} run={run_dir} key=value\n"
_PACKAGES = ("torch", "transformers", "hydra-core", "omegaconf", "safetensors", "pydantic", "numpy", "sglang", "triton", "gguf")


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-4 as a number, as Hydra does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"), list("-+0123456789.")
)


def signature(config: dict[str, Any]) -> str:
    """Hex digest of what a run computes: the resolved configuration without paths, names, launcher and tracker."""
    from specforge.config.compose import flatten

    kept = {k: v for k, v in flatten(config).items() if not is_excluded(k, EXCLUDED_FROM_SIGNATURE)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def is_excluded(key: str, prefixes: Sequence[str]) -> bool:
    """Whether a dotted key is one of ``prefixes`` or lies under one."""
    return any(key == p or key.startswith(f"{p}.") for p in prefixes)


def make_run_folder(config: dict[str, Any]) -> Path:
    """A new, empty ``<output_dir>/<name>/<time>-<hash>``; never an existing one."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{signature(config)[:8]}"
    parent = Path(config["output_dir"]).expanduser().absolute() / config["name"]
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        folder = parent / f"{stem}{suffix}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue  # two runs of one configuration in the same second
        except OSError as error:
            raise RunError(f"output_dir: {parent} cannot be written ({error.strerror}). Choose another output_dir.") from error
    raise RunError(f"output_dir: {parent} holds a hundred runs of this second; wait a moment and start again.")


def freeze(
    run_dir: Path, config: dict[str, Any], *, command: str, choices: dict[str, str | None], overrides: Sequence[str]
) -> dict[str, Any]:
    """Write the run's files (all but plan.json) and return the frozen configuration as a worker will read it.

    A configuration that is already there, because the run is being continued, is kept beside as ``config.<n>.yaml``.
    """
    frozen = {"format_version": FORMAT_VERSION, "command": command, "choices": dict(choices), **copy.deepcopy(config)}
    text = _HEADER.format(command=command, run_dir=run_dir.name) + yaml.safe_dump(frozen, sort_keys=False, allow_unicode=True, width=140)
    path = run_dir / CONFIG_FILE
    if path.exists() and path.read_text() != text:
        number = sum(1 for _ in run_dir.glob("config.*.yaml")) + 1
        write_atomic(run_dir / f"config.{number}.yaml", path.read_text())
    write_atomic(path, text)
    write_atomic(run_dir / "overrides.yaml", yaml.safe_dump(list(overrides), allow_unicode=True, width=140))
    write_atomic(run_dir / "env.json", json.dumps(environment(str(config.get("device", "auto"))), indent=2) + "\n")
    return frozen


def write_plan(run_dir: Path, plan: Any) -> None:
    """Write ``plan.json``; ``plan`` is plain data."""
    write_atomic(run_dir / "plan.json", json.dumps(plan, indent=2, default=str) + "\n")


def read_config(run_dir: Path) -> dict[str, Any]:
    """The frozen configuration of a run folder, with ``format_version``, ``command`` and ``choices`` beside the values.

    Raises:
        ConfigError: no such run, damaged file, or a format version of another release.
    """
    return read_config_file(Path(run_dir) / CONFIG_FILE, run_dir)


def read_config_file(path: Path, run_dir: Path | str) -> dict[str, Any]:
    """As :func:`read_config`, for a frozen file of any name."""
    if not path.is_file():
        near = sorted(p.parent.name for p in path.parent.parent.glob(f"*/{CONFIG_FILE}"))[-3:] if path.parent.parent.is_dir() else []
        hint = f" Runs beside it: {', '.join(near)}." if near else " A run folder is outputs/<name>/<time>-<hash>."
        raise ConfigError(f"run: {run_dir} — is not a run folder ({path.name} is not there).{hint}")
    config = load_yaml(path)
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{path}: format_version {version!r} — this release reads {FORMAT_VERSION}. "
            "Use the release that wrote the run (env.json names it), or start a new run with the overrides in overrides.yaml."
        )
    return config


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML file whose root is a mapping, as plain containers."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not readable as YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds {type(data).__name__} in place of keys and values.")
    return data


def write_atomic(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written ({error.strerror}). Free some space or choose another output_dir.") from error


@contextlib.contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Hold the run folder; a second run in it is refused. The kernel releases the lock when the process dies in any way."""
    path = run_dir / ".lock"
    with open(path, "a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            owner = handle.read().strip() or "another process"
            raise RunError(f"run: {run_dir} — is in use by {owner}. Wait for it, stop it, or start a new run without run=.") from None
        except OSError:
            pass  # a file system without locks: better an unguarded run than none
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}")
        handle.flush()
        yield


def environment(device: str) -> dict[str, Any]:
    """Facts about code and machine that explain a result later."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "specforge": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": git_state(),
        "python": platform.python_version(),
        "packages": versions,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": device,
        "accelerators": accelerators(),
    }


def git_state() -> dict[str, Any]:
    """Commit and whether files differ from it; nulls outside of a checkout."""
    import subprocess

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def accelerators() -> list[str]:
    """Names of the CUDA devices that torch sees; empty without torch in this process or without a device."""
    import sys

    torch = sys.modules.get("torch")  # never import it for a note in a file
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
