"""``capture``: run the target over the data once and keep its features on disk, for ``topology=offline``.

Training and evaluation samples go into one folder. A run that was stopped, even by kill -9, goes on after the samples that are
complete. Started by torchrun, each rank captures every world_size-th sample into files of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specforge.errors import ConfigError
from specforge.inference.target_engine.base import TargetEngine
from specforge.runtime.contracts import CaptureSpec, PromptTask
from specforge.runtime.data_plane.feature_files import FeatureFileWriter

# Tokens handed to the engine at once; it cuts them into forwards itself.
_CHUNK_TOKENS = 65536


def check_inputs(config: dict[str, Any]) -> None:
    """Raise :class:`ConfigError` for an output that cannot be a feature folder."""
    if not config.get("output"):
        raise ConfigError("output=null: capture needs the folder to write, for example output=features/demo")
    output = Path(config["output"]).expanduser()
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output={config['output']}: is a file. Name a folder, new or one that capture wrote.")
    if config.get("limit") is not None and config["limit"] < 1:
        raise ConfigError(f"limit={config['limit']}: allowed is 1 or more samples, or null for all.")


def run(config: dict[str, Any], run_dir: Path) -> int:
    """The command: see ``conf/capture.yaml`` for its keys."""
    from specforge.inference.engine_factory import build_engine, capture_dtype, resolve_device
    from specforge.launch.env import rank_facts

    facts = rank_facts(os.environ)
    device = resolve_device(config["device"])
    spec = _capture_spec(config, capture_dtype(config, device))
    tasks = _tasks(config, facts.rank, facts.world_size)
    output = Path(config["output"]).expanduser()
    engine = build_engine(config, device)
    try:
        captured = capture_samples(engine, tasks, spec, output, rank=facts.rank, show=facts.is_main)
    finally:
        engine.close()
    print(f"{captured} samples captured, {len(tasks) - captured} were there already: {output}")
    return 0


def capture_samples(
    engine: TargetEngine, tasks: Sequence[PromptTask], spec: CaptureSpec, folder: Path, *, rank: int = 0, show: bool = False
) -> int:
    """Features of ``tasks`` into ``folder``; those that are complete there are skipped. Returns how many were captured.

    Raises :class:`FeatureError` when the folder belongs to another target or capture, :class:`RunError` when the disk is full.
    """
    with FeatureFileWriter(folder, engine.identity, spec, rank=rank) as writer:
        todo = [task for task in tasks if task.sample_id not in writer.finished]
        with _progress(len(tasks), len(tasks) - len(todo), show) as advance:
            for chunk in _chunks(todo):
                for features in engine.capture(chunk, spec):
                    writer.add(features)
                advance(len(chunk))
    return len(todo)


def _tasks(config: dict[str, Any], rank: int, world_size: int) -> list[PromptTask]:
    from specforge.config.build import build
    from specforge.data.chat_data import ChatData

    data = build(config["data"], expects=ChatData, plugins=config.get("plugins") or ())
    folder, cache_dir = Path(config["target"]["resolved_path"]), Path(config["cache_dir"]).expanduser()
    tell = print if rank == 0 else lambda line: None
    trusted = bool(config["target"].get("trust_remote_code"))
    train = data.load_train(folder, cache_dir, tell, trust_remote_code=trusted)
    held_out = data.load_eval(folder, cache_dir, tell, trust_remote_code=trusted)
    limit = config.get("limit")
    tasks = {}
    for dataset in (train, held_out):
        if dataset is None:
            continue
        for i in range(len(dataset) if limit is None else min(limit, len(dataset))):
            task = dataset[i]
            tasks[task.sample_id] = task
    return list(tasks.values())[rank::world_size]


def _capture_spec(config: dict[str, Any], dtype: str) -> CaptureSpec:
    from specforge.config.build import build
    from specforge.modeling.target_facts import TargetFacts
    from specforge.training.strategies.base import DraftTrainStrategy

    strategy = build(
        config["strategy"],
        expects=DraftTrainStrategy,  # type: ignore[type-abstract]
        plugins=config.get("plugins") or (),
    )
    return strategy.capture_spec(TargetFacts.from_folder(config["target"]["resolved_path"]), dtype)


def _chunks(tasks: Sequence[PromptTask]) -> Iterator[list[PromptTask]]:
    chunk: list[PromptTask] = []
    tokens = 0
    for task in tasks:
        if chunk and tokens + len(task.input_ids) > _CHUNK_TOKENS:
            yield chunk
            chunk, tokens = [], 0
        chunk.append(task)
        tokens += len(task.input_ids)
    if chunk:
        yield chunk


class _progress:
    """A rich bar as a context that gives ``advance(count)``; silent unless ``show``."""

    def __init__(self, total: int, done: int, show: bool) -> None:
        self.total, self.done, self.show = total, done, show

    def __enter__(self) -> Any:
        if not self.show:
            return lambda count: None
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns)
        self.bar.start()
        task = self.bar.add_task("capture", total=self.total, completed=self.done)
        return lambda count: self.bar.advance(task, count)

    def __exit__(self, *exc: object) -> None:
        if self.show:
            self.bar.stop()
