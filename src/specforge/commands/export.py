"""``export``: the draft of a run as a folder that a server loads, with every tensor checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specforge.errors import ConfigError
from specforge.export.write import write_export
from specforge.training.assembly import Parts
from specforge.training.checkpoint import find_checkpoint


def run(config: dict[str, Any], run_dir: Path) -> int:
    """See ``conf/export.yaml`` for the keys."""
    if not config.get("run"):
        raise ConfigError("run=null: export needs the run whose draft is written, for example run=outputs/<name>/<run>")
    parts = Parts.from_config(config)
    checkpoint = find_checkpoint(run_dir, str(config["checkpoint"]))
    model = parts.load_draft(checkpoint, torch.device("cpu"))
    folder = Path(config["output"]).expanduser() if config.get("output") else run_dir / "export" / config["format"]
    card = {
        "run": run_dir.name, "checkpoint": checkpoint.path.name, "metrics": checkpoint.meta.metrics, "target": parts.identity.__dict__,
        "weights_digest": checkpoint.meta.weights_digest,
    }
    exported = write_export(folder, model, parts.strategy, parts.architecture, parts.facts, export_format=config["format"],
                            dtype=_dtype(config["dtype"], parts), card=card, tokenizer_folder=parts.folder)
    print(f"exported {checkpoint.path.name} as {exported['architectures'][0]} ({config['format']}, {exported['torch_dtype']}): {folder}")
    print("checked: every tensor that the loader expects is there with its shape, none is unknown, config facts agree")
    if config["format"] == "sglang":
        print(f"serve with: python -m sglang.launch_server --model-path {config['target'].get('path') or parts.folder} --speculative-algorithm EAGLE3 "
              f"--speculative-draft-model-path {folder} --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4")
    return 0


def _dtype(name: str, parts: Parts) -> torch.dtype:
    """``auto`` is the target's own: a server runs both in one dtype."""
    if name == "auto":
        name = str(parts.facts.raw.get("dtype") or parts.facts.raw.get("torch_dtype") or "bfloat16")
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype: {name} — allowed are auto, float32, bfloat16, float16.")
    return getattr(torch, name)
