"""Start a plan on this machine and stay with it: logs per rank, one dying rank ends the others, Ctrl-C reaches all, no orphans."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any, ClassVar

from pydantic import Field

from specforge.config import freeze
from specforge.errors import ConfigError, NumericalError, RunError
from specforge.launch import rendezvous
from specforge.launch.base import Changed, Launcher, Task
from specforge.launch.local_pool import Pool, Slot, slots
from specforge.launch.plan import Plan, ProcessPlan, command_of, device_type, log_name, visible_gpus
from specforge.launch.worker import PARENT_VARIABLE, run_role

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
# A rank that was asked to stop saves and leaves with 128 + the signal; that is an orderly end.
ORDERLY = {0, *(128 + number for number in FORWARDED)}
TAIL_LINES = 20


class LocalLauncher(Launcher):
    """The numbers of ``conf/launcher/local.yaml``, where each is explained; :func:`start` reads those of a run from the plan."""

    remote: ClassVar[bool] = False

    def __init__(
        self,
        *,
        processes: Annotated[int, Field(ge=1)] | None,
        parallel: Annotated[int, Field(ge=1)] | None,
        grace_seconds: Annotated[float, Field(ge=0)],
    ) -> None:
        self.processes = processes
        self.parallel = parallel
        self.grace_seconds = grace_seconds

    def submit_many(self, tasks: Sequence[Task], changed: Changed, folder: Path) -> list[int | None]:
        return Pool(tasks, self.slots_for(tasks), changed).run()

    def slots_for(self, tasks: Sequence[Task]) -> list[Slot]:
        """The parts of this machine for runs side by side; never more than there are runs, so that none lies idle."""
        configs = [freeze.read_config_file(task.config_file, task.run_dir) for task in tasks]
        gpus = visible_gpus()
        devices = {str(config["device"]) for config in configs}
        on_gpu = any(device_type(device, gpus) == "cuda" for device in devices)
        if on_gpu and (self.parallel or 1) > 1 and any(":" in device for device in devices):
            raise ConfigError(
                "launcher.parallel: runs side by side get GPUs of their own, so device must not name one. Use device=auto, or choose "
                "the GPUs with CUDA_VISIBLE_DEVICES."
            )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = None if self.parallel is None else min(self.parallel, len(tasks))
        if any(":" in device for device in devices):
            return slots(1, None, 1 if on_gpu else 0, cores, os.environ)
        return slots(wanted, self.processes, gpus if on_gpu else 0, cores, os.environ)[: len(tasks)]

    def start(self, task: Task) -> int:
        from specforge.launch.frontend import run_here

        return run_here(task.config_file, task.run_dir)


def start(plan: Plan, run_dir: Path) -> int:
    """Run the plan to its end and return the exit code; a plan of one process runs in this process.

    Raises :class:`RunError` when a rank dies: the message has its role, rank, exit code and the end of its log.
    """
    if plan.in_process:
        return run_role(run_dir, plan.processes[0].role)
    return _Supervisor(plan, run_dir).run()


@dataclass
class _Rank:
    plan: ProcessPlan
    process: subprocess.Popen[bytes]
    log: Path
    pump: threading.Thread
    leads: bool

    @property
    def name(self) -> str:
        instance = f" {self.plan.instance}" if self.plan.instance else ""
        return f"{self.plan.role}{instance} rank {self.plan.rank}"


class _Supervisor:
    def __init__(self, plan: Plan, run_dir: Path) -> None:
        self.plan = plan
        self.run_dir = run_dir
        self.ranks: list[_Rank] = []
        self.signals: list[int] = []
        self.folder = new_attempt_folder(run_dir / "logs")

    def run(self) -> int:
        previous = {number: signal.signal(number, self._forward) for number in FORWARDED} if _in_main_thread() else {}
        try:
            if len(self.plan.roles) > 1:
                rendezvous.forget(self.run_dir)
            ports: dict[tuple[str, int], str] = {}  # one meeting point a group of ranks
            for process in self.plan.processes:
                port = ports.setdefault((process.role, process.instance), str(free_port()))
                self.ranks.append(self._start(process, port))
            return self._watch()
        finally:
            self._end_all(0.0)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, plan: ProcessPlan, port: str) -> _Rank:
        env = {**os.environ, **self.plan.env, **plan.env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        # A session of its own: the terminal's Ctrl-C then reaches a rank once, through us, and its children can be ended with it.
        process = subprocess.Popen(
            command_of(plan, self.run_dir, sys.executable),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        leads = plan.role == self.plan.roles[0].role
        log = self.folder / log_name(plan.role, plan.instance, plan.rank)
        echo = sys.stderr if leads and plan.rank == 0 else None
        assert process.stdout is not None
        pump = threading.Thread(target=_pump, args=(process.stdout, log, echo), daemon=True)
        pump.start()
        return _Rank(plan, process, log, pump, leads)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(number)

    def _watch(self) -> int:
        """Wait until all ranks ended in order, or one did not."""
        while True:
            codes = [rank.process.poll() for rank in self.ranks]
            failed = [rank for rank, code in zip(self.ranks, codes, strict=True) if code is not None and code not in ORDERLY]
            if failed:
                return self._fail(failed)
            leading = [code for rank, code in zip(self.ranks, codes, strict=True) if rank.leads]
            if all(code is not None for code in leading):
                # The leader has ended the attempt: the other roles leave by themselves, or are ended after a while.
                self._end_all(self.plan.grace_seconds, ask=False)
                for rank in self.ranks:
                    rank.pump.join(5.0)
                return max(code for code in leading if code is not None)
            time.sleep(0.05)

    def _fail(self, failed: list[_Rank]) -> int:
        """End the rest and say what happened. An error of the user's kind keeps its exit code."""
        time.sleep(min(0.5, self.plan.grace_seconds))  # the rank that failed first often takes others with it: see who else did
        self._end_all(self.plan.grace_seconds)
        for rank in self.ranks:
            rank.pump.join(5.0)
        first = next((rank for rank in failed if rank.process.returncode > 0), failed[0])
        code = first.process.returncode
        if self.signals and code < 0 and -code in self.signals:
            return 128 - code  # the user's second Ctrl-C
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        message = (
            f"{first.name} {how}; the other {len(self.ranks) - 1} were ended. Last lines of {first.log}:\n{tail(first.log)}\n"
            "The last checkpoint is intact: start the run again to continue from it."
        )
        error = RunError(message)
        if code in (ConfigError.exit_code, NumericalError.exit_code):
            error.exit_code = code
        raise error

    def _end_all(self, grace_seconds: float, ask: bool = True) -> None:
        """SIGTERM to every rank that lives (if they have to be asked), then SIGKILL to its whole process group; reaps all."""
        living = [rank for rank in self.ranks if rank.process.poll() is None]
        for rank in living if ask else ():
            _signal_group(rank, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while living and time.monotonic() < deadline:
            time.sleep(0.05)
            living = [rank for rank in living if rank.process.poll() is None]
        for rank in self.ranks:
            _signal_group(rank, signal.SIGKILL)  # also what a rank that already ended left behind
            rank.process.wait()


def _signal_group(rank: _Rank, number: int) -> None:
    try:
        os.killpg(rank.process.pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _pump(stream: IO[bytes], log: Path, echo: Any) -> None:
    """Copy a rank's output to its log, line by line, and rank 0's to the terminal too."""
    with log.open("wb") as out:
        for line in stream:
            out.write(line)
            out.flush()
            if echo is not None:
                echo.write(line.decode(errors="replace"))
                echo.flush()


def new_attempt_folder(logs: Path) -> Path:
    """``logs/attempt_<k>`` with the next k, and ``logs/latest`` pointing to it; logs of earlier attempts stay."""
    logs.mkdir(parents=True, exist_ok=True)
    taken = [int(match[1]) for path in logs.iterdir() if (match := re.fullmatch(r"attempt_(\d+)", path.name))]
    folder = logs / f"attempt_{max(taken, default=0) + 1}"
    folder.mkdir()
    link = logs / f".tmp-latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    os.replace(link, logs / "latest")
    return folder


def free_port() -> int:
    """A TCP port that nobody on this machine listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented; carriage returns of progress bars are cut out."""
    if not log.exists():
        return "  (no output)"
    text = log.read_text(errors="replace").replace("\r", "\n").rstrip()
    return "\n".join(f"  {line}" for line in text.split("\n")[-lines:])


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
