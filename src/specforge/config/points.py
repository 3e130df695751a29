"""The points of a multirun: every combination of the swept values, as plain override lists."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specforge.config.locate import config_dir
from specforge.errors import ConfigError

MAX_POINTS = 10_000


@dataclass(frozen=True)
class Grid:
    """A parsed sweep: one list of ``key=value`` words a key, in the order of the line. A key with one word is fixed."""

    values: tuple[tuple[str, ...], ...]
    keys: tuple[str, ...]

    @property
    def swept(self) -> list[str]:
        """The keys with several values, or written as a sweep with one."""
        return [key for key, words in zip(self.keys, self.values, strict=True) if key and len(words) > 1]

    @property
    def fixed(self) -> list[str]:
        """The words that are the same in every point."""
        return [words[0] for words in self.values if len(words) == 1]

    def __len__(self) -> int:
        count = 1
        for words in self.values:
            count *= len(words)
        return count

    def points(self) -> list[list[str]]:
        """Every combination, the last key fastest."""
        return [list(point) for point in itertools.product(*self.values)]


def expand(overrides: Sequence[str], extra_dirs: Sequence[str] = ()) -> list[list[str]]:
    """The points of ``overrides``: choices (``a,b``), ``choice()``, ``range()``, ``glob()``, in Hydra's own grammar.

    Raises:
        ConfigError: an override does not parse, cannot be enumerated, or the product is absurdly large.
    """
    return parse_grid(overrides, extra_dirs).points()


def searchpath(overrides: Sequence[str]) -> list[str]:
    """The entries of ``hydra.searchpath=[...]``, where ``glob()`` must look as well."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    words = [word for word in overrides if word.startswith("hydra.searchpath=")]
    return [str(entry) for o in OverridesParser.create().parse_overrides(words) for entry in o.value()]  # type: ignore[union-attr]


def parse_grid(overrides: Sequence[str], extra_dirs: Sequence[str] = ()) -> Grid:
    """As :func:`expand`, before the product is made. A key that is given twice has its last values, as in Hydra.

    Raises:
        ConfigError: all overrides that cannot be enumerated, or more than ``MAX_POINTS`` points.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from specforge.config.compose import explain

    words: dict[str, tuple[str, tuple[str, ...]]] = {}
    problems: list[str] = []
    with _config_loader(extra_dirs) as loader:
        parser = OverridesParser.create(config_loader=loader)
        for text in overrides:
            try:
                [override] = parser.parse_overrides([text])
                # A deletion (~key) and a value of one key do not replace each other.
                identity = f"~{override.key_or_group}" if override.is_delete() else override.key_or_group
                words.pop(identity, None)
                words[identity] = ("" if override.is_delete() else override.key_or_group, _values(override))
            except HydraException as error:
                problems.append(str(explain(error)))
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    grid = Grid(tuple(values for _, values in words.values()), tuple(key for key, _ in words.values()))
    if len(grid) > MAX_POINTS:
        raise ConfigError(f"-m: more than {MAX_POINTS} points. Sweep fewer values at a time.")
    return grid


@contextmanager
def _config_loader(extra_dirs: Sequence[str]) -> Iterator[Any]:
    """Hydra's view of conf/ and the user's own folders, which ``glob()`` looks into."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from specforge.config.compose import VERSION_BASE

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir()), version_base=VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        for directory in extra_dirs:
            loader.get_search_path().prepend("command-line", directory if "://" in directory else f"file://{directory}")
        if extra_dirs:
            loader.repository.initialize_sources(loader.get_search_path())  # type: ignore[attr-defined]
        yield loader


def _values(override: Any) -> tuple[str, ...]:
    """The words that one override stands for; an override that is no sweep stands for itself."""
    if not override.is_sweep_override():
        return (override.input_line or "",)
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: an interval has no end of values. Write range(start,stop,step) or choice(a,b,c), "
            "or let a sampler choose: hydra/sweeper=optuna."
        )
    key = override.get_key_element()
    # No more than can be refused: range(0,1e12) must not fill the memory first.
    listed = itertools.islice(override.sweep_string_iterator(), MAX_POINTS + 1)
    values = tuple(dict.fromkeys(f"{key}={value}" for value in listed))
    if not values:
        raise ConfigError(f"{override.input_line}: matches nothing. {_options(override.key_or_group)}")
    return values


def _options(key: str) -> str:
    from specforge.config.help import group_options

    options = group_options().get(key)
    return f"Options of {key}: {', '.join(options)}." if options else "specforge --help lists the options of each group."
