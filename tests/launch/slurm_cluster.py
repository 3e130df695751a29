"""A real SLURM on this machine for tests: munged, slurmctld and several slurmd on loopback, on free ports, in a folder of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
NODES = ("n1", "n2", "n3", "n4")
CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits until its old credential has expired: 120 seconds by default.
AuthInfo=socket={folder}/munge.socket,cred_expire={expire}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
KillWait=20
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=n4 MaxTime=INFINITE State=UP PriorityTier=9
"""


def why_not() -> str | None:
    """Why there can be no cluster here; ``None`` when there can."""
    missing = [program for program in PROGRAMS if _which(program) is None]
    if missing:
        return f"no SLURM here ({', '.join(missing)} not found): apt-get install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0:
        return "slurmd starts jobs as their owner and needs to be root"
    return None


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class LoopbackCluster:
    """Daemons of one cluster. ``conf`` is its slurm.conf, for the environment variable SLURM_CONF."""

    def __init__(self, folder: Path, conf: Path) -> None:
        self.folder, self.conf = folder, conf
        self.env = {**os.environ, "SLURM_CONF": str(conf)}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.daemons.append(_munged(self.folder))
        _wait(lambda: (self.folder / "munge.socket").exists(), "munged", self.folder / "munge.log")
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        _wait(lambda: _idle(self.env) == len(NODES), "the nodes", self.folder / "slurmctld.log")

    def start_node(self, node: str) -> None:
        self._daemon("slurmd", "-D", "-N", node)

    def _daemon(self, program: str, *options: str) -> None:
        path = _which(program)
        assert path is not None
        with (self.folder / "out.log").open("ab") as out:
            self.daemons.append(subprocess.Popen([path, *options], env=self.env, stdout=out, stderr=out))

    def stop(self) -> None:
        """Cancel every job, then end the daemons that this object started."""
        subprocess.run(["scancel", "--full", "-u", str(os.getuid())], env=self.env, check=False, capture_output=True)
        with suppress(RuntimeError):
            _wait(lambda: _busy(self.env) == 0, "the end of all jobs", self.folder / "slurmctld.log")
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextmanager
def cluster(expire: int = 8) -> Iterator[LoopbackCluster]:
    """A cluster that runs until the block ends. ``expire`` is how many seconds a requeued job waits."""
    # A socket's path must be short, which pytest's folders are not.
    folder = Path(tempfile.mkdtemp(prefix="specforge-slurm-"))
    started = LoopbackCluster(folder, _configure(folder, expire))
    try:
        started.start()
        yield started
    finally:
        started.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path, expire: int) -> Path:
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    host = socket.gethostname().split(".")[0]
    ports = _free_ports(1 + len(NODES))
    lines = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2" for node, port in zip(NODES, ports[1:], strict=True)
    ]
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(CONFIG.format(host=host, port=ports[0], user=_user(), folder=folder, expire=expire, nodes="\n".join(lines)))
    return conf


def _munged(folder: Path) -> subprocess.Popen[bytes]:
    path = _which("munged")
    assert path is not None
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder}/munge.{name}" for option, name in names.items()]
    # --force: the folder's parents are writable by others.
    return subprocess.Popen(
        [path, "--foreground", "--force", "--num-threads=4", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _lines(env: dict[str, str], *command: str) -> list[str]:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else []


def _idle(env: dict[str, str]) -> int:
    return len(set(_lines(env, "sinfo", "-h", "-N", "-t", "idle", "-o", "%N")))


def _busy(env: dict[str, str]) -> int:
    return len(_lines(env, "squeue", "-h", "-o", "%i"))


def _wait(ready: Callable[[], bool], what: str, log: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            text = log.read_text(errors="replace")[-3000:] if log.exists() else "(no log)"
            raise RuntimeError(f"{what} did not come within {seconds:g} seconds:\n{text}")
        time.sleep(0.1)
