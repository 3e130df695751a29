"""ChatData end to end: cache, digests, refusals, several processes."""

from __future__ import annotations

import inspect
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from specforge.data.chat_data import ChatData
from specforge.data.dataset import TokenizedDataset
from specforge.data.report import DataReport
from specforge.errors import DataError, TargetError

ROWS = [
    {"messages": [{"role": "user", "content": f"What is {word}?"}, {"role": "assistant", "content": f"{word} is a number."}]}
    for word in ["one", "two", "three", "four", "five", "six", "seven", "eight"]
]


def chat_data(path, **changes) -> ChatData:
    values = {
        "train_path": str(path),
        "eval_path": None,
        "format": "auto",
        "chat_template": None,
        "template_arguments": None,
        "max_length": 64,
        "turns": "all",
        "max_samples": None,
        "eval_max_samples": None,
        "cache": True,
        "num_workers": 0,
    }
    return ChatData(**{**values, **changes})


def same(a: TokenizedDataset, b: TokenizedDataset) -> bool:
    return a.digest == b.digest and all(np.array_equal(a.arrays[n], b.arrays[n]) for n in TokenizedDataset.ARRAYS)


@pytest.fixture
def path(write_jsonl) -> Path:
    return write_jsonl([*ROWS, "{bad"])


def cached(cache_dir: Path) -> list[Path]:
    return sorted((cache_dir / "tokenized").iterdir())


def test_dataset_items_and_ids(path, tokenizer_folder, tmp_path):
    data = chat_data(path).load_train(tokenizer_folder, tmp_path / "c")
    assert len(data) == 8
    task = data[2]
    assert task.sample_id == data.sample_id(2) and data.index_of(task.sample_id) == 2
    assert len(task.input_ids) == len(task.loss_mask) == data.num_tokens(2) == data.lengths[2]
    assert sum(task.loss_mask) == data.num_supervised(2)
    assert all(type(i) is int for i in (*task.input_ids, *task.loss_mask))
    ((start, end),) = data.reply_spans(2)
    assert end == len(task.input_ids) and task.loss_mask == (0,) * start + (1,) * (end - start)
    assert data.supervised_ids().tolist() == [i for k in range(8) for i, m in zip(data[k].input_ids, data[k].loss_mask, strict=True) if m]
    assert len({data.sample_id(i) for i in range(8)}) == 8
    assert [data.sample(i).line for i in range(8)] == list(range(1, 9))
    with pytest.raises(IndexError):
        data[8]


def test_ids_depend_on_content_alone(write_jsonl, tokenizer_folder, tmp_path):
    first = chat_data(write_jsonl(ROWS, "a.jsonl")).load_train(tokenizer_folder, tmp_path / "c")
    second = chat_data(write_jsonl(ROWS[::-1], "b.jsonl")).load_train(tokenizer_folder, tmp_path / "c")
    assert [first.sample_id(i) for i in range(8)] == [second.sample_id(i) for i in range(8)][::-1]
    twice = chat_data(write_jsonl([ROWS[0]] * 3, "d.jsonl")).load_train(tokenizer_folder, tmp_path / "c")
    name = first.sample_id(0)
    assert [twice.sample_id(i) for i in range(3)] == [name, f"{name}-1", f"{name}-2"] and twice.report.duplicates == 2


def test_second_load_comes_from_the_cache_memory_mapped_with_the_same_report(path, tokenizer_folder, tmp_path, monkeypatch):
    said: list[str] = []
    first = chat_data(path).load_train(tokenizer_folder, tmp_path / "c", said.append)
    monkeypatch.setattr("specforge.data.chat_data.tokenize_conversations", lambda *_: pytest.fail("tokenized again"))
    again: list[str] = []
    second = chat_data(path).load_train(tokenizer_folder, tmp_path / "c", again.append)
    assert same(first, second) and said == again and any("chats.jsonl:9: not JSON" in line for line in said)
    assert isinstance(second.arrays["tokens"], np.memmap)
    assert len(cached(tmp_path / "c")) == 1


