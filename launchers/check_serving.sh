#!/usr/bin/env bash
# Prove and measure the draft of a run in real SGLang servers on this machine's GPU: export verify=server, then bench with and without.
#   launchers/check_serving.sh RUN [SGLANG_FLAGS ...]        e.g. launchers/check_serving.sh outputs/my-run/... --mem-fraction-static 0.3
# Both servers of the bench run at once: leave each of them less than half of the memory. SERVER_PYTHONPATH, if set, is the servers' PYTHONPATH,
# BENCH_FLAGS takes the place of the bench's "--concurrency 1 8 32", EXPORT_FLAGS are more overrides of the export, such as verify_prompts=80.
set -euo pipefail
run=$1; shift
python=${PYTHON:-python3}
logs=$run/export/bench-servers; mkdir -p "$logs"

# The flags as the mapping that the export takes: --a-b value -> a_b: value, a bare flag -> true.
mapping=$("$python" - "$@" <<'PY'
import json, sys
flags, words = {}, sys.argv[1:]
while words:
    name = words.pop(0).removeprefix("--").replace("-", "_")
    value = words.pop(0) if words and not words[0].startswith("--") else True
    try:
        flags[name] = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        flags[name] = value
print("{" + ", ".join(f"{k}: {json.dumps(v)}" for k, v in flags.items()) + "}")
PY
)
environment='{}'
[[ -z ${SERVER_PYTHONPATH:-} ]] || environment="{PYTHONPATH: \"$SERVER_PYTHONPATH\"}"
# shellcheck disable=SC2086
"$python" -m specforge export "run=$run" verify=server "server.arguments=$mapping" "server.environment=$environment" \
    ${EXPORT_FLAGS:-} | tee "$logs/export.txt"

serve() { env ${SERVER_PYTHONPATH:+PYTHONPATH="$SERVER_PYTHONPATH"} setsid "$@" & pids+=($!); }
pids=()
trap 'for pid in "${pids[@]}"; do kill -- "-$pid" 2>/dev/null || true; done' EXIT
command=$(sed -n 's/^serve with: python //p' "$logs/export.txt")
target=$(sed -n 's/.*--model-path \([^ ]*\).*/\1/p' <<<"$command")
# shellcheck disable=SC2086
serve "$python" $command --port 30000 "$@" >"$logs/with-draft.log" 2>&1
serve "$python" -m sglang.launch_server --model-path "$target" --port 30001 "$@" >"$logs/without-draft.log" 2>&1
for port in 30000 30001; do
    for _ in $(seq 600); do
        curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
        for pid in "${pids[@]}"; do kill -0 "$pid" || { tail -n 30 "$logs"/*.log; exit 1; }; done
        sleep 1
    done
done
# shellcheck disable=SC2086
"$python" -m specforge bench http://127.0.0.1:30000 --baseline http://127.0.0.1:30001 --output "$logs/bench.json" ${BENCH_FLAGS:---concurrency 1 8 32}
