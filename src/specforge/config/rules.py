"""Facts that no single group can know: which choices do not go together, and which override to change.

Each rule has an id, so that a test can go through the whole product of the groups and see every combination either pass or fail by
a declared rule. A component's class may add its own: a strategy through ``rules(choices, config)``, any other group's class through a
classmethod of that name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specforge.config import schema
from specforge.config.build import build, component_class
from specforge.errors import ConfigError

if TYPE_CHECKING:
    from specforge.modeling.target_facts import TargetFacts

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Facts:
    """What a rule may look at. ``target`` is ``None`` when the target is not on disk (plan)."""

    config: dict[str, Any]
    choices: dict[str, str | None]
    target: TargetFacts | None

    def value(self, *paths: str) -> Any:
        """The first of several dotted keys that is set, else ``None``."""
        for path in paths:
            node: Any = self.config
            for part in path.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            if node is not None:
                return node
        return None

    @property
    def remote(self) -> bool:
        """Whether the run takes place on other machines, whose devices this one cannot look at."""
        node = self.config.get("launcher")
        if not isinstance(node, dict) or "_target_" not in node:
            return False
        return bool(getattr(component_class(node, self.config.get("plugins") or ()), "remote", False))

    @property
    def world_size(self) -> int:
        """Processes of the training run; those that the launcher would start when their number is left open."""
        if self.remote:
            from specforge.launch.plan import world_size

            try:
                return world_size(self.config)
            except ConfigError:
                return 1  # ranks_can_be_placed says why
        processes = self.value("launcher.processes")
        if isinstance(processes, int):
            return processes
        device = str(self.config.get("device", "auto"))
        if device == "cpu" or ":" in device:
            return 1
        from specforge.launch.plan import visible_gpus

        return max(1, visible_gpus())


@dataclass(frozen=True)
class Incompatibility:
    """One declared rule: ``find`` returns the message when the facts break it.

    ``training`` rules concern ``train`` alone, ``drafting`` rules every command but those that only run the target.
    """

    id: str
    severity: Severity
    find: Callable[[Facts], str | None]
    training: bool = False
    drafting: bool = False


@dataclass(frozen=True)
class Violation:
    """A rule that a configuration breaks."""

    rule: str
    severity: Severity
    message: str


RULES: list[Incompatibility] = []


Find = Callable[["Facts"], str | None]


# What they write is the same whatever the draft will be.
_TARGET_ONLY = ("regenerate", "capture", "show_sample")


def rule(identifier: str, severity: Severity = "error", training: bool = False, drafting: bool = False) -> Callable[[Find], Find]:
    """Declare a rule."""

    def declare(find: Find) -> Find:
        RULES.append(Incompatibility(identifier, severity, find, training, drafting))
        return find

    return declare


def violations(
    config: dict[str, Any], choices: dict[str, str | None], target: TargetFacts | None, command: str = "train"
) -> list[Violation]:
    """Every rule that the configuration breaks, declared here or by a component's class."""
    facts = Facts(config, choices, target)
    rules = [r for r in RULES if not (r.training and command != "train" or r.drafting and command in _TARGET_ONLY)]
    found = [Violation(r.id, r.severity, message) for r in rules if (message := r.find(facts))]
    return [*found, *_of_components(facts)]


def enforce(config: dict[str, Any], choices: dict[str, str | None], target: TargetFacts | None, command: str = "train") -> list[str]:
    """Raise :class:`ConfigError` with all broken rules; return the warnings."""
    found = violations(config, choices, target, command)
    errors = list(dict.fromkeys(v.message for v in found if v.severity == "error"))
    if errors:
        raise ConfigError(errors)
    return [v.message for v in found if v.severity == "warning"]


def _of_components(facts: Facts) -> Iterator[Violation]:
    plugins = facts.config.get("plugins") or ()
    choices = {k: str(v) for k, v in facts.choices.items() if v is not None}
    for group in schema.GROUPS:
        node = facts.config.get(group)
        if not isinstance(node, dict) or "_target_" not in node:
            continue
        owner: Any = component_class(node, plugins)
        method = inspect.getattr_static(owner, "rules", None)
        if method is None:
            continue
        if not isinstance(method, classmethod | staticmethod):
            if group != "strategy":
                continue  # only a strategy is certain to be free of side effects when it is built
            owner = build(node, expects=object, plugins=plugins)
        for message in owner.rules(choices, facts.config):
            yield Violation(f"{group}:{choices.get(group, '?')}", "error", message)


_FEATURE_FOLDER_KEYS = tuple(f"topology.{key}" for key in ("features", "path", "folder", "features_dir", "manifest"))


@rule("offline_needs_features", training=True)
def _offline_needs_features(facts: Facts) -> str | None:
    if facts.choices.get("topology") != "offline":
        return None
    if facts.value(*_FEATURE_FOLDER_KEYS) not in (None, "???"):
        return None
    return (
        "topology=offline: reads features from disk, and no folder of features is named. Capture them first "
        "(specforge capture output=<folder>) and name the folder in the topology's node, or use topology=colocated."
    )


@rule("local_store_is_one_process", training=True)
def _local_store_is_one_process(facts: Facts) -> str | None:
    topology = facts.choices.get("topology") or ""
    if facts.choices.get("feature_store") == "local" and topology.startswith("disagg"):
        return (
            f"feature_store=local with topology={topology}: the local store lives in one process and cannot be shared. "
            "Use feature_store=shared_dir or feature_store=mooncake."
        )
    return None


