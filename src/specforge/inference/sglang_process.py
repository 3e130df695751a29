"""One SGLang server as a child process: started, waited for, and ended with everything it spawned, even if we are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, ClassVar

from pydantic import Field

from specforge.errors import ConfigError, RunError
from specforge.inference.process_guard import group_members
from specforge.inference.sglang_http import ServerUnreachable, get_json
from specforge.inference.sglang_installation import require_sglang

_GUARD = Path(__file__).with_name("process_guard.py")
_GRACE_SECONDS = 15.0  # from SIGTERM to SIGKILL; SGLang looks every 5 s whether it was asked to end, then drains its requests
_KILL_SECONDS = 5.0  # for the kernel to take down what was killed (memory of a GPU included)
_LOG_TAIL_LINES = 30
# What this class says itself, so that an argument of the same name would be said twice.
_OWN_ARGUMENTS = ("model_path", "port")


class SGLangProcess:
    """``python -m sglang.launch_server`` with these arguments on loopback, in a process group of its own.

    ``arguments``: SGLang's flags by name (``tp_size``, ``speculative_algorithm`` ...): ``True`` gives the bare flag, ``False`` and
    ``None`` leave it out, a list gives several values, a mapping is written as JSON. ``host`` other than 127.0.0.1 must be asked for.
    ``environment``: added to this process's own. ``log_path``: receives the server's whole output.
    Raises :class:`MissingExtraError` without SGLang, :class:`RunError` for a server that dies or is not ready in time.
    """

    runtime_arguments: ClassVar[tuple[str, ...]] = ("model_path", "log_path")

    def __init__(self, *, model_path: str, port: Annotated[int, Field(ge=1, le=65535)] | None, arguments: Mapping[str, Any],
                 environment: Mapping[str, str], log_path: Path, start_timeout_seconds: Annotated[float, Field(gt=0)]) -> None:
        doubled = sorted(name for name in arguments if name.replace("-", "_") in _OWN_ARGUMENTS)
        if doubled:
            raise ConfigError(f"server arguments {', '.join(doubled)}: these have configuration keys of their own; take them out of the "
                              "server arguments.")
        self.model_path, self.port = str(model_path), port
        self.arguments = {"host": "127.0.0.1", **{name.replace("-", "_"): value for name, value in arguments.items()}}
        self.environment, self.log_path, self.start_timeout_seconds = dict(environment), Path(log_path), start_timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    @property
    def url(self) -> str:
        """Base URL without a slash at the end; the port is known after :meth:`start`."""
        host = str(self.arguments["host"])
        return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Leader of the server's process group, ``None`` before the start and after the stop."""
        return None if self._process is None else self._process.pid

    def start(self) -> SGLangProcess:
        """Start the server and return at once; :meth:`wait_ready` waits for it."""
        if self._process is not None:
            raise RuntimeError("start() called twice")
        require_sglang(self.environment, "starting an SGLang server")
        for name, path in (("model", self.model_path), ("draft", self.arguments.get("speculative_draft_model_path"))):
            # SGLang would take it for a hub id and complain about that.
            if path is not None and str(path).startswith(("/", ".", "~")) and not Path(path).is_dir():
                raise ConfigError(f"{name} of the SGLang server: {path} is no folder on this machine.")
        if self.port is None:
            self.port = free_port(str(self.arguments["host"]))
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.model_path, "--port", str(self.port),
                   *command_line(self.arguments)]
        guarded = [sys.executable, "-I", str(_GUARD), str(os.getpid()), str(_GRACE_SECONDS), *command]
        with self.log_path.open("wb") as log:
            log.write((" ".join(command) + "\n").encode())
            log.flush()
            self._process = subprocess.Popen(guarded, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                             start_new_session=True, env={**os.environ, **self.environment})
        self._started_at = time.monotonic()
        return self

    def wait_ready(self) -> str:
        """Block until the server answers its health probe; returns :attr:`url`. On failure the server is stopped first."""
        deadline = self._started_at + self.start_timeout_seconds
        try:
            while True:
                self.check_alive()
                with contextlib.suppress(ServerUnreachable):
                    get_json(f"{self.url}/health", timeout=5.0)
                    return self.url
                if time.monotonic() > deadline:
                    raise RunError(f"the SGLang server for {self.model_path} was not ready after {self.start_timeout_seconds:.0f} s. "
                                   f"Raise the start timeout, or see what it waits for. {self.log_tail()}")
                time.sleep(0.3)
        except BaseException:
            self.stop()
            raise

    def check_alive(self) -> None:
        """Raises :class:`RunError` with the end of the log if the server's process is gone."""
        if self._process is None:
            raise RunError(f"the SGLang server for {self.model_path} is not running.")
        code = self._process.poll()
        if code is not None:
            raise RunError(f"the SGLang server for {self.model_path} ended with exit code {code}. {self.log_tail()}")

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """Where the log is and its last lines, for a message."""
        try:
            text = self.log_path.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(its log {self.log_path} cannot be read: {error})"
        return f"Its log is {self.log_path}; the last lines:\n" + "\n".join(f"    {line[:300]}" for line in text[-lines:])

    def stop(self) -> None:
        """End the server (SIGTERM, fifteen seconds), then the rest of its process group. Harmless when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()  # the guard, which ends the command and then its group
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2 * _GRACE_SECONDS + 1.0)
        # What is left, or a group whose guard was killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < deadline and group_members(process.pid):
            time.sleep(0.02)

    def __enter__(self) -> SGLangProcess:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Flags of SGLang's launcher from values by name."""
    flags: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is True:
            continue
        if isinstance(value, Mapping):
            flags.append(json.dumps(value))
        elif isinstance(value, (list, tuple)):
            flags.extend(str(v) for v in value)
        else:
            flags.append(str(value))
    return flags


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("" if host == "0.0.0.0" else host, 0))
        return int(probe.getsockname()[1])
