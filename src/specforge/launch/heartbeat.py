"""A process of a run with several roles: it beats while it lives, sees whether the leader does, and knows when to leave."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from specforge.errors import RunError
from specforge.launch.rendezvous import Attempt, Ending, Endpoint, read_json, write_json

BEAT_SECONDS = 2.0
# A process that was silent for this long is taken for dead. Long enough for a shared disk that stalls.
LEASE_SECONDS = 120.0


class Pulse:
    """Whether one process lives, by the reader's clock: its counter must have moved within the lease."""

    def __init__(self, path: Path, lease_seconds: float = LEASE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.lease_seconds, self.clock = path, lease_seconds, clock
        self._last: tuple[Any, float] = (None, clock())

    @property
    def alive(self) -> bool:
        """True until the lease has passed since the counter last moved, or since this object was made."""
        beat = (read_json(self.path) or {}).get("beat")
        if beat is not None and beat != self._last[0]:
            self._last = (beat, self.clock())
        return self.clock() - self._last[1] < self.lease_seconds


class Member:
    """This process (or, of a role with several ranks, its rank 0) in one attempt. A context: it beats from begin to end.

    ``stop`` says whether this process itself was asked to leave (a signal).
    """

    def __init__(
        self,
        attempt: Attempt,
        role: str,
        instance: int = 0,
        *,
        leader: str | None = None,
        beat_seconds: float = BEAT_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.attempt, self.role, self.instance = attempt, role, instance
        self.beat_seconds, self.lease_seconds, self._stop = beat_seconds, lease_seconds, stop
        self._leader = Pulse(self._path(leader, 0), lease_seconds) if leader is not None and leader != role else None
        self._pulses: dict[str, Pulse] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def announce(self, port: int, host: str | None = None, **facts: Any) -> Endpoint:
        """Tell the others where this instance listens and what it serves."""
        endpoint = Endpoint(self.role, self.instance, host or socket.gethostname(), port, os.getpid(), facts)
        self.attempt.write_endpoint(endpoint)
        return endpoint

    def alive(self, endpoint: Endpoint) -> bool:
        """Whether another instance still beats."""
        pulse = self._pulses.setdefault(endpoint.name, Pulse(self._path(endpoint.role, endpoint.instance), self.lease_seconds))
        return pulse.alive

    def ending(self) -> Ending | None:
        """Why to leave now: the attempt ended, the leader is silent, or a signal came; ``None`` to go on."""
        if (ending := self.attempt.ending()) is not None:
            return ending
        if self._stop():
            return Ending("STOPPED", "a signal")
        if self._leader is not None and not self._leader.alive:
            return Ending("STOPPED", f"the leader was silent for {self.lease_seconds:g} seconds")
        return None

    def __enter__(self) -> Member:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(self.beat_seconds + 1.0)

    def _path(self, role: str, instance: int) -> Path:
        return self.attempt.folder / "heartbeats" / f"{role}-{instance}.json"

    def _beat(self) -> None:
        beat = 0
        while True:
            beat += 1
            # A disk that is full or away for a moment is no reason to end; the others judge by the silence.
            with contextlib.suppress(RunError):
                write_json(self._path(self.role, self.instance), {"beat": beat, "host": socket.gethostname(), "pid": os.getpid()})
            if self._over.wait(self.beat_seconds):
                return


_MEMBER: Member | None = None


def member() -> Member:
    """The membership of this process, set by the worker for a run of several roles."""
    if _MEMBER is None:
        raise RuntimeError("this process takes part in no rendezvous: its run has one role")
    return _MEMBER


def set_member(value: Member | None) -> None:
    global _MEMBER
    _MEMBER = value
