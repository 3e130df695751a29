"""The process around ``sgl.Engine``, with a stand-in for SGLang's package: answers, refusals, time-outs, deaths, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import specforge
from specforge.errors import MissingExtraError, RunError
from specforge.inference.sglang_client.host import HostEndpoint
from specforge.inference.sglang_http import ServerRefused, ServerUnreachable

_PACKAGE = """
import asyncio, os, subprocess, sys, time

class Engine:
    def __init__(self, **arguments):
        start = arguments["model_path"]
        print("starting", start, flush=True)
        if start == "raises":
            raise RuntimeError("no such model")
        if start == "dies":
            os._exit(3)
        if start == "hangs":
            time.sleep(60)
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self.loop = asyncio.new_event_loop()

    async def async_generate(self, input_ids, sampling_params, rid=None):
        await asyncio.sleep(0.05)
        if input_ids[0] == 2:
            raise ValueError("The input is longer than the model's context length")
        if input_ids[0] == 3:
            await asyncio.sleep(60)
        if input_ids[0] == 4:
            os._exit(1)
        return {"output_ids": [i + 1 for i in input_ids], "meta_info": {"rid": rid, "child": self.child.pid, "pid": os.getpid()}}

    def shutdown(self):
        self.child.kill()
        print("shut down", flush=True)
"""


@pytest.fixture
def make_host(tmp_path, monkeypatch):
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_PACKAGE)
    monkeypatch.syspath_prepend(str(package.parent))
    source = Path(specforge.__file__).resolve().parents[1]
    environment = {"PYTHONPATH": f"{package.parent}{os.pathsep}{source}"}
    made = []

    def make(model_path="works", seconds=30.0):
        made.append(HostEndpoint(arguments={"model_path": model_path}, environment=environment, folder=tmp_path, start_timeout_seconds=seconds))
        return made[-1]

    yield make
    for host in made:
        host.close()
        host.log_path.unlink(missing_ok=True)


def body(*ids, **more):
    return {"input_ids": list(ids), "sampling_params": {}, **more}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(*pids):
    deadline = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def test_many_answers_at_once_find_their_callers_and_close_leaves_nothing(make_host):
    host = make_host().start()
    answers = {}

    def ask(n):
        answers[n] = host.generate(body(n, rid=f"r{n}", extra_key="dropped"), 10)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(10, 40)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 1.0, "they do not wait for each other"
    assert all(answers[n]["output_ids"] == [n + 1] and answers[n]["meta_info"]["rid"] == f"r{n}" for n in range(10, 40))
    info = answers[10]["meta_info"]
    assert host.is_alive() and alive(info["child"])
    assert host.information("model_info")["model_path"] == "works"
    host.close()
    wait_gone(info["pid"], info["child"])
    assert not host.log_path.exists() and not host.is_alive()
    with pytest.raises(ServerUnreachable):
        host.generate(body(10), 5)


def test_refusals_and_time_outs_are_told_apart_and_the_engine_goes_on(make_host):
    host = make_host().start()
    with pytest.raises(ServerRefused, match="longer than the model's context length"):
        host.generate(body(2), 10)
    with pytest.raises(ServerUnreachable, match="no answer within 0 s"):
        host.generate(body(3), 0.3)
    assert host.generate(body(7), 10)["output_ids"] == [8] and host.is_alive()


def test_an_engine_that_dies_wakes_every_caller_and_shows_its_log(make_host):
    host = make_host().start()
    child = host.generate(body(5), 10)["meta_info"]["child"]
    failures = []

    def ask():
        try:
            host.generate(body(3), 30)
        except ServerUnreachable as error:
            failures.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    with pytest.raises(ServerUnreachable, match="its process ended"):
        host.generate(body(4), 30)
    for thread in threads:
        thread.join(timeout=10)
    assert len(failures) == 3 and not host.is_alive() and "starting works" in host.last_words()
    host.close()
    wait_gone(child)
    assert host.log_path.exists(), "the log of an engine that died is kept"


@pytest.mark.parametrize(
    ("model_path", "message"),
    [("raises", "could not start: RuntimeError: no such model"), ("dies", "ended while it was starting"), ("hangs", "not ready after 12 s")],
)
def test_an_engine_that_does_not_start_is_one_message_with_its_log(make_host, model_path, message):
    host = make_host(model_path, seconds=12.0)  # long enough for a busy machine to print the first line
    began = time.monotonic()
    with pytest.raises(RunError, match=f"(?s){message}.*log is .*starting {model_path}"):
        host.start()
    assert time.monotonic() - began < 40


def test_the_engine_ends_when_its_owner_is_killed(make_host, tmp_path):
    script = tmp_path / "owner.py"
    site = tmp_path / "site"
    script.write_text(
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from specforge.inference.sglang_client.host import HostEndpoint\n"
        "host = HostEndpoint(arguments={'model_path': 'works'}, environment={}, folder=Path(sys.argv[2]), start_timeout_seconds=30).start()\n"
        "info = host.generate({'input_ids': [9], 'sampling_params': {}}, 10)['meta_info']\n"
        "print(info['pid'], info['child'], host.log_path, flush=True)\ntime.sleep(60)\n"
    )
    source = Path(specforge.__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{source}"}
    owner = subprocess.Popen([sys.executable, str(script), str(site), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment)
    host, child, log = owner.stdout.readline().split()
    assert alive(host) and alive(child)
    owner.kill()
    owner.wait()
    wait_gone(host, child)
    Path(log).unlink(missing_ok=True)


def test_without_sglang_the_extra_is_named(make_host, monkeypatch):
    monkeypatch.setattr("importlib.machinery.PathFinder.find_spec", lambda *args: None)
    with pytest.raises(MissingExtraError, match=r"specforge\[sglang\]"):
        make_host().start()
