"""A role's work inside of a run of several roles: the leader opens the attempt and ends it, the others join each attempt until the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specforge.distributed.groups import Group
from specforge.errors import SpecForgeError
from specforge.launch import rendezvous
from specforge.launch.heartbeat import Member, set_member
from specforge.launch.roles import Role
from specforge.training.preemption import StopSignals, exit_code

# How long a role waits for a trainer that has not begun, or that was preempted and waits in its queue.
PATIENCE_SECONDS = 24 * 3600.0


def work_together(work: Callable[[], int], run_dir: Path, role: Role, leader: Role, instance: int, group: Group) -> int:
    """Run ``work`` as a member of the run's rendezvous; returns its exit code. Collective over the role's ranks."""
    if role.leads:
        return _lead(work, run_dir, role, group)
    return _follow(work, run_dir, role, leader, instance, group)


def _lead(work: Callable[[], int], run_dir: Path, role: Role, group: Group) -> int:
    """The attempt ends with the leader: DONE when it finished, STOPPED when a signal cut it off and it will be continued."""
    attempt: rendezvous.Attempt = group.broadcast_object(rendezvous.lead(run_dir) if group.is_main else None)
    try:
        code = _as_member(work, attempt, role, 0, None, group, lambda: False)
    except BaseException as error:
        if group.is_main:
            interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
            attempt.end("STOPPED" if interrupted else "FAILED", f"{type(error).__name__}: {error}")
        raise
    if group.is_main:
        attempt.end("DONE" if code == 0 else ("STOPPED" if code > 128 else "FAILED"), "" if code == 0 else f"exit code {code}")
    return code


def _follow(work: Callable[[], int], run_dir: Path, role: Role, leader: Role, instance: int, group: Group) -> int:
    """Work in one attempt after the other until the run has ended or this process is asked to leave."""
    seen = 0
    with StopSignals() as signals:
        while True:
            attempt: Any = rendezvous.join(run_dir, seen, PATIENCE_SECONDS, _over(run_dir, seen, signals)) if group.is_main else None
            attempt = group.broadcast_object(attempt)
            if attempt is None:
                return exit_code(signals.received)
            seen = attempt.number
            try:
                code = _as_member(work, attempt, role, instance, leader.name, group, lambda: signals.requested)
            except SpecForgeError as error:
                if group.is_main:
                    attempt.end("FAILED", f"{role.name}-{instance}: {error}")
                raise
            if signals.requested:
                return exit_code(signals.received)
            ending = attempt.ending()
            if code != 0 or ending is None or ending.kind != "STOPPED":
                return code


def _over(run_dir: Path, seen: int, signals: StopSignals) -> Callable[[], bool]:
    """Nothing to wait for any more: a signal came, or the attempt that one would join is the run's end already."""

    def check() -> bool:
        if signals.requested:
            return True
        attempt = rendezvous.current(run_dir)
        ending = None if attempt is None or attempt.number <= seen else attempt.ending()
        return ending is not None and ending.kind != "STOPPED"

    return check


def _as_member(
    work: Callable[[], int],
    attempt: rendezvous.Attempt,
    role: Role,
    instance: int,
    leader: str | None,
    group: Group,
    stop: Callable[[], bool],
) -> int:
    member = Member(attempt, role.name, instance, leader=leader, stop=stop)
    set_member(member)
    try:
        if not group.is_main:
            return work()
        with member:
            return work()
    finally:
        set_member(None)
