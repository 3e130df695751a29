"""``sgl.Engine`` in a process that this one owns: requests over a local socket, features through shared memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from specforge.errors import RunError
from specforge.inference import process_guard
from specforge.inference.sglang_client.endpoint import Endpoint
from specforge.inference.sglang_client.host_main import KEY_VARIABLE
from specforge.inference.sglang_http import ServerRefused, ServerUnreachable
from specforge.inference.sglang_installation import require_sglang
from specforge.inference.sglang_process import free_port

_GRACE_SECONDS = 15.0
_LOG_TAIL_LINES = 25
# Of the training process's launcher; SGLang makes a process group of its own.
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class HostEndpoint(Endpoint):
    """Started by :meth:`start`; ends with :meth:`close`, with this process (even by kill -9), or by itself, which callers are told.

    ``arguments`` are those of ``sgl.Engine``; ``folder`` is a private folder for the socket.
    """

    def __init__(self, *, arguments: Mapping[str, Any], environment: Mapping[str, str], folder: Path, start_timeout_seconds: float) -> None:
        self.name = "sgl.Engine"
        self.arguments = {"port": free_port(), "log_level": "info", **arguments}
        self.environment = dict(environment)
        self.start_timeout_seconds = start_timeout_seconds
        self.log_path = Path(tempfile.gettempdir()) / f"specforge-sglang-{uuid.uuid4().hex[:8]}.log"
        self._address = str(folder / f"host-{uuid.uuid4().hex[:6]}")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, _Slot] = {}
        self._ready = False
        self._end = ""  # why it is gone; empty while it lives

    def start(self) -> HostEndpoint:
        """Blocks until the engine is ready. Raises :class:`RunError` with the end of its log, :class:`MissingExtraError`."""
        require_sglang(self.environment, "target_backend=sglang")
        key = secrets.token_bytes(32)
        environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED and not k.startswith("TORCHELASTIC_")}
        command = [sys.executable, "-I", str(process_guard.__file__), str(os.getpid()), str(_GRACE_SECONDS),
                   sys.executable, "-m", "specforge.inference.sglang_client.host_main", self._address]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                             start_new_session=True, env={**environment, **self.environment, KEY_VARIABLE: key.hex()})
        try:
            deadline = time.monotonic() + self.start_timeout_seconds
            self._connection = self._connect(key, deadline)
            self._connection.send(dict(self.arguments))
            self._wait_ready(deadline)
        except BaseException:
            self.close()
            raise
        self._ready = True
        threading.Thread(target=self._read, name="sglang engine answers", daemon=True).start()
        return self

    def generate(self, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        number, slot = next(self._numbers), _Slot()
        self._waiting[number] = slot
        try:
            if self._end or self._connection is None:
                raise ServerUnreachable(f"{self.name}: {self._end or 'it was closed'}")
            with self._sending:
                self._connection.send((number, body))
            if not slot.ready.wait(timeout):
                raise ServerUnreachable(f"{self.name}: no answer within {timeout:.0f} s")
        except OSError as error:
            raise ServerUnreachable(f"{self.name}: the connection to its process broke ({error})") from None
        finally:
            self._waiting.pop(number, None)
        if slot.refusal is not None:
            raise ServerRefused(400, f"{self.name}: {slot.refusal}")
        if slot.answer is None:
            raise ServerUnreachable(f"{self.name}: {self._end}")
        return slot.answer

    def is_alive(self) -> bool:
        return not self._end and self._process is not None and self._process.poll() is None

    def information(self, path: str) -> Any:
        return dict(self.arguments)

    def last_words(self) -> str:
        return self._log_tail() if self._end else ""

    def close(self) -> None:
        connection, self._connection = self._connection, None
        process, self._process = self._process, None
        died = bool(self._end)
        if process is None:
            return
        if connection is not None and self._ready and not died:
            with contextlib.suppress(OSError), self._sending:
                connection.send(None)  # the engine shuts down and its process ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE_SECONDS)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE_SECONDS if number == signal.SIGTERM else None)
        if connection is not None:
            connection.close()
        if self._ready and not died:
            self.log_path.unlink(missing_ok=True)

    def _connect(self, key: bytes, deadline: float) -> Connection:
        while True:
            try:
                return Client(self._address, "AF_UNIX", authkey=key)
            except (FileNotFoundError, ConnectionRefusedError):
                self._check_starting(deadline)
                time.sleep(0.1)

    def _wait_ready(self, deadline: float) -> None:
        assert self._connection is not None
        try:
            while not self._connection.poll(0.5):
                self._check_starting(deadline)
            state, message = self._connection.recv()
        except (EOFError, OSError):
            raise RunError(f"the SGLang engine ended while it was starting. {self._log_tail()}") from None
        if state != "ready":
            raise RunError(f"the SGLang engine could not start: {message}. {self._log_tail()}")

    def _check_starting(self, deadline: float) -> None:
        if self._process is None or self._process.poll() is not None:
            raise RunError(f"the SGLang engine ended while it was starting. {self._log_tail()}")
        if time.monotonic() > deadline:
            raise RunError(f"the SGLang engine was not ready after {self.start_timeout_seconds:.0f} s. Raise "
                           f"target_backend.start_timeout_seconds, or see what it waits for. {self._log_tail()}")

    def _read(self) -> None:
        connection = self._connection
        try:
            while connection is not None:
                number, kind, value = connection.recv()
                slot = self._waiting.get(number)
                if slot is not None:  # else the caller's time was up
                    slot.refusal, slot.answer = (value, None) if kind == "refused" else (None, value)
                    slot.ready.set()
        except (EOFError, OSError, TypeError):
            self._end = "its process ended" if self._connection is not None else "it was closed"
        for slot in list(self._waiting.values()):
            slot.ready.set()

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            return f"Its log is {self.log_path}; the last lines:\n" + "\n".join(f"    {line[:300]}" for line in lines)
        return f"(its log {self.log_path} cannot be read)"


class _Slot:
    """One caller that waits for its answer."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.answer: dict[str, Any] | None = None
        self.refusal: str | None = None
