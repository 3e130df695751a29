"""``regenerate``: the target answers prompts itself, so that the draft learns what it will have to predict.

One JSON row a conversation is appended as soon as it is complete; a run that was stopped goes on where it was, by row id. A row holds
``id``, the input's own keys, ``messages``, ``response_ids`` (one list of generated ids a reply, stop token included), ``finish``
("stop" or "length", of the last reply), ``target`` and ``sampling``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specforge.data.chat_template import ChatTemplate, load_tokenizer, read_template
from specforge.data.conversation import Conversation, RowProblem
from specforge.data.report import DataReport
from specforge.data.sources import read_conversations, resolve_path
from specforge.errors import ConfigError, DataError, RunError
from specforge.inference.target_engine.base import TargetEngine
from specforge.runtime.contracts import TargetIdentity

_OWN_KEYS = ("finish", "target", "sampling")


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are drawn; written into every row, and rows of other options are never mixed into one file."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass
class _Open:
    """A conversation that is being answered turn by turn."""

    row_id: str
    source: Conversation
    turns: list[list[dict[str, Any]]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    response_ids: list[list[int]] = field(default_factory=list)
    finish: str = "stop"

    @property
    def complete(self) -> bool:
        # An answer that was cut or is empty ends the conversation: serving would not go on from it either.
        stuck = bool(self.response_ids) and (self.finish == "length" or not self.messages[-1]["content"].strip())
        return stuck or len(self.response_ids) == len(self.turns)


def check_inputs(config: dict[str, Any]) -> None:
    """Raise :class:`ConfigError` with every key of this command that cannot be used, :class:`DataError` for a missing input."""
    problems = []
    if not config.get("output"):
        problems.append("output=null: regenerate needs the file to write, for example output=answers.jsonl")
    elif Path(config["output"]).expanduser().is_dir():
        problems.append(f"output={config['output']}: is a folder. Name a .jsonl file, new or one that regenerate wrote.")
    for key in ("batch_size", "max_new_tokens", "limit"):
        if config[key] is not None and config[key] < 1:
            problems.append(f"{key}={config[key]}: allowed is 1 or more.")
    if config["temperature"] < 0:
        problems.append(f"temperature={config['temperature']}: allowed is 0 (greedy) or more.")
    if not 0 < config["top_p"] <= 1:
        problems.append(f"top_p={config['top_p']}: allowed is above 0 up to 1.")
    if problems:
        raise ConfigError(problems)
    _input_path(config)


def _input_path(config: dict[str, Any]) -> Path:
    return resolve_path(config["input"] or config["data"]["train_path"], "input" if config["input"] else "data.train_path")


def run(config: dict[str, Any], run_dir: Path) -> int:
    """The command: see ``conf/regenerate.yaml`` for its keys."""
    from specforge.inference.engine_factory import build_engine, resolve_device

    folder = Path(config["target"]["resolved_path"])
    data = config["data"]
    tokenizer = load_tokenizer(folder, trust_remote_code=bool(config["target"].get("trust_remote_code")))
    engine = build_engine(config, resolve_device(config["device"]))
    try:
        with _progress() as advance:
            written = regenerate_file(
                engine,
                tokenizer,
                _input_path(config),
                Path(config["output"]).expanduser(),
                chat_template=read_template(data.get("chat_template")),
                template_arguments=data.get("template_arguments"),
                options=SamplingOptions(config["max_new_tokens"], config["temperature"], config["top_p"], config["seed"]),
                batch_size=config["batch_size"],
                limit=config["limit"],
                advance=advance,
            )
    finally:
        engine.close()
    print(f"{written} conversations written to {config['output']}")
    return 0


def regenerate_file(
    engine: TargetEngine,
    tokenizer: Any,
    input_path: Path,
    output_path: Path,
    *,
    options: SamplingOptions,
    batch_size: int,
    chat_template: str | None = None,
    template_arguments: dict[str, Any] | None = None,
    limit: int | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Answer the prompts of ``input_path`` into ``output_path``; returns how many rows this call wrote.

    Replies that the input already holds are left out and made anew. ``advance(done, total)`` is called after every batch.
    Raises :class:`DataError` when no row is usable or the output holds rows of another target or other options, and
    :class:`RunError` when the disk is full.
    """
    template = ChatTemplate(tokenizer, chat_template, template_arguments)
    report = DataReport(source=str(input_path))
    conversations = list(read_conversations(input_path, "auto", report, max_samples=limit, prompts_only=True))
    if not conversations:
        raise DataError(f"input={input_path}: no usable prompt. " + " ".join(report.lines(5)))
    for where, reason in report.skipped[:20]:
        print(f"skipped {where}: {reason}")
    stamp = {"target": _short_identity(engine.identity), "sampling": vars(options)}
    finished = _finished_ids(output_path, stamp)
    todo = [state for state in map(_start, conversations) if state.row_id not in finished]
    output_path.parent.mkdir(parents=True, exist_ok=True)
    done = len(conversations) - len(todo)
    advance(done, len(conversations))
    for window in _windows(todo, batch_size):
        _answer(engine, template, window, options)
        _append(output_path, [_row(state, stamp) for state in window])
        done += len(window)
        advance(done, len(conversations))
    return len(todo)


