"""The points of a multirun: every combination of the swept values, as plain override lists."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from specforge.config.locate import config_dir
from specforge.errors import ConfigError

MAX_POINTS = 10_000


def expand(overrides: Sequence[str], extra_dirs: Sequence[str] = ()) -> list[list[str]]:
    """Choices (``a,b``), ``choice()``, ``range()``, ``interval`` refused, ``glob()``: Hydra's own grammar, the last key fastest.

    Raises:
        ConfigError: an override does not parse, cannot be enumerated, or the product is absurdly large.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from specforge.config.compose import VERSION_BASE, explain

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir()), version_base=VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        for directory in extra_dirs:
            loader.get_search_path().prepend("command-line", f"file://{directory}")
        if extra_dirs:
            loader.repository.initialize_sources(loader.get_search_path())  # type: ignore[attr-defined]
        try:
            parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
            lists = [_values(override) for override in parsed]
        except HydraException as error:
            raise ConfigError(str(explain(error))) from error
    count = 1
    for values in lists:
        count *= len(values)
    if count > MAX_POINTS:
        raise ConfigError(f"-m: {count} points are more than {MAX_POINTS}. Sweep fewer values at a time.")
    return [list(point) for point in itertools.product(*lists)]


def _values(override: object) -> list[str]:
    from hydra.core.override_parser.types import Override

    assert isinstance(override, Override)
    if not override.is_sweep_override():
        return [override.input_line or ""]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{override.input_line}: an interval has no end of values. Write range(start,stop,step) or choice(a,b,c).")
    key = override.get_key_element()
    values = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not values:
        raise ConfigError(f"{override.input_line}: matches nothing. specforge --help lists the options of each group.")
    return values
