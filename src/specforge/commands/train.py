"""``train``, one rank of it: put the run together from its frozen configuration and hand it to the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from specforge.config.build import build
from specforge.data.chat_data import ChatData
from specforge.data.dataset import TokenizedDataset
from specforge.distributed.groups import Group
from specforge.evaluation.cache import held_out_batches
from specforge.evaluation.evaluator import Evaluator
from specforge.inference.engine_factory import build_engine, capture_dtype
from specforge.inference.target_engine.base import TargetEngine
from specforge.launch.outcome import clear_success, mark_success
from specforge.runtime.data_plane.batch_plan import BatchPlan
from specforge.runtime.data_plane.feature_loader import FeatureLoader
from specforge.runtime.data_plane.feature_store import FeatureStore
from specforge.topology.base import RefSource, Topology
from specforge.tracking.base import Tracker, open_trackers
from specforge.training.assembly import Parts, cast_buffers
from specforge.training.backend import Backend
from specforge.training.checkpoint import CheckpointManager
from specforge.training.optimizer import OptimizerFactory
from specforge.training.scheduler import Schedule
from specforge.training.trainer import Trainer


def run_trainer(config: dict[str, Any], run_dir: Path, group: Group, device: torch.device) -> int:
    """Train as ``config`` says and return the exit code: 0, or 128 + the signal that stopped the run after it was saved."""
    tell = print if group.is_main else lambda line: None
    parts = Parts.from_config(config)
    train_set, eval_set = load_data(config, parts, group)
    node = NodeBuilder(config)
    trainer: Trainer = node("trainer", Trainer)
    vocabulary = parts.vocabulary(train_set, tell)
    dtype = trainer.resolve_dtype(device)
    model = cast_buffers(parts.new_draft(vocabulary, tell), dtype).to(device)
    head = parts.head(dtype, device)
    tracker = open_trackers(node("tracker", Tracker, run_dir=run_dir), run_dir, group.rank)
    sources = Sources(config, parts, device, group)
    loader = None
    try:
        source = sources.open(train_set)
        plan = BatchPlan(len(train_set), config["seed"], trainer.global_batch_size, group.world_size, trainer.micro_batches)
        loader = FeatureLoader(
            train_set,
            source,
            source.store,
            plan,
            group.rank,
            packing=trainer.packing,
            max_row_tokens=trainer.max_row_tokens,
            prefetch_steps=trainer.prefetch_steps,
            device=device,
            pin=device.type == "cuda",
            total_steps=trainer.total_steps(plan.steps_per_epoch),
        )
        result = trainer.fit(
            model=model,
            strategy=parts.strategy,
            head=head,
            loader=loader,
            steps_per_epoch=plan.steps_per_epoch,
            seed=config["seed"],
            backend=node("parallel", Backend),
            optimizer=node("optimizer", OptimizerFactory),
            schedule=node("scheduler", Schedule),
            evaluator=_evaluator(node, parts, sources, eval_set, head, group, device),
            checkpoints=CheckpointManager(run_dir / "checkpoints", parts.draft_identity(vocabulary), trainer.keep_checkpoints),
            tracker=tracker,
            group=group,
            device=device,
            # Not before: a continuation that is refused leaves the folder as it was.
            on_start=(lambda: clear_success(run_dir)) if group.is_main else None,
        )
    finally:
        if loader is not None:
            loader.close()
        sources.close()
        tracker.close()
    if group.is_main and result.exit_code == 0:
        mark_success(run_dir, step=result.step, stopped_by=result.stopped_by, seconds=round(result.seconds, 3))
    if result.best_checkpoint is not None:
        tell(f"best checkpoint: {result.best_checkpoint}")
    return result.exit_code


class NodeBuilder:
    """``config.build`` of one top-level node with the run's plug-ins."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def __call__(self, node: str, expects: type, **runtime: Any) -> Any:
        return build(self.config[node], expects=expects, plugins=self.config.get("plugins") or (), **runtime)


def load_data(config: dict[str, Any], parts: Parts, group: Group) -> tuple[TokenizedDataset, TokenizedDataset | None]:
    """Training and held-out samples; rank 0 tokenizes first, the others then find its cache."""
    data: ChatData = NodeBuilder(config)("data", ChatData)
    cache_dir = Path(config["cache_dir"]).expanduser()
    trusted = bool(config["target"].get("trust_remote_code"))
    if not group.is_main:
        group.barrier()
    tell = print if group.is_main else lambda line: None
    train_set = data.load_train(parts.folder, cache_dir, tell, trust_remote_code=trusted)
    eval_set = data.load_eval(parts.folder, cache_dir, tell, trust_remote_code=trusted)
    if group.is_main:
        group.barrier()
    return train_set, eval_set


class Sources:
    """Opens feature sources that share one target engine, and closes everything in the right order."""

    def __init__(self, config: dict[str, Any], parts: Parts, device: torch.device, group: Group) -> None:
        self.config, self.parts, self.device, self.group = config, parts, device, group
        self.capture = parts.strategy.capture_spec(parts.facts, capture_dtype(config, device))
        self.topology: Topology = NodeBuilder(config)("topology", Topology)
        self._engine: TargetEngine | None = None
        self._opened: list[RefSource] = []

    def engine(self) -> TargetEngine:
        if self._engine is None:
            self._engine = build_engine(self.config, self.device)
        return self._engine

    def open(self, dataset: TokenizedDataset) -> RefSource:
        store: FeatureStore = NodeBuilder(self.config)("feature_store", FeatureStore)
        source = self.topology.open(
            identity=self.parts.identity,
            hidden_size=self.parts.facts.hidden_size,
            dataset=dataset,
            capture=self.capture,
            store=store,
            engine_factory=self.engine,
            device=self.device,
            group=self.group,
        )
        self._opened.append(source)
        return source

    def close(self) -> None:
        for source in self._opened:
            source.close()
            source.store.close()
        if self._engine is not None:
            self._engine.close()


def _evaluator(
    node: NodeBuilder,
    parts: Parts,
    sources: Sources,
    eval_set: TokenizedDataset | None,
    head: nn.Module,
    group: Group,
    device: torch.device,
) -> Any:
    """What the trainer calls: metrics of the held-out samples, whose features are captured once, at the first call."""
    if eval_set is None:
        return None
    evaluator: Evaluator = node("evaluator", Evaluator)
    batches: list[Any] = []

    def evaluate(model: nn.Module) -> dict[str, Any]:
        if not batches:
            batches.extend(held_out_batches(eval_set, sources.open(eval_set), evaluator.batch_tokens, group))
        return evaluator.from_features(parts.strategy, model, batches, head, group, device)  # type: ignore[arg-type]

    return evaluate
