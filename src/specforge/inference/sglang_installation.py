"""Which SGLang a process of ours would import: that of its own PYTHONPATH before that of this process."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Mapping
from importlib.metadata import distributions

from specforge.errors import ConfigError, MissingExtraError


def search_path(environment: Mapping[str, str]) -> list[str]:
    """Where a process with the extra variables ``environment`` looks for packages."""
    return [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]


def require_sglang(environment: Mapping[str, str], what: str) -> None:
    """Raise :class:`MissingExtraError` when a process for ``what`` would not find SGLang."""
    if importlib.machinery.PathFinder.find_spec("sglang", search_path(environment)) is None:
        raise MissingExtraError("sglang", "sglang", what)


def sglang_version(environment: Mapping[str, str] | None = None) -> str:
    """The version of the SGLang that such a process would find; raises :class:`ConfigError` when there is none."""
    found = next(iter(distributions(name="sglang", path=search_path(environment or {}))), None)
    if found is None:
        raise ConfigError("SGLang is not installed. Install it with: pip install 'specforge[sglang]'")
    return found.version
