"""What the plug-in does to a target that SGLang has just loaded: refuse what it cannot capture, switch the wanted layers on, check them."""

from __future__ import annotations

from typing import Any

from specforge.errors import TargetError
from specforge.inference.layer_ids import SGLANG_EAGLE3_EXCEPTIONS, sglang_setter_ids


def refusal(runner: Any) -> str | None:
    """Why features of this server would be wrong or missing, with the flag to change; None when they would be right.

    ``runner`` is SGLang's ModelRunner. Prefix cache and chunked prefill are no reasons: chunks are joined by position, and rows that
    came from the cache are noticed in the request that misses them.
    """
    arguments = runner.server_args
    if runner.is_draft_worker or not runner.spec_algorithm.is_none():
        return ("this server decodes speculatively, so the draft's and the verify batches' states would mix with the target's. Start it "
                "without --speculative-algorithm")
    if getattr(arguments, "enable_return_aux_hidden_states", False):
        return "--enable-return-aux-hidden-states sets the captured layers too. Start the server without it; the plug-in needs no flag"
    if int(getattr(arguments, "pp_size", 1) or 1) > 1:
        return f"--pp-size {arguments.pp_size}: a pipeline stage sees its own layers only. Use --tp-size instead"
    if int(getattr(arguments, "attn_cp_size", 1) or 1) > 1:
        return f"--attn-cp-size {arguments.attn_cp_size}: context parallelism spreads a prompt's rows over ranks. Use --tp-size instead"
    if _prefill_graph(runner) != "disabled":
        return "a CUDA graph of prefill batches runs no hook. Start the server with --disable-prefill-cuda-graph (decode graphs may stay)"
    if not runner.is_generation:
        return "this server gives embeddings, not tokens. Start it without --is-embedding"
    return None


def _prefill_graph(runner: Any) -> str:
    """Backend of the prefill CUDA graph; ``disabled`` where there is none."""
    if str(getattr(runner, "device", "cpu")).split(":")[0] != "cuda":
        return "disabled"
    config = getattr(runner.server_args, "cuda_graph_config", None)
    return "disabled" if config is None else str(config.prefill.backend)


def enable_capture(model: Any, layer_ids: tuple[int, ...], num_layers: int) -> str:
    """Switch the capture of output-side ``layer_ids`` on; returns how it was done. Raises :class:`TargetError` if it cannot be done."""
    if not layer_ids:
        return "no auxiliary layers"
    known, name = _rule_class(model), type(model).__name__
    problems = []
    for family in ("eagle3", "dflash"):
        setter = getattr(model, f"set_{family}_layers_to_capture", None)
        if setter is None:
            problems.append(f"it has no set_{family}_layers_to_capture")
            continue
        try:
            given = sglang_setter_ids(layer_ids, num_layers, known, family)  # type: ignore[arg-type]
        except TargetError as error:
            problems.append(str(error))
            continue
        setter(given)
        captured = _captured_inputs(model)
        if captured is not None and captured != [i + 1 for i in layer_ids]:
            raise TargetError(f"{name}: SGLang captures before layers {captured} instead of {[i + 1 for i in layer_ids]}; its rule for "
                              "this "
                              "class is not known to this release of specforge")
        return f"set_{family}_layers_to_capture({given})" + ("" if captured is not None else ", which could not be read back")
    raise TargetError(f"target class {name} cannot give the output of layers {list(layer_ids)} in this SGLang: {'; '.join(problems)}")


def _rule_class(model: Any) -> str:
    """The class whose rule for layer ids applies: the model's own, an ancestor's, or that of the language model it wraps."""
    for part in (model, getattr(model, "language_model", None)):
        for cls in type(part).__mro__ if part is not None else ():
            if cls.__name__ in SGLANG_EAGLE3_EXCEPTIONS:
                return str(cls.__name__)
    return type(model).__name__


def _captured_inputs(model: Any) -> list[int] | None:
    """The input-side layers that the model will capture, where it keeps such a list."""
    for module in model.modules():
        layers = getattr(module, "layers_to_capture", None)
        if isinstance(layers, list | tuple | set) and layers:
            return sorted(int(i) for i in layers)
    return None
