"""The scripts in launchers/: shell that parses, options that sbatch knows, and commands that compose. They run in test_slurm_cluster.py."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
SCRIPTS = sorted([*LAUNCHERS.glob("*.sh"), *LAUNCHERS.glob("*.sbatch")])
SBATCH = [path for path in SCRIPTS if path.suffix == ".sbatch"]


def test_all_of_them_are_looked_at():
    assert len(SCRIPTS) >= 7 and len(SBATCH) == 3


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_that_parses_and_stops_at_errors(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and lines[1].startswith("# ")
    assert any(re.fullmatch(r"set -e?uo pipefail", line) for line in lines)
    assert len(lines) <= 60


@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_a_script_for_sbatch_saves_in_time_and_starts_again(path):
    text = path.read_text()
    options = re.findall(r"^#SBATCH (--[a-z-]+)", text, re.MULTILINE)
    assert {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--time", "--signal", "--requeue", "--open-mode"} <= set(options)
    assert "--signal=USR2@" in text and 'if [ "$code" -eq 140 ]; then scontrol requeue' in text
    # No variable before the options: sbatch stops reading them at the first command.
    assert text.index("set -uo pipefail") > text.rindex("#SBATCH")


def test_a_missing_run_folder_is_said():
    done = subprocess.run(["bash", str(LAUNCHERS / "slurm_single_node.sbatch")], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "usage: sbatch slurm_single_node.sbatch RUN_FOLDER" in done.stderr
