"""Checks of an exported folder that need no server: every expected tensor with its shape, none unknown, config facts a server needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specforge.errors import ExportError
from specforge.export.loaders.registry import find_loader
from specforge.modeling.target_facts import TargetFacts


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the folder's safetensors files, without reading the tensors."""
    from safetensors import SafetensorError, safe_open

    shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as f:
                shapes.update({n: tuple(f.get_slice(n).get_shape()) for n in f.keys()})  # noqa: SIM118 (safe_open is no mapping)
        except (SafetensorError, OSError) as error:
            raise ExportError(f"{file} cannot be read: {error}") from None
    return shapes


def verify_folder(folder: Path, target: TargetFacts, allowed_extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Check ``folder`` as its serving class would load it; returns the config. Raises :class:`ExportError` with every problem."""
    config = json.loads((folder / "config.json").read_text())
    serving_class = config["architectures"][0]
    loader = find_loader(serving_class)
    expected, found = loader.shapes(config), folder_shapes(folder)
    problems = [f"{n} is missing (expected {list(s)})" for n, s in expected.items() if n not in found]
    problems += [f"{n} {list(found[n])} is unknown to {serving_class}" for n in found if n not in expected and n not in allowed_extra]
    problems += [
        f"{n} has shape {list(found[n])}, {serving_class} expects {list(s)}" for n, s in expected.items() if n in found and found[n] != s
    ]
    problems += _config_problems(config, target) + loader.problems(config, target)
    if problems:
        raise ExportError(f"{folder} is not what {serving_class} loads: " + "; ".join(problems) + ".")
    return config


def _config_problems(config: dict[str, Any], target: TargetFacts) -> list[str]:
    problems = []
    if config["max_position_embeddings"] < target.max_position_embeddings:
        problems.append(
            f"max_position_embeddings {config['max_position_embeddings']} is below the target's {target.max_position_embeddings}: "
            "drafts past it would be wrong; set draft.max_position_embeddings=null"
        )
    theta, parameters = config.get("rope_theta"), config.get("rope_parameters") or {}
    if theta is None or parameters.get("rope_theta") != theta:
        problems.append(f"rope theta differs between its two forms: {theta} and {parameters.get('rope_theta')}")
    return problems
