"""``evaluate``: accept_length by real speculative decoding on held-out prompts, beside the draft as it was before training."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specforge.commands.train import NodeBuilder, Sources, load_data
from specforge.config.build import component_class
from specforge.data.dataset import TokenizedDataset
from specforge.distributed.groups import SingleGroup
from specforge.errors import ConfigError, DataError, TargetError
from specforge.evaluation.cache import held_out_batches
from specforge.evaluation.decode import CachedTarget
from specforge.evaluation.evaluator import Evaluator
from specforge.evaluation.proposer import Proposer
from specforge.inference.engine_factory import resolve_device
from specforge.launch.worker import set_seed
from specforge.training.assembly import Parts
from specforge.training.checkpoint import find_checkpoint, write_atomic

UNTRAINED = "untrained"


def check_inputs(config: dict[str, Any]) -> None:
    """Raise the error of a run, checkpoint, draft folder or held-out file that is not there."""
    if config["data"].get("eval_path") is None:
        raise ConfigError("data.eval_path=null: evaluate needs held-out conversations. Set data.eval_path=<file>.jsonl")
    if config.get("draft_folder"):
        _as_published(config)
    elif config.get("run"):
        find_checkpoint(Path(config["run"]), str(config["checkpoint"]))


def run(config: dict[str, Any], run_dir: Path) -> int:
    """See ``conf/evaluate.yaml`` for the keys. Writes ``evaluate/<time>.json`` into the run folder and prints a table."""
    device, group = resolve_device(config["device"]), SingleGroup()
    set_seed(config["seed"])
    if config.get("draft_folder"):
        config = _as_published(config)
    parts = Parts.from_config(config)
    node = NodeBuilder(config)
    evaluator: Evaluator = node("evaluator", Evaluator)
    train_set, held_out = load_data(config, parts, group)
    if held_out is None:
        raise DataError("data.eval_path=null: evaluate needs held-out conversations. Set data.eval_path=<file>.jsonl")
    drafts = _drafts(config, parts, run_dir, train_set, device)
    sources = Sources(config, parts, device, group)
    try:
        report = _measure(evaluator, parts, drafts, sources, held_out, config["seed"], device)
    finally:
        sources.close()
    report["run"], report["prompts"] = run_dir.name, str(config["data"]["eval_path"])
    report["template_arguments"] = config["data"].get("template_arguments") or {}  # the thinking mode is one of them
    path = _report_path(run_dir / "evaluate")
    write_atomic(path, json.dumps(report, indent=1, default=str))
    show(report, path)
    return 0


def _report_path(folder: Path) -> Path:
    """A file that is not there yet: two evaluations may end in one second."""
    folder.mkdir(exist_ok=True)
    stem = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{stem}.json" if n == 1 else f"{stem}-{n}.json" for n in itertools.count(1))
    return next(folder / name for name in names if not (folder / name).exists())


def _as_published(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with draft and strategy as a published draft's own config.json states them."""
    from specforge.export.published import read_published

    published = read_published(Path(config["draft_folder"]))
    plugins = config.get("plugins") or ()
    strategy_class, draft_class = (component_class(config[group], plugins) for group in ("strategy", "draft"))
    served_as = getattr(strategy_class, "serving_classes", {}).get(getattr(draft_class, "name", ""))
    if served_as != published.config["architectures"][0]:
        raise ConfigError(
            f"draft_folder={config['draft_folder']}: its config.json says {published.config['architectures'][0]}, and this configuration is "
            f"strategy={getattr(strategy_class, 'name', '?')} draft={getattr(draft_class, 'name', '?')}. "
            f"Set strategy={published.strategy} draft={published.layout.architecture}."
        )
    draft = {**config["draft"], **published.draft_node(), "init_from": str(config["draft_folder"])}
    strategy = {**config["strategy"], **published.strategy_node()}
    return {**config, "draft": draft, "strategy": strategy}


def _drafts(config: dict[str, Any], parts: Parts, run_dir: Path, train_set: TokenizedDataset, device: torch.device) -> dict[str, nn.Module]:
    """The drafts to measure by name; the untrained one is made again exactly as the run made it."""
    silent: Callable[[str], None] = lambda line: None  # noqa: E731
    if config.get("draft_folder"):
        vocabulary = parts.vocabulary(train_set, silent)
        return {Path(config["draft_folder"]).name: parts.new_draft(vocabulary, silent).to(device).eval()}
    if not config.get("run"):
        raise ConfigError("run=null: evaluate needs run=outputs/<name>/<run>, or draft_folder=<published draft>")
    checkpoint = find_checkpoint(run_dir, str(config["checkpoint"]))
    trained = parts.load_draft(checkpoint, device)
    drafts = {f"trained ({checkpoint.path.name})": trained}
    if config["evaluator"]["num_untrained_requests"]:
        drafts = {UNTRAINED: parts.new_draft(parts.vocabulary(train_set, silent), silent).to(device).eval(), **drafts}
    return drafts


