"""Signals that ask a run to stop: the first sets a flag, a second ends the process, and SLURM's echo of the first is no second."""

from __future__ import annotations

import os
import signal
import time

import pytest

from specforge.training.preemption import SETTLE_SECONDS, StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_the_first_signal_sets_a_flag_and_the_handlers_come_back(number):
    before = signal.getsignal(number)
    with StopSignals(0.0) as signals:
        assert not signals.requested
        os.kill(os.getpid(), number)
        assert signals.received == number and signals.requested
    assert signal.getsignal(number) == before


def end_of(settle: float, first: int, second: int, pause: float) -> int:
    """Exit code of a process that gets two signals, negative for the one that killed it; 0 when it lived through both."""
    child = os.fork()
    if not child:
        with StopSignals(settle) as signals:
            os.kill(os.getpid(), first)
            time.sleep(pause)
            os.kill(os.getpid(), second)
            time.sleep(0.05)
            os._exit(0 if signals.received == first else 99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    "settle, first, second, pause, code",
    [
        (0.0, "SIGTERM", "SIGTERM", 0.0, -signal.SIGTERM),
        (0.0, "SIGUSR2", "SIGTERM", 0.0, -signal.SIGTERM),
        (5.0, "SIGTERM", "SIGTERM", 0.0, 0),  # SLURM tells the step and the job
        (5.0, "SIGUSR2", "SIGTERM", 0.0, 0),  # SLURM preempts
        (0.2, "SIGUSR2", "SIGTERM", 0.4, -signal.SIGTERM),  # the time limit itself
        (5.0, "SIGTERM", "SIGINT", 0.0, -signal.SIGINT),  # a person
    ],
)
def test_a_second_signal_ends_at_once_unless_it_is_an_echo(settle, first, second, pause, code):
    assert end_of(settle, signal.Signals[first], signal.Signals[second], pause) == code


def test_only_inside_of_a_job_there_are_echoes(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert StopSignals()._settle == 0.0
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert StopSignals()._settle == SETTLE_SECONDS
