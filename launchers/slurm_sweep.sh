#!/usr/bin/env bash
# Submit a sweep as one job array, four points at a time, and show how it stands. Points that are finished are skipped when it is repeated.
#   launchers/slurm_sweep.sh optimizer.lr=1e-4,3e-4,1e-3 strategy.ttt_length=3,5,7
set -euo pipefail
python -m specforge -m launcher=slurm launcher.parallel=4 "$@"
python -m specforge status
