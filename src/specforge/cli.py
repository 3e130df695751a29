"""The command line: the command word, then Hydra overrides or plain arguments; every error becomes one message and an exit code.

    specforge [COMMAND] [group=option ...] [key=value ...] [-m] [flags]

Exit codes: 0 success, 1 failure, 2 bad input, 3 numerical, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence

from specforge.errors import ConfigError, SpecForgeError

# Command word -> its primary config in conf/ (and its module in specforge.commands). `plan` is a dry run of train.
HYDRA_COMMANDS: dict[str, str] = {
    "train": "train",
    "prepare": "prepare",
    "show-sample": "show_sample",
    "regenerate": "regenerate",
    "capture": "capture",
    "evaluate": "evaluate",
    "export": "export",
    "plan": "train",
}
PLAIN_COMMANDS = ("bench", "diff", "doctor", "report", "status", "stop")
COMMANDS = (*HYDRA_COMMANDS, *PLAIN_COMMANDS)
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNUSABLE_PATH = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
_MULTIRUN = ("-m", "--multirun")
_PRINTING = ("--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help")
_COMPLETION = ("-sc", "--shell-completion", "--shell_completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code and raises nothing that a user caused."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # A plug-in in the current folder is found by the console script too, as `python -m` finds it; last, so that it hides nothing.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    return guarded(lambda: _dispatch(arguments))


def guarded(action: Callable[[], int]) -> int:
    """Run ``action`` and turn every expected error into a message on stderr and its exit code."""
    try:
        return action()
    except SpecForgeError as error:
        _complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nspecforge: interrupted before a run folder was made; nothing was written, nothing is lost.", file=sys.stderr)
        return 130
    except SystemExit as leave:  # argparse and Hydra's --help
        return leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 2
    except BrokenPipeError:  # `specforge --cfg job | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in _DISK_FULL:
            print(f"specforge: disk full ({error.filename or error}). Free some space; finished files are kept.", file=sys.stderr)
        elif error.errno in _UNUSABLE_PATH and error.filename:
            print(f"specforge: {error.filename}: {os.strerror(error.errno)}. Give a path that can be used.", file=sys.stderr)
        else:
            raise
        return 1


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        from specforge import __version__

        print(f"specforge {__version__}")
        return 0
    if any(a in _COMPLETION for a in arguments):
        return _complete(arguments)
    word, rest = split_command(arguments)
    if word in PLAIN_COMMANDS:
        return _plain(word, rest)
    multirun = any(a in _MULTIRUN for a in rest)
    rest = [a for a in rest if a not in _MULTIRUN]
    command = HYDRA_COMMANDS[word]
    if multirun and word != "plan":
        from specforge.launch.sweep import sweep

        return sweep(command, rest)
    if any(a in ("--help", "-h") for a in rest) and not any(a.startswith("hydra.searchpath") for a in rest):
        from specforge.config.from_run import config_dirs
        from specforge.config.help import help_text

        print(help_text(config_dirs(rest)))
        return 0
    if any(a in _PRINTING for a in rest) and not any(a.startswith("run=") for a in rest):
        # Only Hydra is needed to print; the checks, and with them torch, stay unimported.
        from specforge.config.compose import compose

        compose(command, rest)
        return 0
    return _run(word, command, rest, multirun)


def _run(word: str, command: str, rest: list[str], multirun: bool) -> int:
    if multirun:
        raise ConfigError("-m: plan looks at one point; run specforge plan once for each.")
    from specforge.launch.frontend import execute, make_ready

    ready = make_ready(command, rest, prepare=word != "plan")
    if ready is None:
        return 0
    if word == "plan":
        from specforge.commands.plan import show

        return show(ready)
    return execute(ready)


def split_command(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The command word (``train`` if the line starts with an override or a flag) and the rest.

    Raises:
        ConfigError: the line starts with a word that is no command.
    """
    first = arguments[0] if arguments else ""
    if first in COMMANDS:
        return first, list(arguments[1:])
    if first.replace("_", "-") in COMMANDS:
        return first.replace("_", "-"), list(arguments[1:])
    if not first or first[0] in "-+~" or "=" in first:
        _no_later_word(arguments)
        return "train", list(arguments)
    from specforge.config.compose import did_you_mean

    hint = did_you_mean(first, COMMANDS)
    raise ConfigError(f"{first}: no such command.{hint} Commands: {', '.join(COMMANDS)}. specforge --help says more.")


def _no_later_word(arguments: Sequence[str]) -> None:
    if not any(a in COMMANDS for a in arguments):
        return
    from specforge.config.from_run import split_flags

    for word in split_flags(arguments)[1]:
        if word in COMMANDS:
            raise ConfigError(f"{word}: the command comes first: specforge {word} {' '.join(a for a in arguments if a != word)}")


def _plain(word: str, rest: Sequence[str]) -> int:
    import importlib

    return importlib.import_module(f"specforge.commands.{word}").main(rest)


def _complete(arguments: list[str]) -> int:
    """Shell completion: Hydra's, with the command word taken out of the line that is being completed."""
    from specforge.config.compose import compose

    word = next((a for a in arguments if a in COMMANDS), None)
    rest = [a for a in arguments if a != word]
    line = os.environ.get("COMP_LINE")
    if line is None or not any(a.startswith("query=") for a in rest):
        compose("train", rest)
        return 0
    program, _, typed = line.lstrip().partition(" ")
    typed = typed.lstrip()
    first, blank, tail = typed.partition(" ")
    command = "train"
    if blank and first in PLAIN_COMMANDS:
        return 0  # the shell then completes file names
    if blank and first in HYDRA_COMMANDS:
        command, typed = HYDRA_COMMANDS[first], tail
    elif not blank:
        print(" ".join(c for c in COMMANDS if c.startswith(first)))
    os.environ["COMP_LINE"] = f"{program} {typed}"
    compose(command, rest)
    return 0


def _complain(error: SpecForgeError) -> None:
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    if len(problems) == 1:
        print(f"specforge: {problems[0]}", file=sys.stderr)
        return
    print(f"specforge: {len(problems)} problems:", file=sys.stderr)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)
