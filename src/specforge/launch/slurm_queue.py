"""What SLURM says: states of jobs, who may be requeued, and the words it refuses with. The only module that runs its commands."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specforge.errors import RunError

TIMEOUT_SECONDS = 60
# States in which a job will still do something; COMPLETING is the end of one, or the pause before a requeue.
ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SIGNALING",
          "STAGE_OUT", "STOPPED", "SPECIAL_EXIT"}  # fmt: skip


class SlurmError(RunError):
    """SLURM refused or did not answer; the message holds its own words."""


@dataclass(frozen=True)
class JobState:
    """State, the reason that squeue gives (why it waits), and its nodes."""

    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def active(self) -> bool:
        return self.state in ACTIVE


def have_slurm() -> bool:
    """Whether this machine has SLURM's commands."""
    return shutil.which("sbatch") is not None


def run(*command: str) -> str:
    """One of SLURM's commands; its output.

    Raises:
        SlurmError: the command is not here, did not answer, or refused; with SLURM's own message.
    """
    if shutil.which(command[0]) is None:
        raise SlurmError(f"{command[0]}: not found, so there is no SLURM on this machine. Run this on a login node of the cluster.")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{command[0]}: SLURM did not answer within {TIMEOUT_SECONDS} seconds. Try again when its controller is up."
        ) from None
    if done.returncode != 0:
        raise SlurmError(words(done.stderr or done.stdout) or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout


def words(output: str) -> str:
    """SLURM's message without the command's name in front of each line."""
    lines = [re.sub(r"^(sbatch|squeue|scontrol|scancel|sacct|srun): (error: )?", "", line.strip()) for line in output.splitlines()]
    return "; ".join(line for line in lines if line)


def job_states(ids: Iterable[str]) -> dict[str, JobState]:
    """The state of each job that SLURM still knows, by id; asks squeue, then the accounting, if there is one, for the rest.

    Raises:
        SlurmError: SLURM did not answer.
    """
    wanted = set(ids)
    if not wanted:
        return {}
    mains = ",".join(sorted({one.split("_")[0] for one in wanted}))
    try:
        # %i is 17_3 for a started element of an array, 17_[2-5] for those that wait; -r writes every element on its own line.
        listed = run("squeue", "-h", "-r", "-t", "all", "-j", mains, "-o", "%i|%T|%r|%N")
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        listed = ""  # all of them are so old that the controller forgot them
    found = {}
    for line in listed.splitlines():
        identifier, state, reason, nodes = (*line.split("|"), "", "", "")[:4]
        if identifier in wanted:
            found[identifier] = JobState(state, "" if reason == "None" else reason, nodes)
    return found | _accounted(wanted - found.keys())


def _accounted(ids: set[str]) -> dict[str, JobState]:
    """Finished jobs from the accounting; nothing where the cluster has none."""
    if not ids or shutil.which("sacct") is None:
        return {}
    try:
        listed = run("sacct", "-n", "-X", "-P", "-j", ",".join(sorted(ids)), "-o", "JobID,State,NodeList")
    except SlurmError:
        return {}
    found = {}
    for line in listed.splitlines():
        identifier, state, nodes = (*line.split("|"), "", "")[:3]
        if identifier in ids and state:
            found[identifier] = JobState(state.split()[0], "", nodes)
    return found


def cancel(ids: Iterable[str]) -> None:
    """Cancel jobs by id; those that ended already do no harm.

    Raises:
        SlurmError: SLURM refused.
    """
    listed = sorted(set(ids))
    if listed:
        run("scancel", *listed)


def job_facts(identifier: str) -> dict[str, str]:
    """The fields of ``scontrol show job`` (of the first line of an array's answer)."""
    shown = run("scontrol", "-o", "show", "job", identifier)
    return dict(re.findall(r"(\w[\w:/]*)=(\S*)", shown.splitlines()[0] if shown else ""))


def cluster_name() -> str:
    """How this cluster calls itself; empty if it does not say."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", run("scontrol", "show", "config"), re.MULTILINE)
    return found[1] if found else ""


def node_addresses() -> list[str]:
    """Addresses of all nodes of the cluster."""
    return [line.strip() for line in run("sinfo", "-h", "-N", "-o", "%o").splitlines() if line.strip()]


def will_restart(identifier: str, environ: Mapping[str, str]) -> bool:
    """Whether SLURM has queued this job again already, by itself or because an administrator said so."""
    facts = job_facts(identifier)
    return int(facts.get("Restarts") or 0) > int(environ.get("SLURM_RESTART_COUNT") or 0)
