"""Everything that a run folder tells, read without torch and without trust: what is missing or damaged becomes a note, never a number."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specforge.config.freeze import CONFIG_FILE, read_config
from specforge.errors import ConfigError
from specforge.launch.outcome import State, state

Row = dict[str, Any]
UNTRAINED = "untrained"


@dataclass(frozen=True)
class Evaluation:
    """One draft of one ``evaluate/<time>.json``. ``step`` is null for a draft that is no checkpoint of a run; the untrained one has 0."""

    file: str
    draft: str
    step: int | None
    decoding: dict[str, Any]
    features: dict[str, Any]
    context: tuple[str, ...] = ()  # what else it was measured on: prompts, template

    @property
    def interval(self) -> tuple[float, float] | None:
        """The stored 95 % interval of accept_length."""
        ends = self.decoding.get("accept_length_interval_95")
        if not isinstance(ends, list) or len(ends) != 2:
            return None
        low, high = number(ends[0]), number(ends[1])
        return None if low is None or high is None else (low, high)

    @property
    def histogram(self) -> list[int]:
        """Verify steps that accepted 0, 1, 2 … drafted tokens; empty when it is not stored."""
        counts = self.decoding.get("acceptance_histogram")
        return [int(c) for c in counts] if isinstance(counts, list) and all(number(c) is not None for c in counts) else []

    @property
    def accept_length(self) -> float | None:
        return number(self.decoding.get("accept_length"))

    @property
    def settings(self) -> str:
        """What an accept_length depends on: two that differ here do not compare."""
        tree = self.decoding.get("tree")
        known = {**self.decoding, "tree": ", ".join(f"{k} {v}" for k, v in tree.items()) if isinstance(tree, dict) else tree}
        names = {"num_draft_tokens": "{} drafted tokens", "tree": "tree ({})", "mode": "{}", "temperature": "temperature {}",
                 "max_new_tokens": "at most {} new tokens"}  # fmt: skip
        return ", ".join(words.format(known[name]) for name, words in names.items() if known.get(name) is not None)


@dataclass
class RunData:
    """One run. ``notes`` say what could not be read, for the reader of a report."""

    folder: Path
    label: str
    state: State
    config: dict[str, Any]
    choices: dict[str, str | None]
    overrides: list[str]
    env: dict[str, Any]
    plan: dict[str, Any]
    train: list[Row]
    evals: list[Row]
    evaluations: list[Evaluation]
    notes: list[str] = field(default_factory=list)

    @property
    def trained(self) -> list[Evaluation]:
        """Decoded measurements of this run's own checkpoints, oldest first."""
        return [e for e in self.evaluations if e.draft != UNTRAINED]

    @property
    def steps(self) -> int | None:
        """The last step that was logged."""
        found = [row["step"] for row in (*self.train, *self.evals)]
        return max(found) if found else None

    @property
    def seconds(self) -> float | None:
        """Training time over all attempts, as the last logged row has it."""
        return number(self.train[-1].get("seconds")) if self.train else None

    def best(self, name: str) -> tuple[float, int] | None:
        """The highest value of a held-out metric and its step; null when it was never measured."""
        found = [(value, row["step"]) for row in self.evals if (value := number(row.get(name))) is not None]
        return max(found, key=lambda pair: (pair[0], -pair[1])) if found else None

    @property
    def decoded(self) -> Evaluation | None:
        """The newest decoded measurement of a trained draft."""
        return next((e for e in reversed(self.trained) if e.accept_length is not None), None)


