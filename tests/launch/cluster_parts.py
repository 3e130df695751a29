"""Plug-ins of the cluster tests: a schedule that can be held from outside, and a topology with a second role.

``Paced`` changes no number, so a run that was held, stopped and continued must end with the weights of one that never was.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from specforge.launch.heartbeat import member
from specforge.launch.roles import Role
from specforge.topology.colocated import ColocatedTopology
from specforge.training.preemption import StopSignals
from specforge.training.scheduler import Constant


class Paced(Constant):
    """Stands still before the update after ``hold_at`` steps, until the file ``hold`` is gone or the run is asked to stop."""

    def __init__(self, *, warmup_steps: int | None, warmup_ratio: float, hold: str, hold_at: int) -> None:
        super().__init__(warmup_steps=warmup_steps, warmup_ratio=warmup_ratio)
        self.hold, self.hold_at = Path(hold), hold_at

    def factor(self, step: int, total_steps: int) -> float:
        while step >= self.hold_at and self.hold.exists():
            if _asked_to_stop():
                self.hold.unlink()  # held once; the next attempt goes through
            time.sleep(0.05)
        return super().factor(step, total_steps)


def _asked_to_stop() -> bool:
    watcher = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return isinstance(watcher, StopSignals) and watcher.requested


class WithProducers(ColocatedTopology):
    """The colocated topology, whose trainer first waits for a second role and is told something by each of its instances."""

    @classmethod
    def roles(cls, config: dict[str, Any]) -> tuple[Role, ...]:
        return (Role("producer", "cluster_parts:produce", instances=2, processes=1, device="cpu"),)

    def open(self, **arguments: Any) -> Any:
        me = member()
        found = me.attempt.wait_for("producer", 2, 120.0, expects={"layers": [1, 2]})
        print(f"attempt {me.attempt.number}: {[endpoint.name for endpoint in found]}", flush=True)
        return super().open(**arguments)


def produce(config: dict[str, Any], run_dir: Path, group: Any, device: Any) -> int:
    """Announce this instance, then live until the run has ended."""
    me = member()
    me.announce(1000 + me.instance, host="127.0.0.1", layers=[1, 2])
    print(f"producer {me.instance} in attempt {me.attempt.number}, world {group.world_size}", flush=True)
    while (ending := me.ending()) is None:
        time.sleep(0.1)
    print(f"left: {ending.kind} {ending.reason}", flush=True)
    return 0
