"""Entry point ``specforge_capture`` of the group ``sglang.srt.plugins``: loaded by every SGLang of an installation, in each process.

It registers nothing unless ``SPECFORGE_CAPTURE`` is set. SGLang only logs an exception of a plug-in and serves on without it; so what
must stop the server here ends the process, and what takes effect is asked for by the client before it sends work.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from typing import Any

from specforge.errors import ConfigError, TargetError
from specforge.inference.sglang_installation import sglang_version
from specforge.inference.sglang_plugin.settings import ENTRY_POINT_NAME, CaptureSettings, read_settings

logger = logging.getLogger("specforge_capture")

OLDEST_VERSION = (0, 5, 16)

_LOGITS_PROCESSOR = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
_LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def register() -> None:
    """Called by SGLang once a process. Ends the process for settings or an SGLang that cannot work."""
    try:
        settings = read_settings(os.environ)
        if settings is None:
            return
        version = check_version(sglang_version())
    except ConfigError as error:
        raise SystemExit(f"{ENTRY_POINT_NAME}: {error}") from None
    if settings.ignore_interrupt:
        _ignore_interrupt()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    capture = _Capture(settings, version)
    HookRegistry.register(_LOAD_MODEL, capture.after_load_model, HookType.AFTER)
    HookRegistry.register(_LOGITS_PROCESSOR, capture.after_logits, HookType.AFTER)


def version_numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, which order releases."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def check_version(version: str) -> str:
    """``version`` itself; raises :class:`ConfigError` when it is older than the plug-in interface."""
    if version_numbers(version) < OLDEST_VERSION:
        wanted = ".".join(map(str, OLDEST_VERSION))
        raise ConfigError(f"SGLang {version} is not supported: capturing features needs {wanted} or newer (its plug-in interface). "
                          "Install it "
                          f"with: pip install 'sglang>={wanted}'")
    return version


class _Capture:
    """The two hooks; the second does nothing until a target was loaded and accepted."""

    def __init__(self, settings: CaptureSettings, version: str) -> None:
        self.settings = settings
        self.version = version
        self.hook: Any = None

    def after_load_model(self, result: Any, runner: Any, *_: Any, **__: Any) -> None:
        """The target is loaded and no graph is captured yet, so the graphs will give the auxiliary states too."""
        from specforge.inference.sglang_plugin.target_model import enable_capture, refusal

        reason = refusal(runner)
        try:
            if reason is not None:
                raise TargetError(reason)
            how = enable_capture(runner.model, self.settings.aux_layer_ids, int(runner.model_config.num_hidden_layers))
        except TargetError as error:
            logger.error("%s: refused: %s", ENTRY_POINT_NAME, error)
            raise RuntimeError(f"{ENTRY_POINT_NAME}: {error}") from None
        self.hook = self._make_hook(runner, how)
        logger.warning("%s: capturing layers %s of %s (SGLang %s) by %s", ENTRY_POINT_NAME, list(self.settings.aux_layer_ids),
                       type(runner.model).__name__, self.version, how)

    def after_logits(self, result: Any, *args: Any, **kwargs: Any) -> None:
        if self.hook is not None:
            self.hook(result, *args, **kwargs)

    def _make_hook(self, runner: Any, how: str) -> Any:
        import torch
        from sglang.srt.runtime_context import get_parallel

        from specforge.inference.sglang_plugin.hook import CaptureHook
        from specforge.inference.sglang_plugin.outbox import Outbox
        from specforge.inference.sglang_plugin.server_identity import describe, loaded_target, probe_store
        from specforge.runtime.contracts import CaptureSpec, TargetIdentity
        from specforge.runtime.data_plane.feature_store import dtype_name

        parallel = get_parallel()
        settings = self.settings
        capture = CaptureSpec(
            settings.aux_layer_ids,
            settings.final_hidden,
            # With data-parallel attention the head gathers the rows of all ranks, each of which has other requests.
            settings.target_argmax and int(parallel.attn_dp_size) == 1,
            dtype_name(runner.dtype),
        )
        path = str(runner.server_args.model_path)
        target = loaded_target(path, settings.revision)
        outbox = None
        if int(parallel.attn_tp_rank) == 0:
            stored = target or TargetIdentity(path, settings.revision, "unknown", "unknown", "unknown")
            outbox = Outbox(settings, capture, stored, torch.device(runner.device))
        facts = describe(runner, settings, capture, target, self.version, how)
        if outbox is not None and outbox.store is not None:
            facts |= probe_store(outbox.store.folder)
        return CaptureHook(capture, outbox, {"status": "identity", **facts})


def _ignore_interrupt() -> None:
    """Ctrl-C reaches every process of the terminal; here its owner decides what happens, and ends the server when it is done."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread; then whoever runs the process decides
        logger.info("%s: loaded outside of the main thread, interrupts stay as they are", ENTRY_POINT_NAME)
