"""The life of a server process, with a stand-in for SGLang's launcher: ready, dead, late, stopped and orphaned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specforge.errors import ConfigError, MissingExtraError, RunError
from specforge.inference.sglang_process import SGLangProcess, command_line

# Answers /health after a while and leaves a worker of its own running, as SGLang does.
FAKE_LAUNCHER = '''
import argparse, http.server, os, subprocess, sys, time
p = argparse.ArgumentParser()
p.add_argument("--model-path"); p.add_argument("--port", type=int); p.add_argument("--host"); p.add_argument("--mode", default="serve")
a = p.parse_args()
print("launching", a.model_path, flush=True)
if a.mode == "die":
    sys.exit("ValueError: the model is broken")
worker = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
open(os.environ["PIDS"], "w").write(f"{os.getpid()} {worker.pid}")
if a.mode == "hang":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
server = http.server.HTTPServer((a.host, a.port), Handler)
if a.mode == "serve":
    server.serve_forever()
server.handle_request()
sys.exit(3)
'''


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(FAKE_LAUNCHER)
    monkeypatch.setattr("specforge.inference.sglang_process._GRACE_SECONDS", 1.0)

    def make(mode: str = "serve", timeout: float = 30.0) -> SGLangProcess:
        environment = {"PYTHONPATH": str(package.parent), "PIDS": str(tmp_path / "pids")}
        return SGLangProcess(model_path="some/target", port=None, arguments={"mode": mode}, environment=environment,
                             log_path=tmp_path / "logs" / "server.log", start_timeout_seconds=timeout)

    return make


def pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while not (folder / "pids").is_file() or len((folder / "pids").read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(p) for p in (folder / "pids").read_text().split()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(processes: list[int], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while any(map(running, processes)):
        assert time.monotonic() < deadline, [p for p in processes if running(p)]
        time.sleep(0.05)


def test_ready_then_stopped_with_its_stubborn_worker(launcher, tmp_path: Path) -> None:
    with launcher() as server:
        assert server.url == f"http://127.0.0.1:{server.port}"
        processes = pids(tmp_path)
        assert all(map(running, processes))
    assert not any(map(running, processes))
    server.stop()  # harmless


def test_server_that_dies_is_one_error_with_the_end_of_its_log(launcher) -> None:
    server = launcher("die").start()
    with pytest.raises(RunError, match=r"some/target ended with exit code 1(.|\n)*ValueError: the model is broken"):
        server.wait_ready()


def test_server_that_is_never_ready_is_stopped_and_named(launcher, tmp_path: Path) -> None:
    server = launcher("hang", timeout=2.0).start()
    with pytest.raises(RunError, match=r"not ready after 2 s(.|\n)*launching some/target"):
        server.wait_ready()
    wait_gone(pids(tmp_path))


def test_worker_does_not_outlive_a_server_that_fell(launcher, tmp_path: Path) -> None:
    with launcher("once") as server:
        wait_gone(pids(tmp_path))
        deadline = time.monotonic() + 15
        with pytest.raises(RunError, match="exit code 3"):
            while time.monotonic() < deadline:
                server.check_alive()
                time.sleep(0.05)


def test_no_orphan_when_the_owner_is_killed(launcher, tmp_path: Path) -> None:
    server = launcher()
    owner = subprocess.Popen([sys.executable, "-c", (
        "import sys, time; sys.path[:0] = [sys.argv[1]]\n"
        "from pathlib import Path\n"
        "from specforge.inference import sglang_process\n"
        "sglang_process._GRACE_SECONDS = 1.0\n"
        "environment = {'PYTHONPATH': sys.argv[1], 'PIDS': sys.argv[2]}\n"
        "sglang_process.SGLangProcess(model_path='some/target', port=None, arguments={}, environment=environment,"
        " log_path=Path(sys.argv[3]), start_timeout_seconds=30).start()\n"
        "time.sleep(600)"), server.environment["PYTHONPATH"], str(tmp_path / "pids"), str(tmp_path / "orphan.log")])
    processes = pids(tmp_path)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    wait_gone(processes)


def test_command_line_and_refusals(launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"tp_size": 2, "disable_radix_cache": True, "skip": False, "none": None, "ids": [1, 14], "hooks": {"a": 1}}
    assert command_line(arguments) == ["--tp-size", "2", "--disable-radix-cache", "--ids", "1", "14", "--hooks", '{"a": 1}']
    with pytest.raises(ConfigError, match="port"):
        SGLangProcess(model_path="t", port=1, arguments={"port": 2}, environment={}, log_path=tmp_path / "l", start_timeout_seconds=1)
    server = launcher()
    server.arguments["speculative_draft_model_path"] = tmp_path / "nowhere"
    with pytest.raises(ConfigError, match="draft of the SGLang server: .*nowhere is no folder"):
        server.start()
    monkeypatch.setattr("importlib.machinery.PathFinder.find_spec", lambda *args: None)
    with pytest.raises(MissingExtraError, match="sglang"):
        launcher().start()
