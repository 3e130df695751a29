"""Ranks from SLURM's variables, for whole allocations and for allocations that several roles share."""

from __future__ import annotations

import pytest

from specforge.errors import RunError
from specforge.launch.env import SINGLE, RankFacts, Segment, node_names, segment_facts, task_facts

TASK = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
}  # fmt: skip
PORT = 20_000 + 4711 * 7 % 40_000


def task(node: int, local: int, nodes: int, per_node: int, **more: str) -> dict[str, str]:
    return {**TASK, "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local), "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NUM_TASKS": str(nodes * per_node), "SLURM_JOB_NODELIST": f"gpu[1-{nodes}]", **more}  # fmt: skip


def test_a_task_of_srun_is_a_rank():
    assert task_facts(TASK) == RankFacts(5, 8, 1, 4, "10.0.0.7", PORT, "slurm")


def test_ranks_follow_the_nodes_whatever_order_srun_deals_tasks_in():
    cyclic = {**TASK, "SLURM_PROCID": "3"}  # second task of the second node when tasks are dealt in turn
    assert task_facts(cyclic).rank == 5


def test_a_requeued_job_takes_another_port():
    assert task_facts({**TASK, "SLURM_RESTART_COUNT": "2"}).master_port == PORT + 202


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NODEID"])
def test_a_shell_in_an_allocation_is_alone(missing):
    assert task_facts({name: value for name, value in TASK.items() if name != missing}) == SINGLE


def test_torchruns_variables_win():
    given = {**TASK, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert task_facts(given).source == "torchrun"


def test_an_allocation_is_split_by_node():
    plan = [Segment("trainer", 0, 2, 4), Segment("producer", 0, 1, 1), Segment("producer", 1, 1, 1)]
    found = [segment_facts(task(node, local, 4, 4), plan, resolve=lambda name: f"@{name}") for node in range(4) for local in range(4)]
    trainers, producers = found[:8], found[8:]
    assert [facts.rank for _, facts in trainers] == list(range(8)) and {facts.world_size for _, facts in trainers} == {8}
    assert {facts.master_address for _, facts in trainers} == {"10.0.0.7"}
    assert [None if one is None else (one[0].instance, one[1].rank, one[1].world_size, one[1].master_address) for one in producers] == [
        (0, 0, 1, "@gpu3"), None, None, None, (1, 0, 1, "@gpu4"), None, None, None,
    ]  # fmt: skip
    ports = {segment.instance if segment.role == "producer" else "t": facts.master_port for segment, facts in (f for f in found if f)}
    assert len(set(ports.values())) == 3, "groups on one machine must not meet at one port"


@pytest.mark.parametrize(
    "environ, plan, message",
    [
        (task(0, 0, 3, 4), [Segment("trainer", 0, 2, 4)], "SLURM gave 3 nodes with 4 tasks each, and the plan needs 2 nodes with 4"),
        (task(0, 0, 2, 2), [Segment("trainer", 0, 2, 4)], "SLURM gave 2 nodes with 2 tasks each"),
        ({**TASK, "SLURM_STEP_NUM_TASKS": "7"}, [Segment("trainer", 0, 2, 4)], "7 tasks on 2 nodes"),
        ({**TASK, "SLURM_NODEID": "x"}, [Segment("trainer", 0, 2, 4)], "SLURM_NODEID='x' is not a whole number"),
    ],
)
def test_an_allocation_of_another_size_is_refused(environ, plan, message):
    with pytest.raises(RunError, match=message):
        segment_facts(environ, plan)


@pytest.mark.parametrize(
    "short, names",
    [
        ("n1", ["n1"]),
        ("gpu[1-3,07],login2", ["gpu1", "gpu2", "gpu3", "gpu07", "login2"]),
        ("a[09-11]-ib,b", ["a09-ib", "a10-ib", "a11-ib", "b"]),
        ("", []),
    ],
)
def test_node_names(short, names):
    assert node_names(short) == names
