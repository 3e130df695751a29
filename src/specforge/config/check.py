"""Checking every component of a configuration against its constructor, before anything is built; all problems at once.

The constructor is the schema: each ``_target_`` is imported, its node is bound to the signature, each value is compared with the
annotation, nested nodes too. A problem reads ``key.path: value — what is wrong. What is allowed. How to fix it``.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from specforge.config import schema
from specforge.config.compose import did_you_mean
from specforge.config.signature import (
    DERIVED,
    RESERVED,
    TargetProblem,
    describe,
    locate,
    mismatch,
    parameters,
    runtime_arguments,
    type_hints,
)
from specforge.errors import ConfigError

MISSING = "???"


def check(config: dict[str, Any]) -> None:
    """Raise one :class:`ConfigError` with every problem of ``config`` (plain and resolved); silent when there is none."""
    problems = find_problems(config)
    if problems:
        raise ConfigError(problems)


def find_problems(config: dict[str, Any]) -> list[str]:
    """Every problem of every node, in the order of the configuration."""
    plugins = config.get("plugins") or ()
    if not isinstance(plugins, list | tuple) or not all(isinstance(p, str) for p in plugins):
        return [f"plugins: {plugins!r} — must be a list of package names, for example plugins=[my_package]."]
    problems: list[str] = []
    for key, value in config.items():
        if key in schema.GROUPS:
            problems += _check_group(key, value, plugins)
        elif value == MISSING:
            problems.append(_missing(key))
    return problems


def _check_group(key: str, node: Any, plugins: Sequence[str]) -> list[str]:
    if node == MISSING or node is None:
        return [f"{key}: no option chosen. Choose one: {key}=<option>; specforge --help lists them."]
    if not isinstance(node, dict):
        return [f"{key}: {node!r} — is not a node. Choose an option with {key}=<option>; specforge --help lists them."]
    if "_target_" not in node:
        # A group may be plain values only; then only missing ones can be wrong.
        return [_missing(path) for path, value in _leaves(node, key) if value == MISSING]
    return check_node(node, key, plugins)


def check_node(node: dict[str, Any], path: str, plugins: Sequence[str] = ()) -> list[str]:
    """The problems of one node that has a ``_target_``, nested ones included; ``path`` is its dotted key."""
    if node["_target_"] == MISSING:
        return [f"{path}._target_: missing — name the class: {path}._target_=my_package.MyClass, together with plugins=[my_package]."]
    try:
        component = locate(node["_target_"], plugins)
    except TargetProblem as problem:
        return [f"{path}._target_: {problem}"]
    known = parameters(component)
    hints = type_hints(component)
    problems: list[str] = []
    for key, value in node.items():
        where = f"{path}.{key}"
        if key in RESERVED or key in DERIVED.get(path, ()):
            continue
        if key in runtime_arguments(component):
            problems.append(f"{where}: {_show(value)} — is given at run time and cannot be configured. Remove it.")
        elif key not in known:
            problems.append(_unknown(where, key, value, component, list(known)))
        else:
            problems += _check_value(value, hints.get(key, inspect.Parameter.empty), where, plugins)
    for name, parameter in known.items():
        # A partial is completed later, by whoever calls it.
        if name not in node and not node.get("_partial_") and parameter.default is inspect.Parameter.empty:
            wanted = describe_parameter(hints.get(name))
            problems.append(f"{path}.{name}: not set — {component.__name__} needs {wanted}. Add it to the YAML.")
    return problems


def _check_value(value: Any, annotation: Any, where: str, plugins: Sequence[str]) -> list[str]:
    if isinstance(value, str) and value == MISSING:
        return [_missing(where, annotation)]
    if isinstance(value, dict) and "_target_" in value:
        return check_node(value, where, plugins) or _check_class(value, annotation, where, plugins)
    inner = [p for path, v in _nested_nodes(value, where) for p in check_node(v, path, plugins)]
    inner += [_missing(path) for path, v in _leaves(value, where) if v == MISSING] if isinstance(value, dict) else []
    if inner or _has_nodes(value) or annotation is inspect.Parameter.empty:
        return inner
    reason = mismatch(value, annotation)
    if reason is None:
        return []
    return [f"{where}: {_show(value)} — {reason}. Allowed: {describe(annotation)}. Set it with {where}=<value>."]


def _check_class(node: dict[str, Any], annotation: Any, where: str, plugins: Sequence[str]) -> list[str]:
    """A nested component must be of the class that the parameter asks for."""
    component = locate(node["_target_"], plugins)
    wanted = [a for a in (get_args(annotation) if get_origin(annotation) is not None else (annotation,)) if inspect.isclass(a)]
    wanted = [w for w in wanted if w not in (type(None), inspect.Parameter.empty)]
    if not wanted or not inspect.isclass(component) or node.get("_partial_") or issubclass(component, tuple(wanted)):
        return []
    return [f"{where}._target_: {node['_target_']} — is not {' or '.join(w.__name__ for w in wanted)}."]


def _unknown(where: str, key: str, value: Any, component: Any, known: list[str]) -> str:
    allowed_keys = f"Keys of {component.__name__}: {', '.join(known) or 'none'}."
    hint = did_you_mean(key, known) or " Remove it, or it was left over from another option of this group."
    return f"{where}: {_show(value)} — no such key.{hint} {allowed_keys}"


def _missing(where: str, annotation: Any = None) -> str:
    kind = f" ({describe_parameter(annotation)})" if annotation not in (None, inspect.Parameter.empty) else ""
    return f"{where}: missing — this value has no default{kind}. Set it with {where}=<value>."


def describe_parameter(annotation: Any) -> str:
    return "a value" if annotation in (None, inspect.Parameter.empty) else describe(annotation)


def _nested_nodes(value: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        items = [(f"{where}.{k}", v) for k, v in value.items()]
    elif isinstance(value, list):
        items = [(f"{where}[{i}]", v) for i, v in enumerate(value)]
    else:
        return []
    found: list[tuple[str, dict[str, Any]]] = []
    for path, v in items:
        found += [(path, v)] if isinstance(v, dict) and "_target_" in v else _nested_nodes(v, path)
    return found


def _has_nodes(value: Any) -> bool:
    return bool(_nested_nodes(value, ""))


def _leaves(value: Any, where: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in _leaves(v, f"{where}.{k}")]
    return [(where, value)]


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
