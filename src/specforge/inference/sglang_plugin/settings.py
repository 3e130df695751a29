"""What the plug-in is told, and how: one environment variable with JSON in it, read in every process of the server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specforge.errors import ConfigError

ENVIRONMENT_VARIABLE = "SPECFORGE_CAPTURE"
ENTRY_POINT_GROUP = "sglang.srt.plugins"
ENTRY_POINT_NAME = "specforge_capture"
ENTRY_POINT_VALUE = "specforge.inference.sglang_plugin.plugin:register"
# The key of the answer's meta_info under which the plug-in speaks.
ANSWER_KEY = "specforge"


@dataclass(frozen=True)
class CaptureSettings:
    """Everything that is the same for all marked requests of one server.

    Args:
        aux_layer_ids: output-side ids, ascending.
        final_hidden, target_argmax: capture these too.
        store_path: folder of the store transport; null allows only the inline transport.
        store_bytes: cap of that folder.
        pending_bytes: features on their way from the device to a store or an answer; more are answered "busy".
        inline_bytes: largest features of one request that may go into its answer.
        revision: the target's revision as the user named it.
        ignore_interrupt: Ctrl-C is the owner's business, who then stops the server; a server on its own terminal must not set it.
    """

    aux_layer_ids: tuple[int, ...]
    final_hidden: bool = True
    target_argmax: bool = True
    store_path: str | None = None
    store_bytes: int = 8 << 30
    pending_bytes: int = 2 << 30
    inline_bytes: int = 256 << 20
    revision: str | None = None
    ignore_interrupt: bool = False

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "aux_layer_ids": list(self.aux_layer_ids)})


def read_settings(environment: Mapping[str, str]) -> CaptureSettings | None:
    """The settings of this process, ``None`` when the plug-in is not wanted. Raises :class:`ConfigError` for a value it cannot use."""
    text = environment.get(ENVIRONMENT_VARIABLE, "").strip()
    if not text:
        return None
    known = {f.name: f for f in dataclasses.fields(CaptureSettings)}
    try:
        values: dict[str, Any] = json.loads(text)
        unknown = sorted(set(values) - set(known))
        ids = tuple(int(i) for i in values["aux_layer_ids"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{ENVIRONMENT_VARIABLE}={text[:200]}: must be JSON with at least aux_layer_ids, for example "
            f'{ENVIRONMENT_VARIABLE}=\'{{"aux_layer_ids": [1, 14, 26]}}\' ({type(error).__name__}: {error})'
        ) from None
    if unknown:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: no such key {', '.join(unknown)}; allowed are {', '.join(known)}")
    if list(ids) != sorted(set(ids)) or any(i < 0 for i in ids):
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: aux_layer_ids={list(ids)} must be distinct, ascending output-side ids from 0 up")
    return CaptureSettings(**{**values, "aux_layer_ids": ids})