@pytest.mark.parametrize(
    "change", [{"max_length": 40}, {"turns": "last"}, {"max_samples": 3}, {"format": "messages"}, {"template_arguments": {"a": 1}}], ids=str
)
def test_anything_that_matters_makes_another_entry(path, tokenizer_folder, tmp_path, change):
    chat_data(path).load_train(tokenizer_folder, tmp_path / "c")
    chat_data(path, **change).load_train(tokenizer_folder, tmp_path / "c")
    assert len(cached(tmp_path / "c")) == 2


def test_changed_file_template_or_tokenizer_makes_another_entry(path, tokenizer_folder, tmp_path, new_tokenizer, templates):
    chat_data(path).load_train(tokenizer_folder, tmp_path / "c")
    path.write_text(path.read_text().replace("number", "digit"))
    chat_data(path).load_train(tokenizer_folder, tmp_path / "c")
    other = templates["CHATML"].replace("'\n'", "'\n\n'")
    chat_data(path, chat_template=other).load_train(tokenizer_folder, tmp_path / "c")
    chat_data(path).load_train(new_tokenizer(tmp_path / "t", templates["CHATML"], trim_offsets=True), tmp_path / "c")
    assert len(cached(tmp_path / "c")) == 4


@pytest.mark.parametrize("damage", ["tokens.npy", "mask.npy", "meta.json", "offsets.npy", "missing", "swap"])
def test_damaged_cache_is_made_again_with_a_note(path, tokenizer_folder, tmp_path, damage):
    first = chat_data(path).load_train(tokenizer_folder, tmp_path / "c")
    (folder,) = cached(tmp_path / "c")
    expected = [a.copy() for a in first.arrays.values()]
    if damage == "missing":
        (folder / "tokens.npy").unlink()
    elif damage == "swap":  # a flipped bit inside, with the right size
        raw = bytearray((folder / "tokens.npy").read_bytes())
        raw[-3] ^= 1
        (folder / "tokens.npy").unlink()
        (folder / "tokens.npy").write_bytes(raw)
    else:
        raw = (folder / damage).read_bytes()
        (folder / damage).unlink()
        (folder / damage).write_bytes(raw[: len(raw) // 2])
    said: list[str] = []
    second = chat_data(path).load_train(tokenizer_folder, tmp_path / "c", said.append)
    assert any("is damaged" in line for line in said)
    assert all(np.array_equal(a, b) for a, b in zip(expected, second.arrays.values(), strict=True))
    assert cached(tmp_path / "c") == [folder]


def _load(path, folder, cache_dir, barrier, results):
    barrier.wait()
    results.put(chat_data(path).load_train(folder, cache_dir).digest)


def test_two_processes_at_once(path, tokenizer_folder, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_load, args=(path, tokenizer_folder, tmp_path / "c", barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    digests = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(digests) == 1 and len(cached(tmp_path / "c")) == 1


def test_cache_off_writes_nothing(path, tokenizer_folder, tmp_path):
    chat_data(path, cache=False).load_train(tokenizer_folder, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_worker_processes_give_the_same(write_jsonl, tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("specforge.data.tokenization._CHUNK", 3)
    wide = {"messages": [{"role": "user", "content": "hi " * 80}, {"role": "assistant", "content": "x"}]}
    path = write_jsonl([*ROWS, "{bad", wide])
    one = chat_data(path, cache=False).load_train(tokenizer_folder, tmp_path)
    two = chat_data(path, cache=False, num_workers=2).load_train(tokenizer_folder, tmp_path)
    assert same(one, two) and one.report == two.report and one.report.unsupervised == 1


def test_no_supervised_token_is_refused(write_jsonl, tokenizer_folder, tmp_path):
    with pytest.raises(DataError, match="gave no supervised token.*First problem: chats.jsonl:1: not JSON"):
        chat_data(write_jsonl(["{bad", "[]"])).load_train(tokenizer_folder, tmp_path)
    with pytest.raises(DataError, match="data.max_length=4: 8.*Raise data.max_length"):
        chat_data(write_jsonl(ROWS), max_length=4).load_train(tokenizer_folder, tmp_path)
    with pytest.raises(DataError, match="The file is empty"):
        chat_data(write_jsonl([])).load_train(tokenizer_folder, tmp_path)
    assert not (tmp_path / "tokenized").exists()


def test_missing_files_are_named(tokenizer_folder, tmp_path, path):
    with pytest.raises(DataError, match="data.train_path="):
        chat_data(tmp_path / "nothing.jsonl").load_train(tokenizer_folder, tmp_path)
    with pytest.raises(DataError, match="data.eval_path="):
        chat_data(path, eval_path=str(tmp_path / "nothing.jsonl")).check_paths()
    with pytest.raises(DataError, match="data.chat_template=.*cannot be read"):
        chat_data(path, chat_template=str(tmp_path / "no.jinja")).load_train(tokenizer_folder, tmp_path)


def test_folder_without_tokenizer_and_tokenizer_without_template(path, tmp_path, new_tokenizer):
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match="has no tokenizer.*Copy the tokenizer files"):
        chat_data(path).load_train(tmp_path / "empty", tmp_path)
    bare = new_tokenizer(tmp_path / "bare", None)
    with pytest.raises(DataError, match="has no chat template. Set data.chat_template"):
        chat_data(path).load_train(bare, tmp_path)
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}")
    assert len(chat_data(path, chat_template=str(tmp_path / "own.jinja")).load_train(bare, tmp_path)) == 8
    with pytest.raises(DataError, match="data.chat_template: not valid Jinja, line 1"):
        chat_data(path, chat_template="{% for %}").load_train(bare, tmp_path)
    (tmp_path / "empty" / "tokenizer.json").write_text("{}")
    with pytest.raises(TargetError, match="cannot be loaded"):
        chat_data(path).load_train(tmp_path / "empty", tmp_path)


def test_eval_set_and_prompts(write_jsonl, tokenizer_folder, tmp_path):
    prompts = write_jsonl([{"id": "a", "family": "f", "messages": ROWS[0]["messages"][:1]}, "{bad"], "prompts.jsonl")
    data = chat_data(write_jsonl(ROWS, "t.jsonl"), eval_path=str(write_jsonl(ROWS[:2], "e.jsonl")), eval_max_samples=1)
    held = data.load_eval(tokenizer_folder, tmp_path)
    assert held is not None and len(held) == 1
    assert chat_data(prompts).load_eval(tokenizer_folder, tmp_path) is None
    said: list[str] = []
    (row,) = chat_data(prompts).load_prompts(tell=said.append)
    assert (row.row_id, row.extra, [len(t) for t in row.prompt_turns()]) == ("a", {"family": "f"}, [1])
    assert any("prompts.jsonl:2: not JSON" in line for line in said)
    with pytest.raises(DataError, match="none of its 1 rows is a usable prompt"):
        chat_data(write_jsonl(["{bad"])).load_prompts()


def test_bundled_yaml_files_name_exactly_the_constructor_arguments():
    import yaml

    conf = Path(__file__).parents[2] / "conf" / "data"
    files = sorted(conf.glob("*.yaml"))
    assert [f.name for f in files] == ["demo.yaml", "jsonl.yaml"]
    names = set(inspect.signature(ChatData).parameters)
    for file in files:
        node = yaml.safe_load(file.read_text())
        assert node.pop("_target_") == "specforge.data.chat_data.ChatData"
        assert set(node) == names


def test_report_round_trip():
    report = DataReport(source="x", rows=3, truncated=1)
    report.skip("x:1", "bad")
    assert DataReport.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["skipped"] == [["x:1", "bad"]]
