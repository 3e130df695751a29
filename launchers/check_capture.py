#!/usr/bin/env python3
"""Compare the features of real SGLang with those of transformers on this machine: every engine, both transports, ragged lengths.

  python launchers/check_capture.py TARGET [--dtype bfloat16] [--server-args '{"mem_fraction_static": 0.3}'] [--output result.json]

The measure is transformers in float32. In half precision transformers itself is off by rounding, which its row shows; a way of SGLang
passes when its median and its 99th percentile of error are at most 1.5 times those, in every captured layer. In float32 the largest
error must stay below 1e-4. An error is the norm of the difference over the norm of the state, for each token and layer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specforge.inference.engine_factory import told_quantization
from specforge.inference.target_engine.base import TargetEngine
from specforge.inference.target_engine.hf import HFTargetEngine
from specforge.inference.target_engine.sglang import SGLangTargetEngine
from specforge.inference.target_engine.sglang_server import SGLangServerTargetEngine
from specforge.modeling.target import target_identity
from specforge.modeling.target_facts import TargetFacts
from specforge.runtime.contracts import AUX_HIDDEN_STATES, TARGET_ARGMAX, CapturedFeatures, CaptureSpec, PromptTask

FLOAT32_TOLERANCE, HALF_PRECISION_FACTOR = 1e-4, 1.5


def make_tasks(facts: TargetFacts, count: int, longest: int) -> list[PromptTask]:
    """Random prompts of lengths spread from 1 to ``longest``; the same for every engine."""
    g = torch.Generator().manual_seed(0)
    lengths = [1, 2, longest, *(int(x) for x in torch.randint(3, longest, (count - 3,), generator=g))]
    ids = [torch.randint(0, facts.vocab_size, (n,), generator=g).tolist() for n in lengths]
    return [PromptTask(f"p{i}", tuple(x), tuple(int(j > len(x) // 3) for j in range(len(x)))) for i, x in enumerate(ids)]


def compare(found: list[CapturedFeatures], expected: list[CapturedFeatures], num_layers: int) -> dict[str, Any]:
    """Median, 99th percentile and maximum of the error of each captured layer and of the final state; the share of equal argmax."""
    errors: dict[str, list[torch.Tensor]] = {}
    same, count = 0, 0
    for f, e in zip(found, expected, strict=True):
        if f.tensors.keys() != e.tensors.keys():
            raise SystemExit(f"{f.sample_id}: {sorted(f.tensors)} in place of {sorted(e.tensors)}")
        for name, tensor in e.tensors.items():
            given = f.tensors[name].to(tensor.device)
            if tensor.is_floating_point():
                chunks = num_layers if name == AUX_HIDDEN_STATES else 1
                for i, (x, y) in enumerate(zip(given.float().chunk(chunks, -1), tensor.float().chunk(chunks, -1), strict=True)):
                    key = f"aux {i}" if chunks > 1 else "final"
                    errors.setdefault(key, []).append((x - y).norm(dim=-1) / y.norm(dim=-1).clamp(min=1e-6))
            elif name == TARGET_ARGMAX:
                wanted = tensor >= 0  # only places that are supervised have one
                same, count = same + int((given == tensor)[wanted].sum()), count + int(wanted.sum())
            elif not torch.equal(given, tensor):
                raise SystemExit(f"{f.sample_id}: {name} differs")
    joined = {key: torch.cat(parts) for key, parts in errors.items()}
    return {"error": {key: {"median": float(e.median()), "p99": float(e.sort().values[int(0.99 * (len(e) - 1))]), "max": float(e.max())}
                      for key, e in joined.items()}, "equal_argmax": same / max(count, 1), "places": count}  # fmt: skip


def too_far(found: dict[str, Any], allowed: dict[str, Any] | None) -> bool:
    """``allowed`` is the comparison of transformers in the same half precision, None in float32."""
    for key, error in found["error"].items():
        if allowed is None and error["max"] > FLOAT32_TOLERANCE:
            return True
        if allowed is not None and any(error[q] > HALF_PRECISION_FACTOR * allowed["error"][key][q] for q in ("median", "p99")):
            return True
    return False


def timed_capture(engine: TargetEngine, tasks: list[PromptTask], spec: CaptureSpec) -> tuple[list[CapturedFeatures], float]:
    engine.capture(tasks[:4], spec)  # starts servers, compiles kernels
    started = time.perf_counter()
    captured = engine.capture(tasks, spec)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return captured, time.perf_counter() - started


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--layers", type=int, nargs="+", help="output-side ids; default 1, N//2 - 1, N - 4")
    parser.add_argument("--server-args", type=json.loads, default={}, help="SGLang's arguments as JSON")
    parser.add_argument("--environment", type=json.loads, default={}, help="variables of the SGLang processes as JSON, such as PYTHONPATH")
    parser.add_argument("--ways", nargs="+", default=[""], help="only the ways whose name contains one of these, such as 'sglang, store'")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def sglang_ways(asked: argparse.Namespace, runtime: dict[str, Any]) -> dict[str, Callable[[], TargetEngine]]:
    """Each engine that captures through SGLang, over each transport, under the name that --ways chooses by."""
    fraction = asked.server_args.get("mem_fraction_static", 0.4)
    server_args = {k: v for k, v in asked.server_args.items() if k != "mem_fraction_static"}
    knobs = {"dtype": asked.dtype, "environment": asked.environment, "store_bytes": "4GiB", "requests_in_flight": 16, "retries": 1,
             "request_timeout_seconds": 300, "start_timeout_seconds": 600, **runtime}  # fmt: skip
    engine = {**knobs, "server_args": server_args, "mem_fraction_static": fraction}
    server = {**knobs, "server_args": {**server_args, "mem_fraction_static": fraction}, "servers": None, "token_variable": None,
              "num_servers": 1, "first_gpu": 0}  # fmt: skip
    ways: dict[str, Callable[[], TargetEngine]] = {
        "sglang, store": lambda: SGLangTargetEngine(**engine, transport="store"),
        "sglang, inline": lambda: SGLangTargetEngine(**engine, transport="inline"),
        "sglang_server, store": lambda: SGLangServerTargetEngine(**server, transport="store"),
        "sglang_server, inline": lambda: SGLangServerTargetEngine(**server, transport="inline"),
    }
    return {name: make for name, make in ways.items() if any(part in name for part in asked.ways)}


def main() -> int:
    asked = arguments()
    facts = TargetFacts.from_folder(asked.target)
    layers = tuple(sorted(asked.layers or {1, facts.num_layers // 2 - 1, facts.num_layers - 4}))
    tasks = make_tasks(facts, asked.prompts, min(asked.longest, facts.max_position_embeddings - 8))
    tokens = sum(len(t.input_ids) for t in tasks)
    identity = replace(target_identity(asked.target), quantization=told_quantization(facts.raw, asked.server_args.get("quantization")))
    runtime = {"target_folder": asked.target.absolute(), "device": "cuda" if torch.cuda.is_available() else "cpu", "identity": identity,
               "trust_remote_code": False}  # fmt: skip
    result: dict[str, Any] = {"target": asked.target.name, "dtype": asked.dtype, "layers": layers, "prompts": len(tasks), "tokens": tokens,
                              "ways": {}}  # fmt: skip
    print(f"{len(tasks)} prompts, {tokens} tokens, {asked.dtype}, layers {layers}", flush=True)

    def run(make: Callable[[], TargetEngine], dtype: str) -> tuple[list[CapturedFeatures], float]:
        engine = make()
        try:
            return timed_capture(engine, tasks, CaptureSpec(layers, final_hidden=True, target_argmax=True, dtype=dtype))
        finally:
            engine.close()

    def row(name: str, found: list[CapturedFeatures], seconds: float, allowed: dict[str, Any] | None, judged: bool = True) -> bool:
        compared = result["ways"][name] = {**compare(found, expected, len(layers)), "tokens_per_second": tokens / seconds}
        bad = judged and too_far(compared, allowed)
        shown = "; ".join(f"{key} {e['median']:.1e} {e['p99']:.1e} {e['max']:.1e}" for key, e in compared["error"].items())
        print(f"{name:24s} {shown}; equal argmax {compared['equal_argmax']:.4f} of {compared['places']}; {tokens / seconds:,.0f} tokens/s"
              f"{'  TOO FAR OFF' if bad else ''}", flush=True)  # fmt: skip
        return bad

    def hf(dtype: str) -> HFTargetEngine:
        return HFTargetEngine(dtype=dtype, batch_tokens=16384, attn_implementation=None, **runtime)

    expected, seconds = run(lambda: hf("float32"), "float32")
    print("error: median, 99th percentile, largest, of each captured layer and of the final state", flush=True)
    row("hf, float32", expected, seconds, None)
    allowed = None
    if asked.dtype != "float32":
        row(f"hf, {asked.dtype}", *run(lambda: hf(asked.dtype), asked.dtype), None, judged=False)
        allowed = result["ways"][f"hf, {asked.dtype}"]
    failed = [name for name, make in sglang_ways(asked, runtime).items() if row(name, *run(make, asked.dtype), allowed)]
    if asked.output:
        asked.output.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
