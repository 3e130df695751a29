"""Where the roles of one run find each other: a folder of small files, one folder an attempt of the leading role.

    control/current                       number of the newest attempt
    control/attempt_3/endpoints/producer-1.json   host, port, pid and the facts that both sides must agree on
    control/attempt_3/heartbeats/producer-1.json  a counter that grows while the process lives
    control/attempt_3/DONE | FAILED | STOPPED     how the attempt ended, with a reason

The leader makes the attempt, so a restarted trainer is never answered by a process that still talks to the one before it. Every file is
written under another name and renamed. Liveness is judged by the reader's own clock (the counter must move), so the clocks of two
machines need not agree.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from specforge.config.freeze import write_atomic
from specforge.errors import ConfigError, RunError

PROTOCOL_VERSION = 1
CONTROL = "control"
Kind = Literal["DONE", "FAILED", "STOPPED"]
KINDS: tuple[Kind, ...] = ("DONE", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Endpoint:
    """Where an instance of a role can be reached. ``facts`` are compared by who uses it: target, revision, captured layers, …"""

    role: str
    instance: int
    host: str
    port: int
    pid: int
    facts: dict[str, Any] = field(default_factory=dict)
    protocol: int = PROTOCOL_VERSION

    @property
    def name(self) -> str:
        return f"{self.role}-{self.instance}"


@dataclass(frozen=True)
class Ending:
    """Why a role should leave. ``STOPPED`` is an attempt that will be continued by another one; the other kinds end the run."""

    kind: Kind
    reason: str


@dataclass(frozen=True)
class Attempt:
    """One attempt's folder, as any process sees it."""

    number: int
    folder: Path

    def write_endpoint(self, endpoint: Endpoint) -> None:
        """Announce an instance; a second announcement replaces the first."""
        write_json(self.folder / "endpoints" / f"{endpoint.name}.json", asdict(endpoint))

    def endpoints(self, role: str) -> list[Endpoint]:
        """The instances of a role that have announced themselves, by number."""
        found = []
        for path in (self.folder / "endpoints").glob(f"{role}-*.json"):
            data = read_json(path)
            if data is not None and data.get("role") == role:
                found.append(Endpoint(**data))
        return sorted(found, key=lambda endpoint: endpoint.instance)

    def end(self, kind: Kind, reason: str = "") -> None:
        """Say how the attempt ended. The first word counts: a failure is not overwritten by the end that it causes."""
        if self.ending() is None:
            write_json(self.folder / kind, {"reason": reason, "host": socket.gethostname(), "pid": os.getpid()})

    def ending(self) -> Ending | None:
        """How the attempt ended, if it did."""
        for kind in KINDS:
            if (self.folder / kind).exists():
                return Ending(kind, str((read_json(self.folder / kind) or {}).get("reason", "")))
        return None

    def wait_for(
        self,
        role: str,
        count: int,
        timeout_seconds: float,
        *,
        expects: Mapping[str, Any] | None = None,
        report: Callable[[str], None] = print,
        poll_seconds: float = 0.2,
    ) -> list[Endpoint]:
        """Block until ``count`` instances of a role have announced themselves.

        Raises:
            ConfigError: an instance speaks another protocol or has another value for a key of ``expects``; both are named.
            RunError: not all came in time, or the attempt ended meanwhile; the message says how many of how many came.
        """
        began, said = time.monotonic(), -1
        while True:
            found = self.endpoints(role)
            for endpoint in found:
                _require_agreement(endpoint, expects or {})
            if len(found) >= count:
                return found
            if len(found) != said:
                report(f"waiting for {role}: {len(found)} of {count} are there")
                said = len(found)
            if (ending := self.ending()) is not None:
                raise RunError(f"{role}: the attempt ended ({ending.kind}: {ending.reason or 'no reason given'}) while waiting for it.")
            if time.monotonic() - began > timeout_seconds:
                raise RunError(
                    f"{role}: {len(found)} of {count} came within {timeout_seconds:g} seconds. See its job and its log in the run folder, "
                    "and start the run again."
                )
            time.sleep(poll_seconds)


def _require_agreement(endpoint: Endpoint, expects: Mapping[str, Any]) -> None:
    if endpoint.protocol != PROTOCOL_VERSION:
        raise ConfigError(
            f"{endpoint.name} on {endpoint.host} speaks protocol {endpoint.protocol}, this process {PROTOCOL_VERSION}. "
            "Start all roles of a run from one release."
        )
    for key, value in expects.items():
        if endpoint.facts.get(key) != value:
            raise ConfigError(
                f"{endpoint.name} on {endpoint.host} has {key}={endpoint.facts.get(key)!r}, this run needs {value!r}. "
                "Start both from one configuration."
            )


def lead(run_dir: Path) -> Attempt:
    """Begin a new attempt; only the leading role's rank 0 calls this. What an older attempt left is told that it is over."""
    control = run_dir / CONTROL
    control.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in control.iterdir() if (match := re.fullmatch(r"attempt_(\d+)", path.name))]
    if numbers:
        Attempt(max(numbers), control / f"attempt_{max(numbers)}").end("STOPPED", "a newer attempt began")
    attempt = Attempt(max(numbers, default=0) + 1, control / f"attempt_{max(numbers, default=0) + 1}")
    for name in ("endpoints", "heartbeats"):
        (attempt.folder / name).mkdir(parents=True, exist_ok=True)
    write_atomic(control / "current", f"{attempt.number}\n")
    return attempt


def current(run_dir: Path) -> Attempt | None:
    """The newest attempt, ``None`` before the first."""
    try:
        number = int((run_dir / CONTROL / "current").read_text())
    except (OSError, ValueError):
        return None
    return Attempt(number, run_dir / CONTROL / f"attempt_{number}")


def forget(run_dir: Path) -> None:
    """Before a run is started anew: what its earlier attempts said, such as DONE, says nothing to the roles that start now."""
    (run_dir / CONTROL / "current").unlink(missing_ok=True)


def join(run_dir: Path, after: int, timeout_seconds: float, stop: Callable[[], bool] = lambda: False) -> Attempt | None:
    """Wait for an attempt with a higher number than ``after`` that has not ended; ``None`` when ``stop`` says so.

    Raises:
        RunError: none came in time.
    """
    began = time.monotonic()
    while not stop():
        attempt = current(run_dir)
        if attempt is not None and attempt.number > after and attempt.ending() is None:
            return attempt
        if time.monotonic() - began > timeout_seconds:
            raise RunError(
                f"no trainer began in {run_dir} within {timeout_seconds / 60:g} minutes. See its job (specforge status), and start the "
                "run again when it is in order: specforge run=<run folder>."
            )
        time.sleep(0.2)
    return None


def write_json(path: Path, data: dict[str, Any]) -> None:
    """A small file, whole or not there."""
    write_atomic(path, json.dumps(data) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """A file's content; ``None`` while a slow shared disk does not show all of it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
