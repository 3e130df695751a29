"""A toy draft, strategy and loader that train in milliseconds; also a program, for tests that need real processes.

python toy_substrate.py RUN_DIR key=value …      (with torchrun's variables it is one rank)
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specforge.distributed.groups import Group, SingleGroup, open_group
from specforge.launch.env import rank_facts
from specforge.runtime.contracts import StepContext, StepOutput, TargetIdentity, TrainBatch
from specforge.tracking.base import Tracker
from specforge.tracking.jsonl import JsonlTracker
from specforge.training.backend import ReplicatedBackend
from specforge.training.checkpoint import CheckpointManager
from specforge.training.identity import DraftIdentity
from specforge.training.optimizer import AdamW
from specforge.training.scheduler import Cosine
from specforge.training.trainer import Trainer, TrainResult

WIDTH = 8
NUM_SAMPLES = 24
CPU = torch.device("cpu")


class ToyModel(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(WIDTH, 16)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, WIDTH, bias=False)
        self.register_buffer("t2d", torch.ones(WIDTH, dtype=torch.bool))
        self.register_buffer("frozen", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


class ToyStrategy:
    name = "toy"

    def __init__(self, poison: str | None = None, draw: bool = False) -> None:
        self.poison = poison
        self.draw = draw

    def forward_loss(self, model: nn.Module, batch: TrainBatch, head: Any, context: StepContext) -> StepOutput:
        dtype = model.up.weight.dtype
        x, label = batch.tensors["aux_hidden_states"].to(dtype), batch.tensors["final_hidden_states"].to(dtype)
        weight = batch.tensors["loss_mask"].float()
        if self.draw:  # so that a lost generator state would change the result
            x = x + 0.01 * torch.randn_like(x)
        error = (model(x).float() - label.float()).square().mean(-1)
        if self.poison in batch.sample_ids:
            error = error * float("nan")
        right = (weight * (error < 1.0)).sum()
        total = weight.sum()
        accuracy = (torch.stack([right, right * 0.5]), torch.stack([total, total]))
        return StepOutput((error * weight).sum(), weight.sum().double(), {"per_position_accuracy": accuracy})


class ToyLoader:
    """Sample i has 3 + i % 5 rows; rows with index 0 are not supervised. A micro-batch is padded to its longest sample."""

    def __init__(
        self, global_batch: int, rank: int = 0, world: int = 1, micro: int = 1, *, unsupervised: int | None = None, delay: float = 0.0
    ) -> None:
        self.global_batch, self.rank, self.world, self.micro = global_batch, rank, world, micro
        self.unsupervised, self.delay = unsupervised, delay
        self.steps_per_epoch = NUM_SAMPLES // global_batch
        self.step = 0

    def seek(self, step: int) -> None:
        self.step = step

    def __iter__(self):
        while True:
            time.sleep(self.delay)
            yield self.step, self.batches(self.step)
            self.step += 1

    def batches(self, step: int) -> list[TrainBatch]:
        epoch, within = divmod(step, self.steps_per_epoch)
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(1000 + epoch)).tolist()
        mine = order[within * self.global_batch : (within + 1) * self.global_batch][self.rank :: self.world]
        return [self.batch(mine[m :: self.micro], step, epoch) for m in range(self.micro)]

    def batch(self, indices: list[int], step: int, epoch: int) -> TrainBatch:
        length = max([3 + i % 5 for i in indices], default=1)
        rows = max(len(indices), 1)
        tensors = {
            "aux_hidden_states": torch.zeros(rows, length, WIDTH),
            "final_hidden_states": torch.zeros(rows, length, WIDTH),
            "loss_mask": torch.zeros(rows, length, dtype=torch.bool),
            "document_ids": torch.full((rows, length), -1),
        }
        for row, index in enumerate(indices):
            size = 3 + index % 5
            generator = torch.Generator().manual_seed(index)
            tensors["aux_hidden_states"][row, :size] = torch.randn(size, WIDTH, generator=generator)
            tensors["final_hidden_states"][row, :size] = tensors["aux_hidden_states"][row, :size].roll(1, -1)
            tensors["loss_mask"][row, 1:size] = step != self.unsupervised
            tensors["document_ids"][row, :size] = row
        return TrainBatch(tensors, tuple(f"sample-{i}" for i in indices), epoch)


class ListTracker(Tracker):
    def __init__(self) -> None:
        self.rows: list[tuple[int, str, dict[str, Any]]] = []
        self.messages: list[str] = []

    def log(self, step: int, metrics: Any, kind: str) -> None:
        self.rows.append((step, kind, dict(metrics)))

    def message(self, text: str) -> None:
        self.messages.append(text)

    def close(self) -> None:
        return None


def make_identity(**changed: Any) -> DraftIdentity:
    target = TargetIdentity("toy", None, "c0", "t0", "m0")
    values = {
        "architecture": "toy",
        "strategy": "toy",
        "draft": {"_target_": "x.Y", "hidden_size": 16},
        "strategy_config": {"_target_": "x.S", "steps": 2},
    }
    return DraftIdentity.make(**{**values, "target": target, "vocabulary_digest": "v0", **changed})


def make_trainer(**changed: Any) -> Trainer:
    values: dict[str, Any] = {
        "epochs": 2,
        "max_steps": None,
        "global_batch_size": 6,
        "micro_batches": 1,
        "packing": False,
        "max_row_tokens": 64,
        "prefetch_steps": 0,
        "param_dtype": "auto",
        "clip_norm": 1.0,
        "log_every": 1,
        "eval_every": None,
        "save_every": 2,
        "keep_checkpoints": 2,
        "resume": "auto",
        "time_limit_minutes": None,
    }
    return Trainer(**{**values, **changed})


def make_adamw(**changed: Any) -> AdamW:
    return AdamW(**{"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "implementation": "auto", **changed})


def toy_evaluator(model: nn.Module) -> dict[str, Any]:
    torch.randn(3)  # an evaluation that draws must not change training
    loader = ToyLoader(NUM_SAMPLES)
    batch = loader.batches(0)[0].to(next(model.parameters()).device)
    output = ToyStrategy().forward_loss(model, batch, None, StepContext(0, 1, 0, 0))
    return {"walk_accept_length": 3.0 - float(output.loss_sum / output.weight_sum), "simulated_acc_len": 1.0}


def run_toy(
    run_dir: Path,
    *,
    group: Group | None = None,
    trainer: Trainer | None = None,
    strategy: ToyStrategy | None = None,
    tracker: Tracker | None = None,
    loader: ToyLoader | None = None,
    evaluator: Any = toy_evaluator,
    model: nn.Module | None = None,
    identity: DraftIdentity | None = None,
    optimizer: AdamW | None = None,
    device: torch.device = CPU,
) -> tuple[TrainResult, nn.Module]:
    """One toy training run in ``run_dir``; what is not given has its default."""
    group = group or SingleGroup()
    trainer = trainer or make_trainer()
    loader = loader or ToyLoader(trainer.global_batch_size, group.rank, group.world_size, trainer.micro_batches)
    model = (model or ToyModel()).to(device)
    result = trainer.fit(
        model=model,
        strategy=strategy or ToyStrategy(),
        head=None,
        loader=loader,
        steps_per_epoch=loader.steps_per_epoch,
        seed=0,
        backend=ReplicatedBackend(bucket_mib=None, timeout_minutes=1.0),
        optimizer=optimizer or make_adamw(),
        schedule=Cosine(warmup_steps=2, warmup_ratio=0.0, min_ratio=0.1),
        evaluator=evaluator,
        checkpoints=CheckpointManager(run_dir / "checkpoints", identity or make_identity(), trainer.keep_checkpoints),
        tracker=tracker or ListTracker(),
        group=group,
        device=device,
    )
    return result, model


def main(arguments: list[str]) -> int:
    run_dir, options = Path(arguments[0]), dict(item.split("=") for item in arguments[1:])
    torch.set_num_threads(1)
    facts = rank_facts(os.environ)
    if facts.rank == int(options.get("die_rank", -1)):
        print("about to die", flush=True)
        return int(options.get("die_code", 7))
    device = torch.device("cuda", facts.local_rank) if options.get("device") == "cuda" else CPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = open_group(facts, device, 1.0)
    calls: list[int] = []
    original = group.all_reduce_sum
    group.all_reduce_sum = lambda tensor: (calls.append(tensor.numel()), original(tensor))[1]  # type: ignore[method-assign]
    # Each rank starts from other weights: the broadcast at the start has to make them equal.
    model = ToyModel(seed=facts.rank)
    trainer = make_trainer(
        epochs=int(options.get("epochs", 2)),
        micro_batches=int(options.get("micro", 1)),
        save_every=int(options.get("save_every", 2)),
        param_dtype=options.get("dtype", "auto"),
    )
    loader = ToyLoader(trainer.global_batch_size, facts.rank, facts.world_size, trainer.micro_batches, delay=float(options.get("delay", 0)))
    tracker: Tracker = JsonlTracker(run_dir=run_dir) if facts.is_main else ListTracker()
    draws = options.get("draw") == "1"
    torch.manual_seed(5)
    result, _ = run_toy(
        run_dir, group=group, trainer=trainer, strategy=ToyStrategy(draw=draws), tracker=tracker, loader=loader, model=model, device=device
    )
    print(f"ended at step {result.step}: {result.stopped_by} {result.checkpoint}", flush=True)
    (run_dir / f"calls_{facts.rank}.json").write_text(json.dumps(calls))
    group.close()
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
