"""What the documentation shows is true: commands compose, keys and files exist, links lead somewhere, shown code is the tested code."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from specforge import cli
from specforge.config import freeze, schema
from specforge.config.check import find_problems
from specforge.config.compose import Composed, compose, compose_overrides, flatten
from specforge.config.from_run import compose_from_run, config_dirs, run_argument, split_flags
from specforge.config.help import group_options
from specforge.config.locate import config_dir
from specforge.config.points import expand

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "specforge"
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.is_file()]
MORE_PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "outputs/README.md", "launchers/README.md")]

NEEDS_RUN = "needs a run folder"
REFUSED = "refused"
NUM_COMMANDS = 60  # commands on the pages of docs/ when this test was written; a page that loses its commands shows here
# Shown as mistakes.
WRONG_ON_PURPOSE = {"optimizer.lrr"}

_FENCE = re.compile(r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_KEY = re.compile(rf"((?:{'|'.join(schema.GROUPS)})\.[a-z_][\w.]*)(?:=|$)")
_ENDS = ("|", "&&", ";", ">", ">>", "2>")


@dataclass(frozen=True)
class Block:
    """A fenced block with the comment right above it."""

    page: Path
    language: str
    mark: str
    text: str


@dataclass(frozen=True)
class Command:
    """One ``specforge`` command line without its first word."""

    page: str
    words: tuple[str, ...]
    mark: str
    answer: str  # what a console block shows below it

    @property
    def shown(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    return [Block(page, m["language"], m["mark"] or "", m["text"]) for m in _FENCE.finditer(page.read_text(encoding="utf-8"))]


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[Command]:
    for block in blocks(page):
        if block.language not in ("bash", "console", "sh"):
            continue
        text = block.text.replace("\\\n", " ")
        # In a console block a prompt begins each command, and the other lines are answers.
        entries = re.split(r"(?m)^\$ ", text)[1:] if block.language == "console" else text.splitlines()
        for entry in entries:
            line, _, answer = entry.partition("\n")
            words = shlex.split(line, comments=True)
            words = words[: next((i for i, word in enumerate(words) if word in _ENDS), len(words))]
            if words[:1] == ["specforge"]:
                yield Command(name_of(page), tuple(words[1:]), block.mark, answer)
            elif words[1:3] == ["-m", "specforge"]:
                yield Command(name_of(page), tuple(words[3:]), block.mark, answer)


ALL = list(dict.fromkeys(command for page in PAGES for command in commands(page)))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a reader types: the example plug-ins, the files that pages say to write, and a run."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "tests" / "plugins", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for page in PAGES:
        for block in blocks(page):
            if (path := file_of(block)) and not (ROOT / path).exists():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(block.text)
    composed = compose_overrides("train", ["device=cpu"])
    (folder / "run").mkdir()
    freeze.freeze(folder / "run", {**composed.config, "name": "run"}, command="train", choices=composed.choices, overrides=[])
    return folder


@pytest.fixture
def at_workplace(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "path", [*sys.path, str(workplace)])
    return workplace


def file_of(block: Block) -> str | None:
    return block.mark.removeprefix("file: ") if block.mark.startswith("file: ") else None


@pytest.mark.parametrize("command", [c for c in ALL if c.mark not in (NEEDS_RUN, REFUSED)], ids=lambda c: c.shown)
def test_command_composes_and_checks(command: Command, at_workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word, rest = cli.split_command(command.words)
    if word == "bench":  # it needs a live server: its arguments must parse
        from specforge.commands import bench

        bench._parser().parse_args(rest)
    elif word == "doctor":
        assert set(rest) <= {"--json"}
    elif word in ("diff", "status") or any(flag in rest for flag in ("--cfg", "--info", "--help")):
        assert cli.main(command.words) in ((0, 1) if word == "diff" else (0,))
        assert capsys.readouterr().out.strip()
    else:
        for composed in points(cli.HYDRA_COMMANDS[word], rest):
            assert find_problems(composed.config) == []


@pytest.mark.parametrize("command", [c for c in ALL if c.mark == NEEDS_RUN], ids=lambda c: c.shown)
def test_command_on_a_run_composes_and_checks(command: Command, at_workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert any("outputs/" in word for word in command.words), "only commands on a run belong below the comment"
    words = [re.sub(r"outputs/[\w-]+/[\w-]+", str(at_workplace / "run"), word) for word in command.words]
    word, rest = cli.split_command(words)
    if word in ("diff", "report", "status", "stop"):
        assert cli.main(words) in (0, 1)
        shown = capsys.readouterr()
        assert (shown.err if word == "stop" else shown.out).strip()
        return
    run = run_argument(rest)
    assert run is not None
    composed = compose_from_run(cli.HYDRA_COMMANDS[word], rest, run)
    assert find_problems(composed.config) == []


@pytest.mark.parametrize("command", [c for c in ALL if c.mark == REFUSED], ids=lambda c: c.shown)
def test_a_mistake_is_answered_as_shown(command: Command, at_workplace: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    line = [sys.executable, "-m", "specforge", *command.words]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (2, command.answer)


def points(command: str, arguments: Sequence[str]) -> Iterator[Composed]:
    """What a line composes to: one configuration, or with -m one a point."""
    flags, overrides = split_flags([a for a in arguments if a != "-m"])
    for line in expand(overrides, config_dirs(flags)) if "-m" in arguments else [overrides]:
        composed = compose(command, [*flags, *line])
        assert composed is not None
        yield composed


def test_enough_commands_are_shown_and_every_command_word_is_among_them() -> None:
    shown = [c for c in ALL if c.page.startswith("docs/")]
    assert len(shown) >= NUM_COMMANDS, f"the pages of docs/ show {len(shown)} commands"
    assert sum(c.mark == NEEDS_RUN for c in shown) >= 10 and any(c.mark == REFUSED for c in shown)
    assert {cli.split_command(c.words)[0] for c in ALL} == set(cli.COMMANDS)


def rows(page: Path, heading: str) -> dict[str, list[str]]:
    """Name in the first cell -> the other cells, of the table below a heading of ``page``."""
    section = page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")]
    return {_INLINE.findall(cells[0])[0]: cells[1:] for cells in table}


def test_the_table_of_groups_names_every_option() -> None:
    table = rows(ROOT / "docs" / "configuration.md", "Groups")
    options = group_options()
    for group in schema.GROUPS:
        assert set(_INLINE.findall(table[group][0])) == set(options[group]), f"docs: options of {group}"
    assert set(table) >= set(options), "docs: a group is not in the table"


def test_the_table_of_commands_names_every_command_and_its_own_keys() -> None:
    table = rows(ROOT / "docs" / "configuration.md", "The command line")
    assert {name.split()[0] for name in table} == set(cli.COMMANDS)
    for word, command in cli.HYDRA_COMMANDS.items():
        own = set(schema.SCHEMAS[command].__dataclass_fields__) - set(schema.Root.__dataclass_fields__)
        named = set(_INLINE.findall(table[word][-1]))
        assert word == "plan" or named == own, f"docs: keys of {word}"


def test_shown_files_are_the_tested_files() -> None:
    shown = [(path, block) for page in PAGES for block in blocks(page) if (path := file_of(block)) and (ROOT / path).exists()]
    for path, block in shown:
        assert block.text == (ROOT / path).read_text(encoding="utf-8"), f"{block.page.name} shows another {path}"
    assert {path for path, _ in shown} == {name_of(p) for p in plugin_files()}


def plugin_files() -> list[Path]:
    return [p for p in sorted((ROOT / "tests" / "plugins").rglob("*")) if p.suffix in (".py", ".yaml")]


@functools.cache
def known_keys() -> frozenset[str]:
    """Every ``group.key`` of every option, those of the example plug-ins included; read from the files, which is quick."""
    keys: set[str] = set()
    for conf in (config_dir(), ROOT / "tests" / "plugins" / "conf"):
        for group in schema.GROUPS:
            for option in (conf / group).glob("*.yaml"):
                node = {key: value for key, value in yaml.safe_load(option.read_text()).items() if key != "defaults"}
                keys |= {f"{group}.{key}" for key in [*node, *flatten(node)]}
    return frozenset(keys)


@pytest.mark.parametrize("page", [*PAGES, *MORE_PAGES], ids=name_of)
def test_keys_files_and_links_exist(page: Path) -> None:
    text = prose(page)
    for span in _INLINE.findall(text):
        for word in span.split():
            key = _KEY.match(word)
            if key and Path(word).suffix not in (".py", ".yaml"):
                assert key[1] in known_keys() | WRONG_ON_PURPOSE, f"{key[1]} is no key of any option"
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+\.(py|yaml|md|sh)", span) and not span.startswith("my_conf/"):
            assert any((base / span).exists() for base in (ROOT, PACKAGE, PACKAGE.parent, ROOT / "tests" / "plugins")), f"no file {span}"
    for target, anchor in re.findall(r"\]\(((?!https?:)[^)#\s]*)(#[^)\s]*)?\)", text):
        place = (page.parent / target).resolve() if target else page
        assert place.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor[1:] in {slug(h) for h in re.findall(r"(?m)^#+ (.+)$", prose(place))}, f"{target} has no heading {anchor}"


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md" and f"({p.name})" not in index] == []
