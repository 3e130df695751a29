"""Roles that find each other through a folder: attempts, announcements, heartbeats, ends; and two roles on this machine for real."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from specforge.errors import ConfigError, RunError
from specforge.launch import rendezvous, roles
from specforge.launch.heartbeat import Member, Pulse, member, set_member
from specforge.launch.rendezvous import Ending, current, forget, join, lead
from specforge.launch.roles import TRAINER_ROLE, Role, role_named, roles_of


def test_every_attempt_has_a_folder_of_its_own(tmp_path):
    assert current(tmp_path) is None
    first = lead(tmp_path)
    assert current(tmp_path) == first and first.number == 1 and first.ending() is None
    second = lead(tmp_path)
    assert second.number == 2 and current(tmp_path) == second
    assert first.ending() == Ending("STOPPED", "a newer attempt began")
    first.end("DONE")
    assert first.ending().kind == "STOPPED", "the first word counts"


def test_instances_announce_themselves_and_are_waited_for(tmp_path):
    attempt = lead(tmp_path)
    said: list[str] = []
    with pytest.raises(RunError, match="producer: 1 of 2 came within 0.2 seconds"):
        Member(attempt, "producer", 1).announce(7001, host="b", layers=[1, 2])
        attempt.wait_for("producer", 2, 0.2, report=said.append, poll_seconds=0.02)
    assert said == ["waiting for producer: 1 of 2 are there"]
    late = threading.Timer(0.2, lambda: Member(attempt, "producer", 0).announce(7000, host="a", layers=[1, 2]))
    late.start()
    found = attempt.wait_for("producer", 2, 10.0, expects={"layers": [1, 2]}, report=said.append, poll_seconds=0.02)
    assert [(e.name, e.host, e.port) for e in found] == [("producer-0", "a", 7000), ("producer-1", "b", 7001)]
    # A restarted instance replaces what it said before, and another role's are not mixed in.
    Member(attempt, "producer", 0).announce(7777, host="c", layers=[1, 2])
    Member(attempt, "prod", 0).announce(1, host="x")
    assert [e.port for e in attempt.endpoints("producer")] == [7777, 7001] and len(attempt.endpoints("prod")) == 1


def test_who_serves_something_else_is_refused_with_both_values(tmp_path):
    attempt = lead(tmp_path)
    Member(attempt, "producer").announce(1, host="a", layers=[1, 3])
    with pytest.raises(ConfigError, match=r"producer-0 on a has layers=\[1, 3\], this run needs \[1, 2\]"):
        attempt.wait_for("producer", 1, 1.0, expects={"layers": [1, 2]}, report=print)
    path = attempt.folder / "endpoints" / "producer-0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "protocol": 99}))
    with pytest.raises(ConfigError, match="speaks protocol 99"):
        attempt.wait_for("producer", 1, 1.0, report=print)


def test_waiting_ends_with_the_attempt(tmp_path):
    attempt = lead(tmp_path)
    attempt.end("FAILED", "out of memory")
    with pytest.raises(RunError, match="FAILED: out of memory"):
        attempt.wait_for("producer", 1, 60.0, report=print)


def test_joining_waits_for_the_next_attempt_that_goes_on(tmp_path):
    with pytest.raises(RunError, match="no trainer began"):
        join(tmp_path, 0, 0.1)
    first = lead(tmp_path)
    assert join(tmp_path, 0, 1.0) == first
    first.end("STOPPED", "preempted")
    threading.Timer(0.2, lambda: lead(tmp_path)).start()
    assert join(tmp_path, 1, 10.0).number == 2
    assert join(tmp_path, 2, 60.0, stop=lambda: True) is None


def test_a_continued_run_is_not_over_because_an_earlier_one_was(tmp_path):
    lead(tmp_path).end("DONE")
    forget(tmp_path)
    assert current(tmp_path) is None and lead(tmp_path).number == 2


def test_life_is_judged_by_the_readers_clock(tmp_path):
    now, path = [0.0], tmp_path / "beat.json"
    pulse = Pulse(path, lease_seconds=10.0, clock=lambda: now[0])
    assert pulse.alive
    path.write_text('{"beat": 1, "time": "in another century"}')
    now[0] = 9.0
    assert pulse.alive
    now[0] = 18.0
    assert pulse.alive, "9 seconds since the counter moved"
    now[0] = 20.0
    assert not pulse.alive
    path.write_text('{"beat": 2}')
    assert pulse.alive


def test_a_member_beats_and_leaves_when_its_leader_is_silent(tmp_path):
    attempt = lead(tmp_path)
    stop: list[int] = []
    leader = Member(attempt, "trainer", beat_seconds=0.05)
    follower = Member(attempt, "producer", 0, leader="trainer", beat_seconds=0.05, lease_seconds=0.5, stop=lambda: bool(stop))
    with follower:
        with leader:
            endpoint = follower.announce(1)
            time.sleep(0.8)
            assert follower.ending() is None and leader.alive(endpoint)
        time.sleep(0.7)
        assert follower.ending() == Ending("STOPPED", "the leader was silent for 0.5 seconds")
    stop.append(1)
    assert follower.ending().reason == "a signal"
    attempt.end("DONE")
    assert follower.ending().kind == "DONE"
    with pytest.raises(RuntimeError, match="no rendezvous"):
        member()
    set_member(follower)
    assert member() is follower
    set_member(None)


def test_the_roles_of_a_run():
    class Topology:
        declared: tuple[Role, ...] = ()

        @classmethod
        def roles(cls, config: dict[str, Any]) -> tuple[Role, ...]:
            return cls.declared

    roles_module = pytest.MonkeyPatch()
    roles_module.setattr("specforge.config.build.component_class", lambda node, plugins: Topology)
    config = {"topology": {"_target_": "x.Topology"}}
    try:
        assert roles_of({}) == roles_of(config) == (TRAINER_ROLE,)
        other = Role("producer", "m:f", instances=2)
        Topology.declared = (other,)
        assert roles_of(config) == (TRAINER_ROLE, other) and role_named(config, "producer") is other
        Topology.declared = (other, roles.Role("trainer", "m:g", leads=True))
        assert [role.name for role in roles_of(config)] == ["trainer", "producer"]
        Topology.declared = (other, other)
        with pytest.raises(ConfigError, match="each must have its own name"):
            roles_of(config)
        Topology.declared = (Role("producer", "m:f", leads=True),)
        with pytest.raises(ConfigError, match="exactly one leads"):
            roles_of(config)
        with pytest.raises(ConfigError, match="--role: 'cook' is not known. Allowed: trainer"):
            role_named({}, "cook")
    finally:
        roles_module.undo()


def test_two_roles_on_this_machine(tiny_work, run_cli, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{Path(rendezvous.__file__).resolve().parents[2]}:{Path(__file__).parent}")
    outcome = run_cli(*tiny_work.short, "topology._target_=cluster_parts.WithProducers", "plugins=[cluster_parts]", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    run_dir = tmp_path / outcome.run_dir
    logs = run_dir / "logs" / "latest"
    assert sorted(path.name for path in logs.iterdir()) == ["producer-0-rank_0.log", "producer-1-rank_0.log", "rank_0.log"]
    assert "attempt 1: ['producer-0', 'producer-1']" in (logs / "rank_0.log").read_text()
    assert all("left: DONE" in (logs / f"producer-{i}-rank_0.log").read_text() for i in (0, 1))
    assert (run_dir / "_SUCCESS").exists() and [role["role"] for role in json.loads((run_dir / "plan.json").read_text())["roles"]] == [
        "trainer",
        "producer",
    ]
