"""What is known about jobs from files and from SLURM's answers: records, states, last words, status, stop, disks that nodes cannot see."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from specforge.cli import main
from specforge.commands import status
from specforge.errors import ConfigError, RunError
from specforge.launch import slurm_queue, visibility
from specforge.launch.base import Task
from specforge.launch.follow import exit_code, follow
from specforge.launch.job_record import Ended, JobEntry, add_submission, read_ended, read_submissions, write_ended
from specforge.launch.outcome import mark_success
from specforge.launch.slurm import require_free
from specforge.launch.slurm_program import JobProgram, why_no_requeue
from specforge.launch.slurm_queue import JobState, SlurmError, job_states

ENTRY = JobEntry("17", "trainer", True, 1, 1, "log")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """``fake(squeue="...")`` puts commands on the PATH that print the given text; a number is an exit code with a complaint."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(slurm_queue.shutil, "which", lambda name, path=None: str(folder / name) if (folder / name).exists() else None)

    def make(**commands: str) -> Path:
        for name, text in commands.items():
            path = folder / name
            path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/{name}.calls\n{text}\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return folder

    return make


def run_folder(path: Path, *entries: JobEntry) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("format_version: 1\n")
    if entries:
        add_submission(path, "c", entries)
    return path


def test_every_submission_is_kept(tmp_path):
    assert read_submissions(tmp_path) == [] and read_ended(tmp_path) is None
    add_submission(tmp_path, "c", [ENTRY])
    add_submission(tmp_path, "c", [JobEntry("18", "trainer", True, 1, 1, "log"), JobEntry("19_0", "producer", False, 1, 1, "log")])
    assert [[job.id for job in one.jobs] for one in read_submissions(tmp_path)] == [["17"], ["18", "19_0"]]
    assert read_submissions(tmp_path)[-1].leader.id == "18"
    (tmp_path / "jobs.json").write_text('{"format_version": 9, "submissions": []}')
    with pytest.raises(ConfigError, match="format_version 9"):
        read_submissions(tmp_path)
    (tmp_path / "jobs.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        read_submissions(tmp_path)


def test_states_of_jobs_and_of_elements_of_arrays(fake):
    folder = fake(
        squeue="printf '17|RUNNING|None|n[1-2]\\n18_0|PENDING|Priority|\\n18_1|COMPLETED|None|n3\\n'", sacct="echo '16|CANCELLED by 0|n1'"
    )
    assert job_states(["17", "18_0", "16"]) == {
        "17": JobState("RUNNING", "", "n[1-2]"),
        "18_0": JobState("PENDING", "Priority", ""),
        "16": JobState("CANCELLED", "", "n1"),
    }
    assert job_states([]) == {} and "-j 16,17,18" in (folder / "squeue.calls").read_text()
    fake(squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", sacct="exit 1")
    assert job_states(["17"]) == {}
    fake(squeue="echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmError, match="^Unable to contact slurm controller$"):
        job_states(["17"])


def test_a_folder_with_a_job_that_waits_is_in_use(tmp_path, fake):
    run_dir = run_folder(tmp_path / "run", ENTRY)
    require_free(run_dir)  # no sbatch here: nobody can say
    fake(sbatch="", squeue="echo '17|PENDING|Priority|'")
    with pytest.raises(RunError, match=r"is in use by SLURM job 17 \(PENDING\)"):
        require_free(run_dir)
    fake(squeue="echo '17|FAILED|None|n1'")
    require_free(run_dir)


@pytest.mark.parametrize(
    "facts, why",
    [
        ("JobState=RUNNING Reason=None Requeue=1 Restarts=0", None),
        ("JobState=COMPLETING Reason=None Requeue=1 Restarts=0", "the job was cancelled"),
        ("JobState=COMPLETING Reason=TimeLimit Requeue=1 Restarts=0", None),
        ("JobState=COMPLETING Reason=None Requeue=1 Restarts=1", None),  # SLURM has queued it again itself
        ("JobState=RUNNING Reason=None Requeue=0 Restarts=0", "forbid it"),
    ],
)
def test_which_jobs_start_again(facts, why, fake, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    fake(scontrol=f"echo 'JobId=17 {facts}'")
    said = why_no_requeue(os.environ)
    assert said is None if why is None else why in str(said)


def test_a_program_is_the_same_again_after_a_checkpoint():
    program = JobProgram("c", "r", (), True, True)
    again = program.checkpoint()
    assert again.function == program and again.args == () and again.kwargs == {}


@pytest.mark.parametrize(
    "state, ended, code",
    [
        (JobState("RUNNING"), Ended("17", 0, False, 0), None),
        (JobState("COMPLETED"), Ended("17", 0, False, 0), 0),
        (JobState("FAILED"), Ended("17", 3, False, 1), 3),
        (JobState("PENDING"), Ended("17", 140, True, 0), None),
        (None, Ended("17", 2, False, 0), 2),  # SLURM forgot it
        (None, Ended("16", 2, False, 0), None),  # the word of an earlier job
        (JobState("CANCELLED"), None, 143),
        (JobState("OUT_OF_MEMORY"), None, 1),
        (JobState("NODE_FAIL"), Ended("17", 140, True, 0), 1),
        (JobState("COMPLETED"), None, None),  # its file is on the way over a shared disk
    ],
)
def test_the_exit_code_of_a_followed_job(tmp_path, state, ended, code):
    if ended is not None:
        write_ended(tmp_path, ended)
    assert exit_code(tmp_path, "17", state) == code


def test_following_several_runs(tmp_path, fake):
    tasks = []
    for number, code in ((17, 0), (18, 3)):
        run_dir = run_folder(tmp_path / str(number), JobEntry(str(number), "trainer", True, 1, 1, "log"))
        write_ended(run_dir, Ended(str(number), code, False, 0))
        tasks.append(Task(run_dir / "config.yaml", run_dir))
    fake(squeue="printf '17|COMPLETED|None|n1\\n18|FAILED|None|n1\\n'")
    events: list[tuple] = []
    assert follow(tasks, 0.01, lambda *event: events.append(event)) == [0, 3]
    assert events == [(0, "done", 0, "job 17"), (1, "failed", 3, "job 18")]


# -- the two commands -----------------------------------------------------------------------------------------------------------------


def test_status_of_runs_and_of_a_sweep(tmp_path, fake, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = run_folder(tmp_path / "outputs" / "a" / "1")
    done = run_folder(tmp_path / "outputs" / "a" / "2", ENTRY)
    mark_success(done, step=9)
    (done / "metrics.jsonl").write_text('{"step": 9, "kind": "train"}\n{"step": 1')
    waits = run_folder(tmp_path / "outputs" / "a" / "3", JobEntry("20", "trainer", True, 1, 1, "log"))
    write_ended(waits, Ended("20", 140, True, 0))
    failed = run_folder(tmp_path / "outputs" / "a" / "4", JobEntry("21_0", "trainer", True, 1, 1, "log"))
    write_ended(failed, Ended("21_0", 3, False, 0))
    sweep = tmp_path / "outputs" / "sweeps" / "a" / "x"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(json.dumps({"points": [{"run_dir": str(waits)}, {"run_dir": str(failed)}, {"run_dir": None}]}))
    fake(squeue="printf '20|PENDING|BeginTime|\\n21_0|FAILED|NonZeroExitCode|n1\\n'")
    assert main(["status", "--json"]) == 0
    found = {one["run_dir"]: one for one in json.loads(capsys.readouterr().out)}
    assert [found[str(path)]["state"] for path in (new, done, waits, failed)] == ["new", "done", "pending", "failed"]
    assert found[str(done)]["step"] == 9 and "starts again from its checkpoint" in found[str(waits)]["detail"]
    assert "exit code 3" in found[str(failed)]["detail"] and found[str(failed)]["jobs"] == ["trainer 21_0 FAILED"]
    assert found[str(failed)]["sweep"] == str(Path("outputs/sweeps/a/x")) and found[str(done)]["sweep"] is None
    assert main(["status", "outputs/sweeps/a/x"]) == 0
    shown = capsys.readouterr().out
    assert "1 pending, 1 failed" in shown and "outputs/a/1" not in shown and "BeginTime" in shown


def test_status_says_when_slurm_cannot_be_asked(tmp_path, fake, capsys):
    run_folder(tmp_path / "run", ENTRY)
    fake(squeue="echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    assert main(["status", str(tmp_path / "run")]) == 0
    assert "SLURM could not be asked: Unable to contact slurm controller" in capsys.readouterr().out


def test_status_of_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0 and "no runs yet" in capsys.readouterr().out
    assert main(["status", "gone"]) == 2 and "gone: is not there" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["status", "empty"]) == 2 and "holds no run" in capsys.readouterr().err
    assert status.last_step(tmp_path) is None


def test_stop_cancels_what_was_submitted_by_its_ids(tmp_path, fake, capsys):
    run_dir = run_folder(tmp_path / "run", ENTRY, JobEntry("18_0", "producer", False, 1, 1, "log"))
    folder = fake(squeue="printf '17|RUNNING|None|n1\\n18_0|COMPLETED|None|n1\\n'", scancel="")
    assert main(["stop", str(run_dir)]) == 0
    assert (folder / "scancel.calls").read_text() == "17\n" and "cancelled job 17" in capsys.readouterr().err
    fake(squeue="")
    assert main(["stop", str(run_dir)]) == 1 and "none of its jobs (17, 18_0) runs or waits" in capsys.readouterr().err
    here = run_folder(tmp_path / "local")
    assert main(["stop", str(here)]) == 1 and "was not submitted to SLURM" in capsys.readouterr().err


# -- folders that nodes cannot see --------------------------------------------------------------------------------------------------------

MOUNTS = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:40 / /home rw shared:2 - nfs4 server:/home rw
31 22 0:41 / /dev/shm rw shared:3 - tmpfs tmpfs rw
32 22 0:42 / /with\\040space rw shared:4 - lustre mds:/x rw
"""


def test_the_file_system_of_a_folder():
    assert visibility.filesystem(Path("/home/me/not-there-yet"), MOUNTS)[0] in ("nfs4", "ext4")  # /home may be missing on this machine
    assert visibility.filesystem(Path("/dev/shm"), MOUNTS) == ("tmpfs", "/dev/shm")
    assert visibility.filesystem(Path("/"), MOUNTS) == ("ext4", "/") and visibility.filesystem(Path("/"), "") == ("", "")


def test_a_warning_only_where_nodes_are_other_machines(tmp_path, monkeypatch):
    monkeypatch.setattr(visibility, "filesystem", lambda folder, table: ("nfs4", "/home") if "shared" in str(folder) else ("xfs", "/"))
    monkeypatch.setattr(slurm_queue, "node_addresses", lambda: ["127.0.0.1", "gpu7"])
    (line,) = visibility.unseen_folders({"the run folder": tmp_path, "cache_dir": tmp_path / "shared"})
    assert line.startswith(f"the run folder {tmp_path} is on a disk of this machine (xfs at /)") and "output_dir=" in line
    monkeypatch.setattr(slurm_queue, "node_addresses", lambda: ["127.0.0.1", "localhost"])
    assert visibility.unseen_folders({"the run folder": tmp_path}) == []
