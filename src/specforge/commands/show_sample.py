"""``specforge show-sample``: prints training samples in colour, so that a wrong template or mask is seen before a run is paid for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specforge.config.build import build
from specforge.data.chat_data import ChatData
from specforge.data.show import legend, sample_heading, sample_text
from specforge.errors import ConfigError


def run(config: dict[str, Any], run_dir: Path) -> int:
    """Print ``count`` samples from ``index`` on; writes nothing."""
    from rich.console import Console

    console = Console(soft_wrap=True)
    data = build(config["data"], expects=ChatData, plugins=config.get("plugins") or ())
    folder = Path(config["target"]["resolved_path"])
    trusted = bool(config["target"].get("trust_remote_code"))
    dataset = data.load_train(folder, Path(config["cache_dir"]), trust_remote_code=trusted)
    index, count = int(config["index"]), int(config.get("count", 1))
    if not 0 <= index < len(dataset) or count < 1:
        raise ConfigError(f"index={index} count={count}: the dataset has samples 0 to {len(dataset) - 1}, and count is at least 1.")
    tokenizer = data.template(folder, trust_remote_code=trusted).tokenizer
    console.print(legend())
    for i in range(index, min(index + count, len(dataset))):
        sample = dataset.sample(i)
        console.print()
        console.print(sample_heading(sample, i, dataset.report.source), style="bold", markup=False, highlight=False)
        console.print(sample_text(tokenizer, sample))
    return 0