def _answer(engine: TargetEngine, template: ChatTemplate, window: list[_Open], options: SamplingOptions) -> None:
    while waiting := [state for state in window if not state.complete]:
        prompts = []
        for state in waiting:
            state.messages += state.turns[len(state.response_ids)]
            prompts.append(_prompt(template, state))
        answers = engine.generate(
            prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=[_seed(options.seed, state.row_id, len(state.response_ids)) for state in waiting],
            stop_token_ids=engine.stop_token_ids,
        )
        for state, answer in zip(waiting, answers, strict=True):
            stopped = bool(answer) and answer[-1] in engine.stop_token_ids
            text = template.tokenizer.decode(answer[:-1] if stopped else answer, skip_special_tokens=True)
            state.messages.append({"role": "assistant", "content": text})
            state.response_ids.append(answer)
            state.finish = "stop" if stopped else "length"


def _prompt(template: ChatTemplate, state: _Open) -> list[int]:
    try:
        return template.render_prompt(state.messages, state.source.tools)
    except RowProblem as problem:
        raise DataError(
            f"{state.source.where}: {problem}. Remove the row, or set data.chat_template to a template that takes it"
        ) from problem


def _start(conversation: Conversation) -> _Open:
    turns = conversation.prompt_turns()
    content = json.dumps([turns, conversation.tools], sort_keys=True, ensure_ascii=False)
    row_id = conversation.row_id or hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    return _Open(row_id, conversation, turns)


def _row(state: _Open, stamp: dict[str, Any]) -> dict[str, Any]:
    extra = {key: value for key, value in state.source.extra.items() if key not in _OWN_KEYS}
    row: dict[str, Any] = {"id": state.row_id, **extra, "messages": state.messages}
    if state.source.tools:
        row["tools"] = state.source.tools
    return {**row, "response_ids": state.response_ids, "finish": state.finish, **stamp}


def _finished_ids(path: Path, stamp: dict[str, Any]) -> set[str]:
    """Row ids that are already there; the unfinished line of a killed run is cut off first."""
    if not path.is_file():
        return set()
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        os.truncate(path, whole)
    ids = set()
    for number, line in enumerate(raw[:whole].splitlines(), start=1):
        try:
            row = json.loads(line)
            ids.add(row["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"output={path}, line {number} is not a row that regenerate wrote; choose another output file") from error
        for key, value in stamp.items():
            if row.get(key) != value:
                raise DataError(
                    f"output={path}, line {number} was made with {key} {row.get(key)}, this run has {value}. "
                    "Choose another output file, or use the same settings to go on with this one"
                )
    return ids


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.truncate(path, size)
        raise RunError(
            f"disk full while writing {path}; all rows before are kept. Free some space and start the same command again"
        ) from error


def _windows(states: list[_Open], batch_size: int) -> Iterator[list[_Open]]:
    for start in range(0, len(states), batch_size):
        yield states[start : start + batch_size]


def _short_identity(identity: TargetIdentity) -> dict[str, Any]:
    return {
        "name": Path(identity.path).name,
        "revision": identity.revision,
        "config": identity.config_digest[:12],
        "tokenizer": identity.tokenizer_digest[:12],
        "template": identity.template_digest[:12],
    }


def _seed(seed: int, row_id: str, turn: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{row_id}/{turn}".encode(), digest_size=7).digest(), "big")


class _progress:
    """A rich bar as a context that gives ``advance(done, total)``."""

    def __enter__(self) -> Callable[[int, int], None]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        )
        self.bar.start()
        task = self.bar.add_task("regenerate", total=None)
        return lambda done, total: self.bar.update(task, completed=done, total=total)

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()
