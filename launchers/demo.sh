#!/usr/bin/env bash
# The whole life of a draft on the embedded target: train, evaluate, export. Run by `make demo`; ARGS go to the training command.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS
python -m specforge name=demo "$@"
run=$(ls -td outputs/demo/*/ | head -n 1)
run=${run%/}
trained=$SECONDS
python -m specforge evaluate run="$run"
evaluated=$SECONDS
python -m specforge export run="$run" format=sglang
echo
echo "artefacts: $run (config.yaml, metrics.jsonl, checkpoints/, evaluate/, export/sglang/)"
echo "time: training $((trained - started)) s, evaluation $((evaluated - trained)) s, export $((SECONDS - evaluated)) s, all $((SECONDS - started)) s"
