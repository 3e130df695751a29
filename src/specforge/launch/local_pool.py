"""Several runs side by side on this machine: each in a process of its own, with its share of the GPUs or of the cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

from specforge.errors import ConfigError
from specforge.launch.base import Changed, Stopped, Task
from specforge.launch.worker import PARENT_VARIABLE

# The program of a child: (configuration file, run folder) -> exit code.
CHILD = "specforge.launch.child"
LOG = "sweep.log"
INTERRUPTED = {130, 143, 140, -signal.SIGINT, -signal.SIGTERM, -signal.SIGUSR2}
WATCHED = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Slot:
    """What one of the runs side by side may use: variables added to its environment."""

    env: dict[str, str]


def slots(parallel: int | None, processes: int | None, num_gpus: int, cores: int, environ: Mapping[str, str]) -> list[Slot]:
    """Cut this machine into equal parts. ``parallel`` null is as many as fit: with ``processes`` ranks a run, GPUs // processes; else one.

    Without a GPU each run gets its share of the cores, unless ``OMP_NUM_THREADS`` says otherwise.

    Raises:
        ConfigError: the runs would need more GPUs than there are.
    """
    if not num_gpus:
        count = parallel or 1
        threads = {} if count == 1 or "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": str(max(1, cores // count))}
        return [Slot(threads) for _ in range(count)]
    count = parallel or (max(1, num_gpus // processes) if processes else 1)
    each = processes or num_gpus // count
    if count * each > num_gpus or not each:
        raise ConfigError(
            f"launcher.parallel: {count} runs side by side with {max(each, 1)} GPUs each need {count * max(each, 1)}, and this machine shows "
            f"{num_gpus}. Set launcher.parallel={max(1, num_gpus // max(each, 1))} or lower launcher.processes."
        )
    if count == 1:
        return [Slot({})]
    named = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()] or [
        str(i) for i in range(num_gpus)
    ]
    return [Slot({"CUDA_VISIBLE_DEVICES": ",".join(named[i * each : (i + 1) * each])}) for i in range(count)]


@dataclass
class _Child:
    index: int
    slot: int
    process: subprocess.Popen[bytes]
    log: IO[bytes] | None


class Pool:
    """Keeps every slot busy until the tasks are done or a signal comes. A second signal is passed on as well and ends runs at once."""

    def __init__(self, tasks: Sequence[Task], parts: Sequence[Slot], changed: Changed) -> None:
        self.tasks, self.slots, self.changed = tasks, parts, changed
        self.running: list[_Child] = []
        self.codes: list[int | None] = [None] * len(tasks)
        self.signals: list[int] = []

    def run(self) -> list[int | None]:
        """One exit code a task.

        Raises:
            Stopped: a signal came; what ran was told and has ended.
        """
        main = threading.current_thread() is threading.main_thread()
        previous = {number: signal.signal(number, self._forward) for number in WATCHED} if main else {}
        try:
            self._work()
        finally:
            for child in self.running:  # only after an error of our own
                child.process.kill()
                child.process.wait()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.signals:
            raise Stopped(self.signals[0])
        return self.codes

    def _work(self) -> None:
        following = iter(range(len(self.tasks)))
        free = list(range(len(self.slots)))
        while True:
            while free and not self.signals and (index := next(following, None)) is not None:
                self._begin(index, free.pop(0))
            if not self.running:
                return
            for child in [c for c in self.running if c.process.poll() is not None]:
                free.append(self._finish(child))
            free.sort()
            time.sleep(0.05)

    def _begin(self, index: int, slot: int) -> None:
        task = self.tasks[index]
        # The child finds the same packages as this process, also when the path was set up by a test or a notebook.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), PARENT_VARIABLE: str(os.getpid())}
        log = None
        if len(self.slots) > 1:  # side by side on one terminal nobody could read them
            (task.run_dir / "logs").mkdir(exist_ok=True)
            log = (task.run_dir / "logs" / LOG).open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", CHILD, str(task.config_file), str(task.run_dir)],
            env={**env, **self.slots[slot].env},
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C reaches it once, through us
        )
        self.running.append(_Child(index, slot, process, log))
        self.changed(index, "running", None, "" if log is None else f"log {LOG} in its folder logs/")

    def _finish(self, child: _Child) -> int:
        self.running.remove(child)
        if child.log is not None:
            child.log.close()
        code = self.codes[child.index] = child.process.returncode
        interrupted = code != 0 and (bool(self.signals) or code in INTERRUPTED)
        self.changed(child.index, "done" if code == 0 else "interrupted" if interrupted else "failed", code, "")
        return child.slot

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        for child in self.running:
            if child.process.poll() is None:
                child.process.send_signal(number)
