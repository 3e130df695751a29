"""Stopping politely: a signal sets a flag, the ranks agree at a step boundary, the trainer saves and leaves.

SIGTERM and SIGUSR2 come from a cluster (the latter before a time limit), SIGINT from Ctrl-C. A second signal ends the process at
once, for the user who does not want to wait for a save. SLURM says the same thing twice within a moment (SIGTERM to the step and to the
job, or SIGUSR2 and then SIGTERM when it preempts): inside of a job, what comes in the first seconds is one request.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

import torch

from specforge.distributed.groups import Group

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
SETTLE_SECONDS = 5.0


class StopSignals:
    """A context in which the watched signals only set :attr:`received`; the earlier handlers come back at its end.

    Outside the main thread Python cannot install handlers: the context then watches nothing.
    """

    def __init__(self, settle_seconds: float | None = None) -> None:
        self.received = 0  # the signal's number, 0 for none
        self._settle = (SETTLE_SECONDS if "SLURM_JOB_ID" in os.environ else 0.0) if settle_seconds is None else settle_seconds
        self._first = 0.0
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()

    @property
    def requested(self) -> bool:
        return self.received != 0

    def __enter__(self) -> StopSignals:
        try:
            for number in WATCHED:
                self._previous[number] = signal.signal(number, self._handle)
        except ValueError:
            self._previous.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and os.getpid() == self._pid and number != signal.SIGINT and time.monotonic() - self._first < self._settle:
            return
        if self.received or os.getpid() != self._pid:
            # A second signal, or a forked child that inherited the handler: do what the signal does by default.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received, self._first = number, time.monotonic()


def agree(signals: StopSignals, group: Group, device: torch.device) -> int:
    """The signal that some rank received, the same on every rank; 0 when none did (then a rank's time limit asked). Collective."""
    number = torch.tensor([signals.received], dtype=torch.int64, device=device)
    group.all_reduce_max(number)
    return int(number.item())


def exit_code(number: int) -> int:
    """The shell's convention, 128 + signal (130 for Ctrl-C); 0 when there was none."""
    return 128 + number if number else 0
