"""The plan is a pure function of the configuration and the number of GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specforge.errors import ConfigError
from specforge.launch.plan import command_of, device_type, make_plan


def config(device="auto", processes=None, batch=16, threads=None):
    return {
        "device": device,
        "num_threads": threads,
        "launcher": {"_target_": "specforge.launch.local.LocalLauncher", "processes": processes, "grace_seconds": 5.0},
        "trainer": {"global_batch_size": batch},
    }


@pytest.mark.parametrize(
    "device, processes, gpus, expected",
    [
        ("auto", None, 0, (1, "cpu")),
        ("auto", None, 1, (1, "cuda")),
        ("auto", None, 8, (8, "cuda")),
        ("auto", 2, 8, (2, "cuda")),
        ("auto", 2, 0, (2, "cpu")),
        ("cpu", None, 8, (1, "cpu")),
        ("cpu", 3, 8, (3, "cpu")),
        ("cuda", None, 4, (4, "cuda")),
        ("cuda:1", None, 4, (1, "cuda")),
    ],
)
def test_how_many_ranks_and_where(device, processes, gpus, expected):
    plan = make_plan(config(device, processes), num_gpus=gpus)
    assert (plan.roles[0].processes, plan.roles[0].device) == expected
    assert len(plan.processes) == expected[0] and plan.in_process == (expected[0] == 1)
    assert [p.rank for p in plan.processes] == list(range(expected[0]))
    for p in plan.processes:
        assert p.env["WORLD_SIZE"] == str(expected[0]) and p.env["RANK"] == p.env["LOCAL_RANK"] == str(p.rank)


def test_it_is_plain_json_without_a_path_of_this_machine():
    text = json.dumps(make_plan(config(processes=2, threads=4), num_gpus=0).to_json())
    assert str(Path.home()) not in text and "{run_dir}" in text
    plan = make_plan(config(processes=2, threads=4), num_gpus=0)
    assert plan.env == {"OMP_NUM_THREADS": "4"} and "logs/latest/rank_1.log" in plan.files
    assert command_of(plan.processes[0], Path("/runs/a"), "/bin/py") == [
        "/bin/py",
        "-m",
        "specforge.launch.worker",
        "--run-dir",
        "/runs/a",
        "--role",
        "trainer",
    ]
    assert plan == make_plan(config(processes=2, threads=4), num_gpus=0)


@pytest.mark.parametrize(
    "given, gpus, message",
    [
        (config("cuda", 4), 2, "launcher.processes: 4 ranks need as many GPUs, and device=cuda shows 2"),
        (config("cuda:0", 2), 2, "device=cuda:0 shows 1"),
        (config("cuda"), 0, "torch sees no CUDA device"),
        (config("tpu"), 0, "device: 'tpu' is not known"),
        (config(processes=20, batch=16), 0, "trainer.global_batch_size: 16 samples cannot be shared by 20 ranks"),
    ],
)
def test_impossible_plans(given, gpus, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(given, num_gpus=gpus)


def test_device_type():
    assert device_type("auto", 0) == "cpu" and device_type("auto", 2) == device_type("cuda:1", 2) == "cuda"
