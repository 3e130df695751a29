"""What differs between two configurations: the options chosen first, then leaf keys added, removed and changed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specforge.config.compose import flatten
from specforge.config.freeze import CONFIG_FILE, is_excluded, load_yaml, read_config
from specforge.errors import ConfigError

# Paths, names, launcher, tracker: they say where a run happened, not what it computed.
DEFAULT_IGNORE: tuple[str, ...] = ("name", "output_dir", "cache_dir", "run", "launcher", "tracker", "target.resolved_path")
_BOOKKEEPING = ("format_version", "command", "choices")


@dataclass
class Side:
    """One side of a comparison: what it was called, its options and its leaf keys."""

    label: str
    choices: dict[str, str | None]
    leaves: dict[str, Any]


@dataclass
class Difference:
    """``choices`` and ``changed`` map a key to both values; ``added`` is only in the second side, ``removed`` only in the first."""

    choices: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    added: dict[str, Any] = field(default_factory=dict)
    removed: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.choices or self.added or self.removed or self.changed)


class _Absent:
    """Stands for a key that a side does not have; no value of a configuration is equal to it."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclass
class Matrix:
    """What differs between any number of sides: a key to one value a side, ``ABSENT`` where a side has no such key."""

    labels: list[str]
    choices: dict[str, list[Any]] = field(default_factory=dict)
    values: dict[str, list[Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.choices or self.values)


def compare_all(sides: Sequence[Side], ignore: Sequence[str] = DEFAULT_IGNORE) -> Matrix:
    """Every option and key that is not the same in all ``sides``, in the order of the first side that has it."""
    result = Matrix([side.label for side in sides])
    if all(side.choices for side in sides):  # a plain YAML file does not say which options it was made of
        result.choices = _differing([side.choices for side in sides], ignore)
    result.values = _differing([side.leaves for side in sides], ignore)
    return result


def _differing(tables: Sequence[dict[str, Any]], ignore: Sequence[str]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for table in tables for key in table if not is_excluded(key, ignore))
    rows = {key: [table.get(key, ABSENT) for table in tables] for key in keys}
    return {key: row for key, row in rows.items() if not all(_same(row[0], value) for value in row[1:])}


def compare(first: Side, second: Side, ignore: Sequence[str] = DEFAULT_IGNORE) -> Difference:
    """Everything that differs outside of the dotted prefixes ``ignore``."""
    result = Difference()
    if first.choices and second.choices:
        for group in dict.fromkeys([*first.choices, *second.choices]):
            a, b = first.choices.get(group), second.choices.get(group)
            if a != b and not is_excluded(group, ignore):
                result.choices[group] = (a, b)
    a_leaves = {k: v for k, v in first.leaves.items() if not is_excluded(k, ignore)}
    b_leaves = {k: v for k, v in second.leaves.items() if not is_excluded(k, ignore)}
    result.removed = {k: v for k, v in a_leaves.items() if k not in b_leaves}
    result.added = {k: v for k, v in b_leaves.items() if k not in a_leaves}
    result.changed = {k: (v, b_leaves[k]) for k, v in a_leaves.items() if k in b_leaves and not _same(v, b_leaves[k])}
    return result


def read_side(text: str, command: str = "train", extra_dirs: Sequence[str] = ()) -> Side:
    """A run folder, a YAML file, or a quoted list of overrides (empty = the defaults).

    Raises:
        ConfigError: it is none of them, or it does not compose.
    """
    path = Path(text).expanduser()
    if text.strip() and path.is_dir():
        return _from_plain(text, read_config(path))
    if text.strip() and path.is_file():
        return _from_plain(text, read_config(path.parent) if path.name == CONFIG_FILE else load_yaml(path))
    words = shlex.split(text)
    if all("=" in word or word.startswith("~") for word in words):
        return _from_overrides(text, words, command, extra_dirs)
    raise ConfigError(
        f'{text!r} — is not a run folder, a YAML file or a list of overrides. Write overrides in quotes: "draft=llama optimizer.lr=1e-4".'
    )


def _from_plain(label: str, config: dict[str, Any]) -> Side:
    values = {k: v for k, v in config.items() if k not in _BOOKKEEPING}
    return Side(label, dict(config.get("choices") or {}), flatten(values))


def _from_overrides(label: str, words: Sequence[str], command: str, extra_dirs: Sequence[str]) -> Side:
    from specforge.config.compose import compose_overrides
    from specforge.config.derive import derive, run_name

    composed = compose_overrides(command, words, extra_dirs)
    composed.config["name"] = run_name(composed.config, composed.choices)
    config = composed.config
    if any(v == "???" for v in flatten(config).values()):
        return Side(label or "defaults", composed.choices, flatten(config))
    # A target that is on disk fills the draft's dimensions, so that overrides compare with a frozen run.
    filled = derive(config, lambda _: None, prepare=False)
    return Side(label or "defaults", composed.choices, flatten(filled.config))


def _same(a: Any, b: Any) -> bool:
    # 1 and 1.0 are one value in YAML, true and 1 are not.
    return isinstance(a, bool) == isinstance(b, bool) and a == b
