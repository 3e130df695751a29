"""How a server that we start finds the plug-in: environment variables, and package metadata of our own where none is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

from specforge.inference.sglang_plugin.settings import (
    ENTRY_POINT_GROUP,
    ENTRY_POINT_NAME,
    ENTRY_POINT_VALUE,
    ENVIRONMENT_VARIABLE,
    CaptureSettings,
)

_SOURCE_ROOT = Path(__file__).resolve().parents[3]


def plugin_environment(settings: CaptureSettings, folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to ``environment``, a server's own. ``folder`` must exist as long as the server; it receives package metadata.

    That is written when specforge runs from a source tree that was never installed, or was installed before it had the plug-in.
    """
    changes = {ENVIRONMENT_VARIABLE: settings.to_json()}
    if allowed := environment.get("SGLANG_PLUGINS"):
        changes["SGLANG_PLUGINS"] = f"{allowed},{ENTRY_POINT_NAME}"
    if not any(point.name == ENTRY_POINT_NAME for point in entry_points(group=ENTRY_POINT_GROUP)):
        metadata = folder / "specforge_capture-1.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: specforge-capture\nVersion: 1\n", encoding="utf-8")
        (metadata / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{ENTRY_POINT_NAME} = {ENTRY_POINT_VALUE}\n", encoding="utf-8")
        paths = [environment.get("PYTHONPATH"), str(folder), str(_SOURCE_ROOT)]
        changes["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return changes
