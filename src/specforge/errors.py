"""User-facing errors: one class a kind of mistake, each with the exit code the command line returns."""

from __future__ import annotations

from collections.abc import Sequence


class SpecForgeError(Exception):
    """Base of every error that is shown to the user as one message, without a traceback.

    A message names the thing, its value, what is allowed and how to fix it.
    """

    exit_code = 1


class ConfigError(SpecForgeError):
    """One or more problems of a configuration; all of them are reported at once."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(SpecForgeError):
    """A dataset, template or tokenizer cannot be used as given."""

    exit_code = 2


class TargetError(SpecForgeError):
    """The target model's folder, head, embedding or tokenizer is missing or is not the expected one."""

    exit_code = 2


class FeatureError(SpecForgeError):
    """Features do not belong to this run (target, layers, dtype, shape) or are damaged."""

    exit_code = 2


class CheckpointError(SpecForgeError):
    """A checkpoint is incomplete, of another draft, or of an unknown format version."""

    exit_code = 2


class ExportError(SpecForgeError):
    """A draft cannot be exported in the asked format, or the exported folder failed its checks."""

    exit_code = 2


class MissingExtraError(SpecForgeError):
    """An optional package is needed and not installed; the message names the extra to install."""

    exit_code = 2

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. Install it with: pip install 'specforge[{extra}]'"
        )


class RunError(SpecForgeError):
    """A run could not go on: a process died, a disk is full, a folder is in use."""


class NumericalError(SpecForgeError):
    """Loss or gradient became NaN or infinite."""

    exit_code = 3
