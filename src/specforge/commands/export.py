"""``export``: the draft of a run as a folder that a server loads, with every tensor checked and, on request, proven in a server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from specforge.config.check import check_node
from specforge.errors import ConfigError
from specforge.export.write import check_output, write_export
from specforge.training.assembly import Parts
from specforge.training.checkpoint import find_checkpoint

_VERIFY = ("files", "server")


def check_inputs(config: dict[str, Any]) -> None:
    """Raise the error of a run, checkpoint, format, dtype, output or verification that cannot be used."""
    if not config.get("run"):
        raise ConfigError("run=null: export needs the run whose draft is written, for example run=outputs/<name>/<run>")
    if config["dtype"] != "auto":
        _dtype(config["dtype"], None)
    if problems := _verify_problems(config):
        raise ConfigError(problems)
    check_output(_folder(config, Path(config["run"])), config["format"])
    find_checkpoint(Path(config["run"]), str(config["checkpoint"]))


def _verify_problems(config: dict[str, Any]) -> list[str]:
    from specforge.export.verify_server import MIN_REQUESTS

    if config["verify"] not in _VERIFY:
        return [f"verify: {config['verify']} — allowed are {', '.join(_VERIFY)}."]
    problems = check_node(config["server"], "server", config.get("plugins") or ())
    if config["verify"] == "server" and config["format"] != "sglang":
        problems.append(f"verify=server: format={config['format']} is not what an SGLang server loads. Use format=sglang.")
    for key, lowest in (("verify_prompts", MIN_REQUESTS), ("verify_max_new_tokens", 2)):
        if config[key] is not None and config[key] < lowest:
            problems.append(f"{key}: {config[key]} — allowed is {lowest} or more.")
    return problems


def run(config: dict[str, Any], run_dir: Path) -> int:
    """See ``conf/export.yaml`` for the keys."""
    parts = Parts.from_config(config)
    checkpoint = find_checkpoint(run_dir, str(config["checkpoint"]))
    model = parts.load_draft(checkpoint, torch.device("cpu"))
    folder = _folder(config, run_dir)
    card = {
        "run": run_dir.name,
        "checkpoint": checkpoint.path.name,
        "metrics": checkpoint.meta.metrics,
        "target": parts.identity.__dict__,
        "weights_digest": checkpoint.meta.weights_digest,
    }
    exported = write_export(
        folder,
        model,
        parts.strategy,
        parts.architecture,
        parts.facts,
        export_format=config["format"],
        dtype=_dtype(config["dtype"], parts),
        card=card,
        tokenizer_folder=parts.folder,
    )
    print(f"exported {checkpoint.path.name} as {exported['architectures'][0]} ({config['format']}, {exported['torch_dtype']}): {folder}")
    print("checked: every tensor that the loader expects is there with its shape, none is unknown, config facts agree")
    if config["verify"] == "server":
        _verify_in_server(config, parts, folder, run_dir)
    if config["format"] == "sglang":
        print(f"serve with: {_serve_command(config, parts, folder)}")
    return 0


def _verify_in_server(config: dict[str, Any], parts: Parts, folder: Path, run_dir: Path) -> None:
    from specforge.commands.train import load_data
    from specforge.distributed.groups import SingleGroup
    from specforge.evaluation.decode import DecodeSettings
    from specforge.export.verify_server import MIN_REQUESTS, REPORT, Checked, choose_prompts, verify_in_server
    from specforge.inference.engine_factory import resolve_device
    from specforge.inference.target_engine.base import resolve_dtype

    device = resolve_device(config["device"])
    dtype = str(resolve_dtype(config["target_backend"].get("dtype") or "auto", device)).removeprefix("torch.")
    exact = dtype == "float32"
    max_new_tokens = config["verify_max_new_tokens"] or (64 if exact else 256)
    train_set, held_out = load_data(config, parts, SingleGroup())
    prompts = choose_prompts(parts, [held_out, train_set], config["verify_prompts"] or (MIN_REQUESTS if exact else 256), max_new_tokens)
    settings = DecodeSettings(config["evaluator"]["num_draft_tokens"], max_new_tokens, 0.0, "target_only", frozenset())
    logs = run_dir / "export" / f"server-{time.strftime('%Y%m%d-%H%M%S')}"
    verdict = verify_in_server(config, parts, folder, Checked(prompts, settings, dtype), device, logs)
    facts = verdict.facts
    print(
        f"verified in SGLang, {dtype}: {facts['num_requests']} greedy requests, {facts['lossless_requests']} with the same output as "
        f"without the draft, {facts['requests_with_equal_counts']} with the verify steps of our own decoding"
    )
    print(
        f"accept_length {facts['accept_length_server']:.3f} in the server, {facts['accept_length_ours']:.3f} here, over "
        f"{facts['verify_steps_server']} verify steps; written to {folder / REPORT}"
    )
    for line in [*(f"tie: {t}" for t in verdict.ties), *(f"warning: {w}" for w in verdict.warnings)]:
        print(line)


def _serve_command(config: dict[str, Any], parts: Parts, folder: Path) -> str:
    from specforge.inference.sglang_process import command_line

    arguments = {
        "model_path": config["target"].get("path") or parts.folder,
        "speculative_draft_model_path": folder,
        **parts.strategy.serving_arguments(config["evaluator"]["num_draft_tokens"]),
    }
    return " ".join(["python -m sglang.launch_server", *command_line(arguments)])


def _folder(config: dict[str, Any], run_dir: Path) -> Path:
    return Path(config["output"]).expanduser() if config.get("output") else run_dir / "export" / config["format"]


def _dtype(name: str, parts: Parts | None) -> torch.dtype:
    """``auto`` is the target's own: a server runs both in one dtype."""
    if name == "auto" and parts is not None:
        name = str(parts.facts.raw.get("dtype") or parts.facts.raw.get("torch_dtype") or "bfloat16")
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype: {name} — allowed are auto, float32, bfloat16, float16.")
    return getattr(torch, name)
