#!/usr/bin/env python3
"""Compare the features of real SGLang with those of transformers on this machine: every engine, both transports, ragged lengths.

  python launchers/check_capture.py TARGET [--dtype bfloat16] [--server-args '{"mem_fraction_static": 0.3}'] [--output result.json]

The first table row is transformers itself, with other batches: what rounding alone does. A way of SGLang passes when no feature of any
prompt is further off than --tolerance, as the norm of the difference over the norm of the feature.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from specforge.inference.target_engine.base import TargetEngine
from specforge.inference.target_engine.hf import HFTargetEngine
from specforge.inference.target_engine.sglang import SGLangTargetEngine
from specforge.inference.target_engine.sglang_server import SGLangServerTargetEngine
from specforge.modeling.target import target_identity
from specforge.modeling.target_facts import TargetFacts
from specforge.runtime.contracts import TARGET_ARGMAX, CapturedFeatures, CaptureSpec, PromptTask

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}


def make_tasks(facts: TargetFacts, count: int, longest: int) -> list[PromptTask]:
    """Random prompts of lengths spread from 1 to ``longest``; the same for every engine."""
    g = torch.Generator().manual_seed(0)
    lengths = [1, 2, longest, *(int(x) for x in torch.randint(3, longest, (count - 3,), generator=g))]
    ids = [torch.randint(0, facts.vocab_size, (n,), generator=g).tolist() for n in lengths]
    return [PromptTask(f"p{i}", tuple(x), tuple(int(j > len(x) // 3) for j in range(len(x)))) for i, x in enumerate(ids)]


def compare(found: list[CapturedFeatures], expected: list[CapturedFeatures]) -> dict[str, Any]:
    """Largest relative error of each floating-point feature over the prompts, and the share of equal argmax."""
    worst: dict[str, float] = {}
    same, count = 0, 0
    for f, e in zip(found, expected, strict=True):
        if f.tensors.keys() != e.tensors.keys():
            raise SystemExit(f"{f.sample_id}: {sorted(f.tensors)} in place of {sorted(e.tensors)}")
        for name, tensor in e.tensors.items():
            given = f.tensors[name].to(tensor.device)
            if tensor.is_floating_point():
                error = (given.float() - tensor.float()).norm(dim=-1) / tensor.float().norm(dim=-1).clamp(min=1e-6)
                worst[name] = max(worst.get(name, 0.0), float(error.max()) if error.numel() else 0.0)
            elif name == TARGET_ARGMAX:
                wanted = tensor >= 0  # only places that are supervised have one
                same, count = same + int((given == tensor)[wanted].sum()), count + int(wanted.sum())
            elif not torch.equal(given, tensor):
                raise SystemExit(f"{f.sample_id}: {name} differs")
    return {"relative_error": worst, "equal_argmax": same / max(count, 1), "places": count}


def timed_capture(engine: TargetEngine, tasks: list[PromptTask], spec: CaptureSpec) -> tuple[list[CapturedFeatures], float]:
    engine.capture(tasks[:4], spec)  # starts servers, compiles kernels
    started = time.perf_counter()
    captured = engine.capture(tasks, spec)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return captured, time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(TOLERANCE))
    parser.add_argument("--tolerance", type=float, help="default: 1e-4 in float32, 3e-2 in bfloat16, 1e-2 in float16")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--layers", type=int, nargs="+", help="output-side ids; default 1, N//2 - 1, N - 4")
    parser.add_argument("--server-args", type=json.loads, default={}, help="SGLang's arguments as JSON")
    parser.add_argument("--environment", type=json.loads, default={}, help="variables of the SGLang processes as JSON, such as PYTHONPATH")
    parser.add_argument("--ways", nargs="+", default=[""], help="only the ways whose name contains one of these, such as 'sglang, store'")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    facts = TargetFacts.from_folder(asked.target)
    layers = tuple(sorted(asked.layers or {1, facts.num_layers // 2 - 1, facts.num_layers - 4}))
    spec = CaptureSpec(layers, final_hidden=True, target_argmax=True, dtype=asked.dtype)
    tasks = make_tasks(facts, asked.prompts, min(asked.longest, facts.max_position_embeddings - 8))
    tokens, tolerance = sum(len(t.input_ids) for t in tasks), asked.tolerance or TOLERANCE[asked.dtype]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runtime = {"target_folder": asked.target.absolute(), "device": device, "identity": target_identity(asked.target), "trust_remote_code": False}
    own = ("mem_fraction_static",)
    knobs = {"dtype": asked.dtype, "server_args": {k: v for k, v in asked.server_args.items() if k not in own}, "environment": asked.environment,
             "store_bytes": "4GiB", "requests_in_flight": 16, "retries": 1, "request_timeout_seconds": 300, "start_timeout_seconds": 600}
    fraction = asked.server_args.get("mem_fraction_static", 0.4)
    servers = {"servers": None, "token_variable": None, "num_servers": 1, "first_gpu": 0,
               "server_args": {**knobs["server_args"], "mem_fraction_static": fraction}}
    ways: dict[str, Any] = {
        "hf, one prompt a forward": lambda: HFTargetEngine(dtype=asked.dtype, batch_tokens=1, attn_implementation=None, **runtime),
        "sglang, store": lambda: SGLangTargetEngine(**knobs, mem_fraction_static=fraction, transport="store", **runtime),
        "sglang_server, store": lambda: SGLangServerTargetEngine(**{**knobs, **servers}, transport="store", **runtime),
        "sglang_server, inline": lambda: SGLangServerTargetEngine(**{**knobs, **servers}, transport="inline", **runtime),
    }
    reference = HFTargetEngine(dtype=asked.dtype, batch_tokens=16384, attn_implementation=None, **runtime)
    expected, seconds = timed_capture(reference, tasks, spec)
    result: dict[str, Any] = {"target": asked.target.name, "dtype": asked.dtype, "layers": layers, "prompts": len(tasks), "tokens": tokens,
                              "tolerance": tolerance, "hf_tokens_per_second": tokens / seconds, "ways": {}}
    print(f"{len(tasks)} prompts, {tokens} tokens, {asked.dtype}, layers {layers}; hf in batches: {tokens / seconds:,.0f} tokens/s", flush=True)
    failed = False
    for name, make in ways.items():
        if not any(part in name for part in asked.ways):
            continue
        engine = make()
        try:
            found, seconds = timed_capture(engine, tasks, spec)
        finally:
            engine.close()
        facts_of_way = {**compare(found, expected), "tokens_per_second": tokens / seconds}
        result["ways"][name] = facts_of_way
        errors = facts_of_way["relative_error"]
        bad = max(errors.values()) > tolerance
        failed |= bad
        shown = ", ".join(f"{key} {value:.1e}" for key, value in errors.items())
        print(f"{name:28s} {shown}; equal argmax {facts_of_way['equal_argmax']:.4f} of {facts_of_way['places']}; "
              f"{tokens / seconds:,.0f} tokens/s{'  TOO FAR OFF' if bad else ''}", flush=True)
    if asked.output:
        asked.output.write_text(json.dumps(result, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
