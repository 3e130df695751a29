"""The configured dataset: from ``conf/data/*.yaml`` to tokenized samples, or to the prompts that are still to be answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from specforge.data.chat_template import ChatTemplate, load_tokenizer, read_template, tokenizer_digest
from specforge.data.conversation import Conversation
from specforge.data.dataset import TokenizedDataset
from specforge.data.report import DataReport
from specforge.data.sources import read_conversations, resolve_path
from specforge.data.token_cache import TokenCache, cache_key, file_digest
from specforge.data.tokenization import TokenizeOptions, tokenize_conversations, tokenize_in_processes
from specforge.errors import DataError

Tell = Callable[[str], None]


def _silent(_: str) -> None:
    return None


class ChatData:
    """Training and evaluation conversations of a run.

    ``max_samples`` counts usable rows from the start of a file. With ``num_workers`` of 0 or 1 tokenizing stays in this process.
    """

    def __init__(
        self,
        *,
        train_path: str,
        eval_path: str | None,
        format: Literal["auto", "messages", "sharegpt", "prompt"],
        chat_template: str | None,
        template_arguments: dict[str, Any] | None,
        max_length: Annotated[int, Field(ge=2)],
        turns: Literal["all", "last"],
        max_samples: Annotated[int, Field(ge=1)] | None,
        eval_max_samples: Annotated[int, Field(ge=1)] | None,
        cache: bool,
        num_workers: Annotated[int, Field(ge=0)],
    ) -> None:
        self.train_path = train_path
        self.eval_path = eval_path
        self.format = format
        self.chat_template = chat_template
        self.template_arguments = template_arguments
        self.options = TokenizeOptions(max_length, turns)
        self.max_samples = max_samples
        self.eval_max_samples = eval_max_samples
        self.cache = cache
        self.num_workers = num_workers

    def check_paths(self) -> None:
        """Raise :class:`DataError` now for a file that is missing, before a model is loaded."""
        resolve_path(self.train_path, "data.train_path")
        if self.eval_path is not None:
            resolve_path(self.eval_path, "data.eval_path")
        read_template(self.chat_template)

    def template(self, tokenizer_folder: Path, *, trust_remote_code: bool = False) -> ChatTemplate:
        """The target's tokenizer with the template in use; what `regenerate` and `evaluate` render prompts with."""
        tokenizer = load_tokenizer(Path(tokenizer_folder), trust_remote_code=trust_remote_code)
        return ChatTemplate(tokenizer, read_template(self.chat_template), self.template_arguments)

    def load_train(
        self, tokenizer_folder: Path, cache_dir: Path, tell: Tell = _silent, *, trust_remote_code: bool = False
    ) -> TokenizedDataset:
        """Tokenized training samples, from the cache when nothing changed. ``tell`` gets the lines of the report.

        Raises :class:`DataError` when the file is missing or gives no supervised token, :class:`TargetError` without a tokenizer.
        """
        file = resolve_path(self.train_path, "data.train_path")
        template = self.template(tokenizer_folder, trust_remote_code=trust_remote_code)
        return self._load(file, "data.train_path", self.max_samples, template, cache_dir, tell)

    def load_eval(
        self, tokenizer_folder: Path, cache_dir: Path, tell: Tell = _silent, *, trust_remote_code: bool = False
    ) -> TokenizedDataset | None:
        """As :meth:`load_train` for the held-out file; None when ``eval_path`` is null."""
        if self.eval_path is None:
            return None
        file = resolve_path(self.eval_path, "data.eval_path")
        template = self.template(tokenizer_folder, trust_remote_code=trust_remote_code)
        return self._load(file, "data.eval_path", self.eval_max_samples, template, cache_dir, tell)

    def load_prompts(self, path: str | None = None, tell: Tell = _silent) -> list[Conversation]:
        """Rows whose user turns are to be answered (``Conversation.prompt_turns``), from ``path`` or the training file.

        Rows may already hold answers: they are left out. Raises :class:`DataError` when no row is usable.
        """
        file = resolve_path(path or self.train_path, "data.train_path")
        report = DataReport(source=file.name)
        rows = list(read_conversations(file, self.format, report, max_samples=self.max_samples, prompts_only=True))
        report.samples = len(rows)
        for line in report.lines() if report.skipped else []:
            tell(line)
        if not rows:
            raise DataError(f"data.train_path={file}: none of its {report.rows} rows is a usable prompt. {_first_reason(report)}")
        return rows

    def _load(self, file: Path, key: str, max_samples: int | None, template: ChatTemplate, cache_dir: Path, tell: Tell) -> TokenizedDataset:
        cache = TokenCache(cache_dir, tell)
        cache_name = self._cache_key(file, template, max_samples) if self.cache else ""
        dataset = cache.load(cache_name) if self.cache else None
        if dataset is None:
            dataset = self._tokenize(file, key, template, max_samples)
            if self.cache:
                dataset = cache.store(cache_name, dataset)
        for line in dataset.report.lines():
            tell(line)
        return dataset

    def _cache_key(self, file: Path, template: ChatTemplate, max_samples: int | None) -> str:
        return cache_key(
            {
                "file": file_digest(file),
                "name": file.name,  # the report names it
                "tokenizer": tokenizer_digest(template.tokenizer),
                "template": template.digest,
                "format": self.format,
                "max_samples": max_samples,
                "max_length": self.options.max_length,
                "turns": self.options.turns,
            }
        )

    def _tokenize(self, file: Path, key: str, template: ChatTemplate, max_samples: int | None) -> TokenizedDataset:
        report = DataReport(source=file.name)
        rows = read_conversations(file, self.format, report, max_samples=max_samples)
        if self.num_workers > 1:
            samples = tokenize_in_processes(template, rows, self.options, report, self.num_workers)
        else:
            samples = tokenize_conversations(template, rows, self.options, report)
        dataset = TokenizedDataset.build(samples, report)
        if report.supervised_tokens == 0:
            raise DataError(
                f"{key}={file}: {report.rows} rows gave no supervised token (skipped: {len(report.skipped)}, "
                f"nothing left within data.max_length={self.options.max_length}: {report.unsupervised}). {_first_reason(report)}"
            )
        return dataset


def _first_reason(report: DataReport) -> str:
    if report.rows == 0:
        return "The file is empty."
    return f"First problem: {report.skipped[0][0]}: {report.skipped[0][1]}." if report.skipped else "Raise data.max_length."
