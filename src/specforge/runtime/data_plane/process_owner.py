"""Names of processes that outlive them in file names, and folders in shared memory that go with their process."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
import uuid
from pathlib import Path

_FOLDER = "specforge-"


def owner() -> str:
    """``<host>.<pid>.<start>`` of this process: unique among all that may share a folder, and no other process gets it later."""
    return f"{_host()}.{os.getpid()}.{_start_ticks(os.getpid())}"


def is_dead(name: str) -> bool:
    """Whether the process called ``name`` by :func:`owner` is gone; those of other machines count as alive."""
    host, pid, started = name.split(".")
    if host != _host():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _start_ticks(int(pid)) != started


def make_private_folder() -> Path:
    """A new folder of this process in shared memory (in the temporary folder where there is none), readable by its user only.

    The process removes it; folders of processes that were killed are removed here.
    """
    shared = Path("/dev/shm")
    root = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    for folder in root.glob(f"{_FOLDER}*.*.*-*"):
        if is_dead(folder.name.removeprefix(_FOLDER).rpartition("-")[0]):
            shutil.rmtree(folder, ignore_errors=True)
    folder = root / f"{_FOLDER}{owner()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    return folder


def _host() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


def _start_ticks(pid: int) -> str:
    """When a process started, since process ids are used again; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[19]
    except OSError:
        return "0"