@rule("degrees_fill_the_world", training=True)
def _degrees_fill_the_world(facts: Facts) -> str | None:
    node = facts.config.get("parallel")
    degrees = {k: v for k, v in node.items() if k.endswith("_degree") and isinstance(v, int)} if isinstance(node, dict) else {}
    product = 1
    for degree in degrees.values():
        product *= degree
    if product < 1 or facts.world_size % product == 0:
        return None
    written = " × ".join(f"parallel.{k}={v}" for k, v in degrees.items())
    return f"{written} = {product} does not divide the {facts.world_size} processes of the run. Change a degree or launcher.processes."


@rule("draft_vocabulary_fits", drafting=True)
def _draft_vocabulary_fits(facts: Facts) -> str | None:
    size = facts.value("strategy.draft_vocab_size", "draft.draft_vocab_size")
    if facts.target is None or not isinstance(size, int) or size <= facts.target.vocab_size:
        return None
    return (
        f"strategy.draft_vocab_size: {size} — larger than the target's vocabulary of {facts.target.vocab_size}. "
        f"Allowed: 2 to {facts.target.vocab_size}, or null for all of it."
    )


@rule("aux_layers_exist")
def _aux_layers_exist(facts: Facts) -> str | None:
    key = "strategy.aux_hidden_state_layer_ids"
    ids = facts.value(key)
    if facts.target is None or not isinstance(ids, list):
        return None
    last = facts.target.num_layers - 2
    bad = [i for i in ids if not isinstance(i, int) or not 0 <= i <= last]
    if bad:
        return (
            f"{key}: {bad} — not a layer that can be captured. The target has {facts.target.num_layers} layers; "
            f"allowed are output-side ids 0 to {last} (the last layer is the final hidden state). Change {key}."
        )
    if not ids or len(set(ids)) != len(ids):
        return f"{key}: {ids} — must name at least one layer, and each only once. Change {key}, or null for the default."
    return None


@rule("global_batch_is_even", "warning", training=True)
def _global_batch_is_even(facts: Facts) -> str | None:
    batch, micro = facts.value("trainer.global_batch_size"), facts.value("trainer.micro_batches") or 1
    if not isinstance(batch, int) or not isinstance(micro, int):
        return None
    parts = facts.world_size * micro
    if parts <= 1 or batch % parts == 0:
        return None
    return (
        f"trainer.global_batch_size={batch} cannot be cut evenly into {facts.world_size} processes × {micro} micro-batches: the result "
        f"is the same, but some wait for others. Even is a multiple of {parts}: trainer.global_batch_size={-(-batch // parts) * parts}."
    )


@rule("ranks_can_be_placed", training=True)
def _ranks_can_be_placed(facts: Facts) -> str | None:
    if _device_exists(facts) or not isinstance(facts.value("trainer.global_batch_size"), int):
        return None
    from specforge.launch.plan import make_plan

    try:
        make_plan(facts.config)
    except ConfigError as error:
        return str(error)
    except (KeyError, TypeError):  # a launcher or trainer of a plug-in that has other keys; its own code will say what it needs
        return None
    return None


@rule("device_exists")
def _device_exists(facts: Facts) -> str | None:
    device = str(facts.config.get("device", "auto"))
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not index.isdigit()):
        return f"device: {device!r} — allowed are auto, cpu, cuda and cuda:<number>. Set device=auto."
    if kind != "cuda" or facts.remote:
        return None
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        return f"device: {device!r} — torch sees {count} CUDA devices here. Use device=auto or device=cpu; specforge doctor says more."
    return None


@rule("threads_are_a_number")
def _threads_are_a_number(facts: Facts) -> str | None:
    threads = facts.config.get("num_threads")
    if threads is None or threads >= 1:
        return None
    return f"num_threads: {threads} — allowed is 1 or more, or null for torch's own choice. Set num_threads=null."


@rule("served_by_sglang", "warning", training=True)
def _served_by_sglang(facts: Facts) -> str | None:
    """conventions §5: each strategy's class says with which architectures SGLang has a loader for it."""
    draft, strategy = facts.choices.get("draft"), facts.choices.get("strategy")
    node = facts.config.get("strategy")
    if not isinstance(node, dict) or "_target_" not in node:
        return None
    owner: Any = component_class(node, facts.config.get("plugins") or ())
    served = getattr(owner, "serving_classes", {})
    if draft in served:
        if facts.target is None or not hasattr(owner, "serving_problems"):
            return None
        unread = owner.serving_problems(draft, facts.config["draft"], node)
        return f"draft={draft} strategy={strategy}: export format=sglang will refuse this: {'; '.join(unread)}." if unread else None
    return (
        f"draft={draft} strategy={strategy}: trains and evaluates here, but is not a pair that SGLang is known to serve, "
        f"and export format=sglang refuses it. Architectures it serves with this strategy: {', '.join(served) or 'none'}."
    )


@rule("remote_code", "warning")
def _remote_code(facts: Facts) -> str | None:
    if facts.value("target.trust_remote_code") is True:
        return "target.trust_remote_code=true: code that comes with the target runs on this machine. Pin it with target.revision=<commit>."
    return None
