"""Reading a component's constructor as its schema: import, parameters, annotations, and a value against an annotation."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import types
import typing
from collections.abc import Iterable
from typing import Any, get_args, get_origin

from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

ALLOWED_PREFIXES: tuple[str, ...] = ("specforge.", "torch.optim.")

# Arguments that other people's classes take at run time; ours name theirs in `runtime_arguments`.
_FOREIGN_RUNTIME = {"torch.optim.lr_scheduler.": ("optimizer",), "torch.optim.": ("params",)}

# The package that is missing -> the extra that brings it.
EXTRAS: dict[str, str] = {
    "gguf": "demo",
    "accelerate": "demo",
    "sglang": "sglang",
    "mooncake": "mooncake",
    "yunchang": "usp",
    "triton": "gpu",
    "submitit": "slurm",
    "tensorboard": "track",
    "wandb": "track",
    "optuna": "optuna",
}

# Keys with a meaning of their own inside a component's node. `resolved_path` is added to the target by config.derive.
RESERVED = ("_target_", "_partial_")
DERIVED = {"target": ("resolved_path",)}


class TargetProblem(Exception):
    """Why a ``_target_`` cannot be used; the message is a full sentence without the key."""


def allowed(target: str, plugins: Iterable[str]) -> bool:
    """Whether ``_target_`` lies under a prefix of the allow-list or under a plug-in package named by the run."""
    prefixes = (*ALLOWED_PREFIXES, *(f"{p.rstrip('.')}." for p in plugins))
    return any(target.startswith(prefix) for prefix in prefixes)


def locate(target: Any, plugins: Iterable[str] = ()) -> Any:
    """Import what ``_target_`` names.

    Raises:
        TargetProblem: not a string, not allowed, or not importable; the real import error is in the message.
    """
    plugins = tuple(plugins)
    if not isinstance(target, str) or "." not in target:
        raise TargetProblem(f"{target!r} is not a dotted path of a class, for example specforge.training.optimizer.AdamW")
    if not allowed(target, plugins):
        package = target.split(".")[0]
        raise TargetProblem(
            f"'{target}' is outside of what a configuration may build ({', '.join(p + '*' for p in ALLOWED_PREFIXES)}). "
            f"If you trust the package, name it: plugins=[{package}]"
        )
    module_name, _, attribute = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        extra = f". Install it with: pip install 'specforge[{EXTRAS[package]}]'" if package in EXTRAS else ""
        raise TargetProblem(f"'{target}' cannot be imported: {type(error).__name__}: {error}{extra}") from error
    found = getattr(module, attribute, None)
    if found is None or not callable(found):
        from specforge.config.compose import did_you_mean

        public = [n for n, v in vars(module).items() if inspect.isclass(v) and not n.startswith("_")]
        raise TargetProblem(f"module {module_name} has no class '{attribute}'.{did_you_mean(attribute, public)}")
    if not inspect.isclass(found) and target.startswith("specforge."):
        raise TargetProblem(f"'{target}' is a function; a configuration builds classes only")
    # A re-export must not lead out of the allow-list (for example specforge.x.os.system).
    if inspect.isclass(found) and not allowed(f"{found.__module__}.{found.__qualname__}", plugins):
        raise TargetProblem(f"'{target}' leads to {found.__module__}.{found.__qualname__}, which a configuration may not build")
    if not inspect.isclass(found) and not allowed(f"{getattr(found, '__module__', '')}.", plugins):
        raise TargetProblem(f"'{target}' leads to {getattr(found, '__module__', '?')}, which a configuration may not build")
    return found


@functools.lru_cache(maxsize=512)
def parameters(component: Any) -> dict[str, inspect.Parameter]:
    """The configurable parameters of a class or function, by name; runtime arguments, ``self`` and ``*args`` left out."""
    skip = set(runtime_arguments(component))
    signature = inspect.signature(component)
    return {
        name: p
        for name, p in signature.parameters.items()
        if name not in skip and p.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    }


def runtime_arguments(component: Any) -> tuple[str, ...]:
    """Names that come at run time and never from a configuration."""
    own = getattr(component, "runtime_arguments", ())
    path = f"{getattr(component, '__module__', '')}."
    foreign = next((names for prefix, names in _FOREIGN_RUNTIME.items() if path.startswith(prefix)), ())
    return (*own, *foreign)


@functools.lru_cache(maxsize=512)
def type_hints(component: Any) -> dict[str, Any]:
    """Resolved annotations of the constructor; a name that only type checkers can see is left out, the others stay."""
    function = component.__init__ if inspect.isclass(component) else component
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError:
        names = vars(importlib.import_module(function.__module__))
        hints: dict[str, Any] = {}
        for name, text in getattr(function, "__annotations__", {}).items():
            try:
                hints[name] = eval(text, dict(names)) if isinstance(text, str) else text
            except NameError:
                continue
        return hints


@functools.lru_cache(maxsize=1024)
def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        try:
            return TypeAdapter(annotation)  # the type brings a config of its own
        except (PydanticUserError, PydanticSchemaGenerationError):
            return None
    except PydanticSchemaGenerationError:
        return None


def mismatch(value: Any, annotation: Any) -> str | None:
    """Why ``value`` does not fit ``annotation``, or ``None``.

    Validated as strict JSON: a list is fine for a tuple, an int for a float and a string for a path, but "5" is no int and
    1 is no bool.
    """
    try:
        adapter = _adapter(annotation)
    except TypeError:  # an annotation that cannot be hashed
        adapter = TypeAdapter(annotation)
    if adapter is None:
        return None
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        reasons = error.errors(include_url=False, include_context=False)
        if len(reasons) == 1:
            where = "".join(f"[{part}]" for part in reasons[0]["loc"])
            return f"{where + ' ' if where else ''}{_lower(reasons[0]['msg'])}"
        return f"is not {describe(annotation)}"
    except TypeError:
        return f"is not {describe(annotation)}"
    return None


def describe(annotation: Any) -> str:
    """An annotation as a user would write it: ``int or null``, ``one of 'a', 'b'``, ``number greater than 0``."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        bounds = [_bound(m) for extra in get_args(annotation)[1:] for m in (getattr(extra, "metadata", None) or [extra])]
        return " ".join([describe(get_args(annotation)[0]), *(b for b in bounds if b)])
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in get_args(annotation))
    if annotation is type(None):
        return "null"
    if origin is not None:
        inner = ", ".join("..." if a is Ellipsis else describe(a) for a in get_args(annotation))
        return f"{getattr(origin, '__name__', str(origin))}[{inner}]"
    return {"str": "a string", "int": "int", "float": "number", "bool": "true or false"}.get(
        getattr(annotation, "__name__", ""), getattr(annotation, "__name__", str(annotation))
    )


def _bound(mark: Any) -> str:
    words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most", "min_length": "of at least"}
    return " and ".join(f"{text} {getattr(mark, name)}" for name, text in words.items() if getattr(mark, name, None) is not None)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
