"""Who am I among the ranks: read once from the environment, from torchrun's variables or from nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specforge.errors import RunError

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankFacts:
    """Rank and world size, the rank on this machine, and where rank 0 listens."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    source: str  # "single" or "torchrun"

    @property
    def is_main(self) -> bool:
        return self.rank == 0


SINGLE = RankFacts(0, 1, 0, 1, "127.0.0.1", 0, "single")


def rank_facts(environ: Mapping[str, str]) -> RankFacts:
    """The facts of this process.

    With neither ``RANK`` nor ``WORLD_SIZE`` the process is alone. With one of them all of torchrun's variables must be there and
    agree; otherwise :class:`RunError` names the variable. ``LOCAL_WORLD_SIZE`` defaults to the world size (one machine).
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return SINGLE
    missing = [name for name in TORCHRUN_VARIABLES if not environ.get(name)]
    if missing:
        raise RunError(
            f"RANK or WORLD_SIZE is set, but {', '.join(missing)} is not. Start ranks with torchrun or with launcher=local, "
            "or unset RANK and WORLD_SIZE to run one process."
        )
    rank, world_size, local_rank = (_number(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE") if environ.get("LOCAL_WORLD_SIZE") else world_size
    if world_size < 1 or not 0 <= rank < world_size:
        raise RunError(f"RANK={rank} with WORLD_SIZE={world_size}: the rank must lie in 0 … {world_size - 1}.")
    if not 0 <= local_rank < local_world_size or local_world_size > world_size:
        raise RunError(f"LOCAL_RANK={local_rank} with LOCAL_WORLD_SIZE={local_world_size} and WORLD_SIZE={world_size} do not agree.")
    return RankFacts(rank, world_size, local_rank, local_world_size, environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"), "torchrun")


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise RunError(f"{name}={environ[name]!r} is not a whole number.") from None
