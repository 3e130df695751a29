"""Filling what the target decides: its folder, and every dimension of the draft that was left null.

The target node keeps what the user wrote, so that it can be built again; where the target lies on this machine is added as
``target.resolved_path`` (absolute), a key that ``config.check`` and ``config.build`` skip. Which keys of the draft are filled is the
architecture's business: the classmethod ``fill_from_target(node, facts)`` of its class. The strategy's class has two such
classmethods of its own, for what the target decides (a mask token) and what target and draft decide together (captured layers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specforge.config.build import build, component_class
from specforge.errors import ConfigError, MissingExtraError, TargetError

if TYPE_CHECKING:
    from specforge.modeling.target_facts import TargetFacts

Report = Callable[[str], None]


class _NotPrepared(Exception):
    """Raised inside ``ensure`` at its first step of work, when nothing may be prepared."""


@dataclass
class Derived:
    """The filled configuration; ``facts`` is ``None`` and ``notes`` say why when the target is not on disk yet."""

    config: dict[str, Any]
    facts: TargetFacts | None
    notes: list[str] = field(default_factory=list)


def derive(config: dict[str, Any], report: Report, *, prepare: bool = True) -> Derived:
    """A copy of ``config`` with names, cache folder, target folder and what draft and strategy leave to the target filled.

    ``prepare=False`` neither converts nor downloads: an absent target leaves the nulls and adds a note. Torch is not imported
    unless a target must be converted or the draft's class is needed.

    Raises:
        TargetError, MissingExtraError, ConfigError: the target cannot be had, or its configuration is unusable.
    """
    filled: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    filled["cache_dir"] = str(Path(filled["cache_dir"]).expanduser().absolute())
    try:
        folder = target_folder(filled, report, prepare=prepare)
    except _NotPrepared as wait:
        return Derived(filled, None, [f"the target is not on disk yet ({wait}); dimensions that come from it stay null"])
    except (TargetError, MissingExtraError) as error:
        if prepare:
            raise
        return Derived(filled, None, [f"the target is not available: {error}"])
    from specforge.modeling.target_facts import TargetFacts

    filled["target"]["resolved_path"] = str(folder)
    facts = TargetFacts.from_folder(folder)
    plugins = filled.get("plugins") or ()
    filled["draft"] = fill_draft(filled["draft"], facts, plugins)
    filled["strategy"] = fill_strategy(filled["strategy"], facts, folder, filled["draft"], plugins)
    return Derived(filled, facts)


def target_folder(config: dict[str, Any], report: Report, *, prepare: bool = True) -> Path:
    """The target's folder, absolute; prepared or downloaded first if that is allowed."""
    from specforge.inference.target_source import TargetSource

    def stop(step: str) -> None:
        raise _NotPrepared(step)

    source = build(config["target"], expects=TargetSource, plugins=config.get("plugins") or ())  # type: ignore[type-abstract]
    # `ensure` reports before it starts any work, so a report that raises is a dry run of it.
    return source.ensure(Path(config["cache_dir"]), report if prepare else stop).absolute()


def fill_draft(node: dict[str, Any], facts: TargetFacts, plugins: Any = ()) -> dict[str, Any]:
    """The draft's node with null dimensions filled by its own class; unchanged if nothing is null or the class fills nothing."""
    if not any(value is None for value in node.values()):
        return node
    fill = getattr(component_class(node, plugins), "fill_from_target", None)
    if fill is None:
        return node
    filled = fill(node, facts)
    if not isinstance(filled, dict):
        raise ConfigError(f"draft._target_: {node['_target_']}.fill_from_target returned {type(filled).__name__} in place of a dict")
    return {**node, **filled}


def fill_strategy(
    node: dict[str, Any], facts: TargetFacts, folder: Path, draft: Mapping[str, Any], plugins: Any = ()
) -> dict[str, Any]:
    """The strategy's node with its nulls filled by its own class; unchanged if nothing is null."""
    if "_target_" not in node or not any(value is None for value in node.values()):
        return node
    owner: Any = component_class(node, plugins)
    for name, decides in (("fill_from_target", folder), ("fill_from_draft", draft)):
        fill = getattr(owner, name, None)
        filled = node if fill is None else fill(node, facts, decides)
        if not isinstance(filled, dict):
            raise ConfigError(f"strategy._target_: {node['_target_']}.{name} returned {type(filled).__name__} in place of a dict")
        node = {**node, **filled}
    return node


def run_name(config: dict[str, Any], choices: dict[str, str | None]) -> str:
    """The name given by the user, else ``<target>-<draft>-<strategy>`` from the options chosen."""
    name = config.get("name")
    if name:
        if not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
            raise ConfigError(f"name: {name!r} — a name is letters, digits, '-', '_' and '.', since it becomes a folder. Set name=<name>.")
        return str(name)
    return "-".join(str(choices.get(group) or group) for group in ("target", "draft", "strategy"))
