"""Building components: the only place that calls Hydra's ``instantiate``.

What may be built is decided here, not in a YAML: specforge itself, ``torch.optim`` and packages that the run names with
``plugins=[...]``. A node is first made a partial and then called, because ``instantiate`` would rebuild dataclasses and lists that
are passed to it at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from specforge.config.signature import DERIVED, TargetProblem, locate, runtime_arguments
from specforge.errors import ConfigError

T = TypeVar("T")

_DERIVED_KEYS = {key for keys in DERIVED.values() for key in keys}


def build(node: dict[str, Any], *, expects: type[T], plugins: Sequence[str] = (), **runtime: Any) -> T:
    """Make the component of a plain node (composed or read from a frozen run) and check its class.

    ``runtime`` holds objects that exist only at run time; those that the class does not name in ``runtime_arguments`` are
    refused. ``plugins`` is the run's root key of that name.

    Raises:
        ConfigError: the node has no ``_target_``, is not allowed, cannot be imported, or makes something else than ``expects``.
    """
    component = _verify(node, plugins, "")
    unexpected = set(runtime) - set(runtime_arguments(component))
    if unexpected:
        raise TypeError(f"{node['_target_']} takes no runtime argument {', '.join(sorted(unexpected))}; see its runtime_arguments")
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    arguments = {key: value for key, value in node.items() if key not in _DERIVED_KEYS and key != "_partial_"}
    try:
        made = instantiate(arguments, _partial_=True, _convert_="all")
        result = made if node.get("_partial_") else made(**runtime)
    except InstantiationException as error:
        raise ConfigError(f"{node['_target_']}: {str(error).splitlines()[0]}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{node['_target_']}: cannot be made from its configuration: {error}") from error
    if not node.get("_partial_") and not isinstance(result, expects):
        raise ConfigError(f"_target_: {node['_target_']} makes a {type(result).__name__}, but {expects.__name__} is needed here")
    return result  # type: ignore[return-value]


def component_class(node: dict[str, Any], plugins: Sequence[str] = ()) -> Any:
    """The class behind a node's ``_target_``, imported and allowed, without building it."""
    return _verify(node, plugins, "")


def _verify(value: Any, plugins: Sequence[str], path: str) -> Any:
    """Refuse a target outside of the allow-list at any depth before Hydra sees the node; returns the outermost class."""
    found = None
    if isinstance(value, dict):
        if "_target_" in value:
            try:
                found = locate(value["_target_"], plugins)
            except TargetProblem as problem:
                raise ConfigError(f"{path}_target_: {problem}") from problem
        elif not path:
            raise ConfigError("a component's node needs the key _target_; choose an option of its group")
        for key, inner in value.items():
            _verify(inner, plugins, f"{path}{key}.")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _verify(inner, plugins, f"{path}{index}.")
    return found