def _measure(
    evaluator: Evaluator,
    parts: Parts,
    drafts: dict[str, nn.Module],
    sources: Sources,
    held_out: TokenizedDataset,
    seed: int,
    device: torch.device,
) -> dict[str, Any]:
    engine = sources.engine()
    if not hasattr(engine, "forward_cached"):
        raise TargetError(f"target_backend: {type(engine).__name__} cannot decode step by step. Use target_backend=hf for evaluate.")
    head = parts.head(torch.float32, device)
    batches = held_out_batches(held_out, sources.open(held_out), evaluator.batch_tokens, SingleGroup())
    settings = evaluator.settings(frozenset(engine.stop_token_ids), seed)
    prompts = [prompt for i in range(len(held_out)) for prompt in _prompts(held_out, i)]
    results = {}
    for name, model in drafts.items():
        features = evaluator.from_features(parts.strategy, model, batches, head, SingleGroup(), device)
        measured = name != UNTRAINED
        limit = None if measured else evaluator.num_untrained_requests
        decoded = _decode(evaluator, engine, parts, parts.strategy.proposer(model, head), prompts, settings, device, name, compare=measured, limit=limit)  # type: ignore[arg-type]
        results[name] = {"held_out_features": features, "decoding": decoded.summary()}
    return {"target": parts.identity.__dict__, "template": parts.identity.template_digest, "drafts": results}


def _prompts(held_out: TokenizedDataset, index: int) -> list[list[int]]:
    """What serving was sent before each reply of a conversation."""
    task = held_out[index]
    return [list(task.input_ids[:start]) for start, _ in held_out.reply_spans(index)]


def _decode(
    evaluator: Evaluator,
    engine: CachedTarget,
    parts: Parts,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    settings: Any,
    device: torch.device,
    name: str,
    compare: bool,
    limit: int | None,
) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    with Progress(
        TextColumn("decoding, {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    ) as bar:
        task = bar.add_task(name, total=None)
        return evaluator.by_decoding(
            engine,
            proposer,
            parts.strategy.aux_layer_ids(parts.facts),
            prompts,
            settings,
            device,
            compare=compare,
            limit=limit,
            report=lambda done, total: bar.update(task, completed=done, total=total),
        )


def show(report: dict[str, Any], path: Path) -> None:
    """The table a person reads; every number in it is in the JSON file."""
    from rich.console import Console
    from rich.table import Table

    names = list(report["drafts"])
    drafting = "tree" if any(d["decoding"].get("tree") for d in report["drafts"].values()) else "chain"
    table = Table(title=f"held-out prompts, {drafting} drafting", caption=f"written to {path}", caption_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for label, cell in _ROWS:
        table.add_row(label, *(cell(report["drafts"][name]["decoding"], report["drafts"][name]["held_out_features"]) for name in names))
    Console(width=110 if not Console().is_terminal else None).print(table)
    for name in names:
        decoding = report["drafts"][name]["decoding"]
        # Above temperature 0 both are samples, and nothing says that they are the same one.
        if decoding["lossless_requests"] is not None and decoding["lossless_requests"] != decoding["compared_requests"]:
            print(
                f"warning: {name}: output with the draft differs from output without it: {decoding['first_difference']} "
                "(in bfloat16 a tie may; in float32 this is a bug)"
            )


def _shape(decoding: dict[str, Any]) -> str:
    tree = decoding.get("tree")
    return f"tree of {tree['num_tokens']} (topk {tree['topk']}, depth {tree['depth']})" if tree else str(decoding["num_draft_tokens"])


def _of(equal: int | None, compared: int) -> str:
    return f"{equal} of {compared}" if equal is not None and compared else "-"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


_ROWS: list[tuple[str, Callable[[dict[str, Any], dict[str, Any]], str]]] = [
    ("accept_length", lambda d, f: _number(d["accept_length"])),
    ("  95 % interval (requests)", lambda d, f: " - ".join(_number(x) for x in d["accept_length_interval_95"])),
    ("  drafted tokens a step, mode", lambda d, f: f"{_shape(d)}, {d['mode']}"),
    ("  requests, verify steps", lambda d, f: f"{d['num_requests']} of {d['num_requests_asked']}, {d['num_verify_steps']}"),
    ("acceptance histogram 0 1 2 ...", lambda d, f: " ".join(map(str, d["acceptance_histogram"]))),
    ("walk_accept_length", lambda d, f: _number(f["walk_accept_length"])),
    ("per-position accuracy", lambda d, f: " ".join(_number(a) for a in f["per_position_accuracy"])),
    ("simulated_acc_len", lambda d, f: _number(f["simulated_acc_len"])),
    ("tokens/s with the draft", lambda d, f: _number(d["tokens_per_second_with_draft"], 1)),
    ("tokens/s without", lambda d, f: _number(d["tokens_per_second_without_draft"], 1)),
    ("outputs equal without it", lambda d, f: _of(d["lossless_requests"], d["compared_requests"])),
]
