"""The kinds of process that a run is made of. The trainer leads; a topology may add others, such as a pool that makes features.

A topology's class adds them with a classmethod ``roles(config) -> tuple[Role, ...]`` (the trainer included or not); a run without it has
the trainer alone. The function of a role gets ``(config, run_dir, group, device)`` and returns an exit code. In a run of several roles
``launch.heartbeat.member()`` gives it the others' endpoints, its own heartbeat, and says when the run has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specforge.errors import ConfigError

TRAINER = "trainer"


@dataclass(frozen=True)
class Role:
    """``run`` is ``module:function``; ``instances`` are independent groups of ranks, each of ``processes`` a node.

    ``processes`` null leaves it to the launcher (one a GPU). The role that ``leads`` owns the rendezvous: when it ends, the run has ended
    and the others leave. ``device`` null is the run's own.
    """

    name: str
    run: str
    instances: int = 1
    nodes: int = 1
    processes: int | None = None
    device: str | None = None
    leads: bool = False


TRAINER_ROLE = Role(TRAINER, "specforge.commands.train:run_trainer", leads=True)


def roles_of(config: dict[str, Any]) -> tuple[Role, ...]:
    """The roles of a training run, the leading one first.

    Raises :class:`ConfigError` when a topology declares roles that cannot be told apart or no leader.
    """
    node = config.get("topology")
    declared: tuple[Role, ...] = ()
    if isinstance(node, dict) and "_target_" in node:
        from specforge.config.build import component_class

        owner = component_class(node, config.get("plugins") or ())
        if hasattr(owner, "roles"):
            declared = tuple(owner.roles(config))
    if not any(role.name == TRAINER for role in declared):
        declared = (TRAINER_ROLE, *declared)
    names = [role.name for role in declared]
    if len(set(names)) != len(names) or sum(role.leads for role in declared) != 1:
        raise ConfigError(f"topology: declares the roles {', '.join(names)}; each must have its own name, and exactly one leads.")
    return tuple(sorted(declared, key=lambda role: not role.leads))


def role_named(config: dict[str, Any], name: str) -> Role:
    """The role of this name.

    Raises :class:`ConfigError` when the run has no such role.
    """
    roles = roles_of(config)
    for role in roles:
        if role.name == name:
            return role
    raise ConfigError(f"--role: {name!r} is not known. Allowed: {', '.join(role.name for role in roles)}.")
