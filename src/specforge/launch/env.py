"""Who am I among the ranks: read once from the environment, from torchrun's variables, from SLURM's or from nothing."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specforge.errors import RunError

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# What srun sets in each task; an interactive shell on a node has some of them, a task has all.
SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
_FIRST_PORT, _PORTS = 20_000, 40_000


@dataclass(frozen=True)
class RankFacts:
    """Rank and world size, the rank on this machine, and where rank 0 listens."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    source: str  # "single", "torchrun" or "slurm"

    @property
    def is_main(self) -> bool:
        return self.rank == 0


SINGLE = RankFacts(0, 1, 0, 1, "127.0.0.1", 0, "single")


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes of one allocation that form one group of ranks: ``processes`` on each of ``nodes``, for one instance of a role."""

    role: str
    instance: int
    nodes: int
    processes: int


def rank_facts(environ: Mapping[str, str]) -> RankFacts:
    """The facts of this process.

    With neither ``RANK`` nor ``WORLD_SIZE`` the process is alone. With one of them all of torchrun's variables must be there and
    agree; otherwise :class:`RunError` names the variable. ``LOCAL_WORLD_SIZE`` defaults to the world size (one machine).
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return SINGLE
    missing = [name for name in TORCHRUN_VARIABLES if not environ.get(name)]
    if missing:
        raise RunError(
            f"RANK or WORLD_SIZE is set, but {', '.join(missing)} is not. Start ranks with torchrun or with launcher=local, "
            "or unset RANK and WORLD_SIZE to run one process."
        )
    rank, world_size, local_rank = (_number(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE") if environ.get("LOCAL_WORLD_SIZE") else world_size
    if world_size < 1 or not 0 <= rank < world_size:
        raise RunError(f"RANK={rank} with WORLD_SIZE={world_size}: the rank must lie in 0 … {world_size - 1}.")
    if not 0 <= local_rank < local_world_size or local_world_size > world_size:
        raise RunError(f"LOCAL_RANK={local_rank} with LOCAL_WORLD_SIZE={local_world_size} and WORLD_SIZE={world_size} do not agree.")
    return RankFacts(rank, world_size, local_rank, local_world_size, environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"), "torchrun")


def task_facts(environ: Mapping[str, str]) -> RankFacts:
    """The facts of a worker that somebody started by hand: torchrun's variables, else those of an ``srun`` task, else alone.

    Only the worker asks for this. A command line inside of an interactive allocation is one process, whatever SLURM's variables say.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ or not all(environ.get(name) for name in SLURM_VARIABLES):
        return rank_facts(environ)
    nodes, per_node = _shape(environ)
    facts = segment_facts(environ, [Segment("", 0, nodes, per_node)])
    assert facts is not None  # the one segment holds every task
    return facts[1]


def segment_facts(
    environ: Mapping[str, str], segments: Sequence[Segment], resolve: Callable[[str], str] | None = None
) -> tuple[Segment, RankFacts] | None:
    """Which segment of the allocation this task belongs to, and its rank there; ``None`` for a task that has nothing to do.

    Ranks follow the order of nodes, whatever order srun deals tasks in. Nodes that need fewer tasks than SLURM started leave the rest
    idle: SLURM starts equally many on each. ``resolve`` turns a node's name into an address (:func:`address_of`).

    Raises :class:`RunError` when the allocation has another size than the plan.
    """
    node, local = _number(environ, "SLURM_NODEID"), _number(environ, "SLURM_LOCALID")
    nodes, per_node = _shape(environ)
    needed = sum(segment.nodes for segment in segments)
    if needed != nodes or any(segment.processes > per_node for segment in segments):
        most = max(segment.processes for segment in segments)
        raise RunError(
            f"SLURM gave {nodes} nodes with {per_node} tasks each, and the plan needs {needed} nodes with {most}. Leave nodes and tasks to "
            "launcher.nodes and launcher.tasks_per_node."
        )
    first = position = 0
    while node >= first + segments[position].nodes:
        first, position = first + segments[position].nodes, position + 1
    segment = segments[position]
    if local >= segment.processes:
        return None
    names = node_names(environ.get("SLURM_JOB_NODELIST", ""))
    address = _master(environ, names, first, resolve or address_of)
    # A requeued job keeps its id: another port each time, so that no socket of the last attempt is in the way.
    port = int(environ["SLURM_JOB_ID"]) * 7 + 101 * int(environ.get("SLURM_RESTART_COUNT") or 0) + position
    rank, world_size = (node - first) * segment.processes + local, segment.nodes * segment.processes
    return segment, RankFacts(rank, world_size, local, segment.processes, address, _FIRST_PORT + port % _PORTS, "slurm")


def _shape(environ: Mapping[str, str]) -> tuple[int, int]:
    """Nodes of the step and tasks on each."""
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_JOB_NUM_NODES") or 1)
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    if tasks % nodes:
        raise RunError(f"SLURM started {tasks} tasks on {nodes} nodes; ranks need equally many on each. Use --ntasks-per-node.")
    return nodes, tasks // nodes


def _master(environ: Mapping[str, str], names: Sequence[str], first: int, resolve: Callable[[str], str]) -> str:
    """Where the segment's rank 0 is. For the allocation's first node that is also where srun itself runs, whose address SLURM knows."""
    launched = environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if first == 0 and launched:
        return launched
    return resolve(names[first]) if first < len(names) else "127.0.0.1"


def address_of(node: str) -> str:
    """The address of a node: its name where that resolves, else what SLURM has for it."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    try:
        shown = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        shown = ""
    found = re.search(r"NodeAddr=(\S+)", shown)
    if found is None:
        raise RunError(f"{node}: the name of this node does not resolve, and scontrol does not know its address.")
    return found[1]


def node_names(compact: str) -> list[str]:
    """The nodes of SLURM's short form: ``gpu[1-3,07],login2`` is gpu1, gpu2, gpu3, gpu07 and login2; one bracket a name."""
    names: list[str] = []
    for name in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)?", compact):
        parts = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", name)
        if parts is None:
            names.append(name)
            continue
        for item in parts[2].split(","):
            low, _, high = item.partition("-")
            for number in range(int(low), int(high or low) + 1):
                names.append(f"{parts[1]}{number:0{len(low)}d}{parts[3]}")
    return names


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise RunError(f"{name}={environ[name]!r} is not a whole number.") from None
