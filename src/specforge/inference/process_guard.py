"""Run a command and end its whole process group as soon as the process that asked for it is gone.

Started by path and alone (``python -I process_guard.py <parent pid> <grace seconds> <command> ...``), so it imports nothing of the
package. A child's own parent-death signal would not do: it covers only the first process, not what that one spawns, and it also fires
when merely the *thread* that started the child ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

_POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """In the command's process: if even the guard is killed, the command goes as well (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_group(grace_seconds: float) -> None:
    """SIGTERM to the rest of this process's own group, then SIGKILL to what is left of it."""
    deadline = time.monotonic() + grace_seconds
    number: int = signal.SIGTERM
    while others := [pid for pid in group_members(os.getpgrp()) if pid != os.getpid()]:
        for pid in others:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        number = signal.SIGKILL if time.monotonic() > deadline else 0  # 0 sends nothing
        time.sleep(_POLL_SECONDS)


def group_members(group: int) -> list[int]:
    """Processes of a group that still run; those that only wait to be reaped do not count (Linux; elsewhere none are seen)."""
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry)) == group and not _is_zombie(entry):
                    found.append(int(entry))
    return found


def _is_zombie(pid: str) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"


def main(arguments: list[str]) -> int:
    parent, grace_seconds, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    asked: list[int] = []
    # Handlers, not SIG_IGN: the latter would be inherited by the command.
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    signal.signal(signal.SIGINT, lambda *_: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    while process.poll() is None and os.getppid() == parent and not asked:
        time.sleep(_POLL_SECONDS)
    # The command first and alone, since a server takes the end of a worker for a crash; then what it left behind.
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
    _end_group(grace_seconds)
    process.wait()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
