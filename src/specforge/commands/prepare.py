"""``specforge prepare``: tokenizes the chat files, says what was skipped, and counts what the draft vocabulary covers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from specforge.config.build import build
from specforge.data.chat_data import ChatData
from specforge.data.dataset import TokenizedDataset
from specforge.data.report import DataReport
from specforge.data.vocabulary_map import VocabularyMap, supervised_counts

_COVERAGE_SIZES = (1000, 2000, 4000, 8000, 16000, 32000, 64000)


def run(config: dict[str, Any], run_dir: Path) -> int:
    """Fill the tokenization cache and write ``skipped_rows.jsonl`` and ``prepare.json`` into the run folder."""
    from rich.console import Console

    console = Console(soft_wrap=True)
    data = build(config["data"], expects=ChatData, plugins=config.get("plugins") or ())
    data.check_paths()
    folder, cache_dir = Path(config["target"]["resolved_path"]), Path(config["cache_dir"])
    trusted = bool(config["target"].get("trust_remote_code"))
    vocab_size = _vocab_size(folder)
    sets = {}
    for name, load in (("train", data.load_train), ("eval", data.load_eval)):
        console.print(f"[bold]{name}[/bold]")
        dataset = load(folder, cache_dir, lambda line: console.print(line, markup=False, highlight=False), trust_remote_code=trusted)
        if dataset is None:
            console.print("  none (data.eval_path=null)")
            continue
        sets[name] = dataset
        _print_lengths(console, dataset, data.options.max_length)
    summary: dict[str, Any] = {name: _summary(dataset) for name, dataset in sets.items()}
    summary["coverage"] = _print_coverage(console, sets["train"], vocab_size, config.get("strategy", {}).get("draft_vocab_size"))
    run_dir.mkdir(parents=True, exist_ok=True)
    _write(run_dir / "prepare.json", json.dumps(summary, indent=2) + "\n")
    skipped = [{"where": where, "reason": reason} for d in sets.values() for where, reason in d.report.skipped]
    _write(run_dir / "skipped_rows.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in skipped))
    if skipped:
        console.print(f"every skipped row: {run_dir / 'skipped_rows.jsonl'}", markup=False)
    return 0


def _vocab_size(folder: Path) -> int:
    from specforge.modeling.target_facts import TargetFacts

    return TargetFacts.from_folder(folder).vocab_size


def _summary(dataset: TokenizedDataset) -> dict[str, Any]:
    report: DataReport = dataset.report
    return {
        "source": report.source,
        "rows": report.rows,
        "skipped": len(report.skipped),
        "samples": len(dataset),
        "tokens": report.tokens,
        "supervised_tokens": report.supervised_tokens,
        "truncated": report.truncated,
        "digest": dataset.digest,
    }


def length_histogram(lengths: np.ndarray, max_length: int) -> list[tuple[int, int, int]]:
    """(from, to, count) with both ends included; borders are powers of two up to ``max_length``."""
    edges = [1]
    while edges[-1] * 2 <= max_length:
        edges.append(edges[-1] * 2)
    counts, _ = np.histogram(lengths, bins=[*edges, max_length + 1])
    rows = [(a, b - 1, int(n)) for a, b, n in zip(edges, [*edges[1:], max_length + 1], counts, strict=True)]
    used = [i for i, row in enumerate(rows) if row[2]]
    return rows[used[0] : used[-1] + 1] if used else []


def _print_lengths(console: Any, dataset: TokenizedDataset, max_length: int) -> None:
    from rich.table import Table

    lengths = dataset.lengths
    share = dataset.report.supervised_tokens / max(1, dataset.report.tokens)
    console.print(f"  supervised share {share:.1%}; length mean {lengths.mean():.0f}, median {np.median(lengths):.0f}, max {lengths.max()}")
    table = Table("tokens", "samples", "", box=None, pad_edge=True)
    rows = length_histogram(lengths, max_length)
    most = max(count for _, _, count in rows)
    for low, high, count in rows:
        table.add_row(f"{low}–{high}", str(count), "█" * round(40 * count / most))
    console.print(table)


def _print_coverage(console: Any, train: TokenizedDataset, vocab_size: int, chosen: int | None) -> list[dict[str, Any]]:
    """Share of supervised tokens that a draft vocabulary of each size keeps."""
    counts = supervised_counts(train, vocab_size)
    console.print(f"[bold]draft vocabulary[/bold]: {int((counts > 0).sum())} of {vocab_size} target ids are supervised")
    out = []
    for size in sorted({*(s for s in _COVERAGE_SIZES if s < vocab_size), chosen or vocab_size}):
        coverage = VocabularyMap.from_counts(counts, size).coverage
        mark = "  <- strategy.draft_vocab_size" if size == (chosen or vocab_size) else ""
        console.print(f"  {size:>7} kept: coverage {coverage:.3%}{mark}", highlight=False)
        out.append({"draft_vocab_size": size, "coverage": coverage})
    return out


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