def number(value: Any) -> float | None:
    """A finite number, or null for everything else (also for true and false)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def read_run(folder: Path, label: str | None = None) -> RunData:
    """Read a run folder; a folder that is none is the only thing that is refused.

    Raises:
        ConfigError: no frozen configuration, or one of another format version.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder. Give a run folder (outputs/<name>/<time>-<hash>) or a sweep folder.")
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder}: is not a run folder ({CONFIG_FILE} is not there). {_hint(folder)}")
    config = read_config(folder)
    notes: list[str] = []
    if config["command"] != "train":
        notes.append(f"is a folder of the command {config['command']}, not of training")
    rows = _metrics(folder / "metrics.jsonl", notes)
    evals = [row for row in rows if row["kind"] == "eval"]
    evaluations = _evaluations(folder / "evaluate", notes)
    if not evals:
        notes.append("no evaluation while training: no held-out numbers (data.eval_path, trainer.eval_every)")
    if not any(e.draft != UNTRAINED for e in evaluations):
        notes.append("no decoded accept_length: specforge evaluate run=<this folder> measures it")
    return RunData(
        folder=folder,
        label=label or str(config.get("name") or folder.name),
        state=state(folder),
        config={k: v for k, v in config.items() if k not in ("format_version", "command", "choices")},
        choices=dict(config.get("choices") or {}),
        overrides=[str(o) for o in _yaml_list(folder / "overrides.yaml", notes)],
        env=_json(folder / "env.json", notes),
        plan=_json(folder / "plan.json", notes),
        train=[row for row in rows if row["kind"] == "train"],
        evals=evals,
        evaluations=evaluations,
        notes=notes,
    )


def unique_labels(runs: list[RunData]) -> None:
    """Give runs of one name different labels: the folder's name is added where a name comes twice, its path where that does too."""
    for describe in (lambda run: f"{run.label} ({run.folder.name})", lambda run: str(run.folder)):
        counts = [run.label for run in runs]
        for run in runs:
            if counts.count(run.label) > 1:
                run.label = describe(run)


def _hint(folder: Path) -> str:
    inside = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_FILE}"))
    return f"Runs in it: {', '.join(inside[-3:])}." if inside else "A run folder is outputs/<name>/<time>-<hash>."


def _metrics(path: Path, notes: list[str]) -> list[Row]:
    """Rows with a step and a kind, later ones of one step and kind in place of earlier ones."""
    if not path.exists():
        notes.append("no metrics.jsonl: the run logged nothing yet")
        return []
    rows: dict[tuple[str, int], Row] = {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    broken = []
    for place, line in enumerate(lines):
        try:
            row = json.loads(line)
            rows[row["kind"], int(row["step"])] = row
        except (ValueError, KeyError, TypeError):
            broken.append(place)
    if broken == [len(lines) - 1]:
        notes.append("metrics.jsonl: the last line is half written and left out (the run is at work, or was killed)")
    elif broken:
        notes.append(f"metrics.jsonl: {len(broken)} lines are not readable and left out")
    if lines and not rows:
        notes.append("metrics.jsonl: holds no row")
    return sorted(rows.values(), key=lambda row: row["step"])


def _evaluations(folder: Path, notes: list[str]) -> list[Evaluation]:
    found: list[Evaluation] = []
    for path in sorted(folder.glob("*.json"), key=lambda p: (p.stat().st_mtime_ns, p.name)):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            context = tuple(str(report[name]) for name in ("prompts", "template") if report.get(name))
            for name, parts in report["drafts"].items():
                step = re.search(r"step_(\d+)", name)
                number_of = 0 if name == UNTRAINED else int(step[1]) if step else None
                features = dict(parts.get("held_out_features") or {})
                found.append(Evaluation(path.name, name, number_of, dict(parts["decoding"]), features, context))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            notes.append(f"evaluate/{path.name}: is not a readable report and left out")
    return found


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"no {path.name}")
        return {}
    except (OSError, ValueError):
        notes.append(f"{path.name}: is not readable and left out")
        return {}
    return data if isinstance(data, dict) else {}


def _yaml_list(path: Path, notes: list[str]) -> list[Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"no {path.name}")
        return []
    except (OSError, yaml.YAMLError):
        notes.append(f"{path.name}: is not readable and left out")
        return []
    return data if isinstance(data, list) else []
