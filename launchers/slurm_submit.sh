#!/usr/bin/env bash
# Submit one run from a login node and show how it stands. Everything after the script's name is an override.
#   launchers/slurm_submit.sh launcher.partition=gpu launcher.nodes=2 data.train_path=/shared/data/train.jsonl
set -euo pipefail
python -m specforge launcher=slurm "$@"
python -m specforge status
