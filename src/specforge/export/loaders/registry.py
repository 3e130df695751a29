"""Which tensors and config facts a serving class reads, derived from an exported config.json alone.

SGLang drops unknown names and leaves missing ones uninitialised without a word, so an export is checked against this second account
of the layout, which shares no code with the modules that wrote it. Each module of this package is found by itself; a plug-in calls
:func:`register_loader`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from specforge.errors import ExportError
from specforge.modeling.target_facts import TargetFacts

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

_registered: dict[str, Loader] = {}


def _nothing(config: Config, target: TargetFacts) -> list[str]:
    return []


@dataclass(frozen=True)
class Loader:
    """``shapes(config)``: every tensor that the class reads, by name; ``problems(config, target)``: what it would misread, as sentences."""

    shapes: Callable[[Config], Shapes]
    problems: Callable[[Config, TargetFacts], list[str]] = _nothing


def register_loader(serving_class: str, loader: Loader) -> None:
    """Add the loader of a class that this package does not know; a class that it knows is replaced."""
    _registered[serving_class] = loader


def find_loader(serving_class: str) -> Loader:
    """Raises :class:`ExportError` for a class without a table: such an export could not be checked, and is not written."""
    known = {**_packaged(), **_registered}
    if serving_class not in known:
        raise ExportError(f"no loader table for {serving_class}; known: {', '.join(sorted(known))}.")
    return known[serving_class]


@cache
def _packaged() -> dict[str, Loader]:
    import specforge.export.loaders as package

    found: dict[str, Loader] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "registry":
            found.update(importlib.import_module(f"{package.__name__}.{module.name}").LOADERS)
    return found
