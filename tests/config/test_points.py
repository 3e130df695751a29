"""The points of a sweep: Hydra's grammar, what cannot be enumerated, and what Hydra makes of a line before any point exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from specforge.config import multirun
from specforge.config.multirun import propose, read_multirun
from specforge.config.points import expand, parse_grid, searchpath
from specforge.errors import ConfigError, MissingExtraError


def options_folder(folder: Path, *names: str) -> Path:
    (folder / "experiment").mkdir(parents=True)
    for name in names:
        (folder / "experiment" / f"{name}.yaml").write_text("# @package _global_\nseed: 1\n")
    return folder


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("seed=3,1", ["seed=3", "seed=1"]),
        ("seed=range(1,5)", ["seed=1", "seed=2", "seed=3", "seed=4"]),
        ("seed=range(5,1,-2)", ["seed=5", "seed=3"]),
        ("optimizer.lr=choice(1e-4,3e-4)", ["optimizer.lr=0.0001", "optimizer.lr=0.0003"]),
        ("strategy=glob(eagle*)", ["strategy=eagle3", "strategy=eagle3_1"]),
        ("strategy=glob([eagle*],exclude=*_1)", ["strategy=eagle3"]),
        ("name='a,b'", ["name='a,b'"]),
        ("strategy.aux_hidden_state_layer_ids=[1,2],[2,3]", [f"strategy.aux_hidden_state_layer_ids=[{i},{i + 1}]" for i in (1, 2)]),
        ("seed=1,1,2", ["seed=1", "seed=2"]),
    ],
)  # fmt: skip
def test_one_key(word: str, values: list[str]) -> None:
    assert [point[0] for point in expand([word])] == values


def test_a_grid_knows_what_is_swept_and_what_is_fixed() -> None:
    grid = parse_grid(["seed=1,2", "optimizer.lr=1e-4", "strategy=glob(eagle*)", "~draft.num_layers"])
    assert (grid.swept, grid.fixed, len(grid)) == (["seed", "strategy"], ["optimizer.lr=1e-4", "~draft.num_layers"], 4)
    assert grid.points()[1] == ["seed=1", "optimizer.lr=1e-4", "strategy=eagle3_1", "~draft.num_layers"], "the last key goes fastest"


def test_the_last_of_a_key_that_is_given_twice_holds() -> None:
    assert expand(["seed=1,2", "optimizer.lr=1e-4", "seed=7"]) == [["optimizer.lr=1e-4", "seed=7"]]
    assert parse_grid(["seed=7", "seed=1,2"]).swept == ["seed"]


def test_globs_look_into_folders_of_the_user_and_of_the_searchpath(tmp_path: Path) -> None:
    one, two = options_folder(tmp_path / "one", "mine_b", "mine_a", "other"), options_folder(tmp_path / "two", "mine_c")
    named = searchpath([f"hydra.searchpath=[file://{two}]", "seed=1"])
    assert named == [f"file://{two}"]
    found = [point[0] for point in expand(["experiment=glob(mine*)"], [str(one), *named])]
    assert found == ["experiment=mine_a", "experiment=mine_b", "experiment=mine_c"]


def test_everything_that_cannot_be_enumerated_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        expand(["optimizer.lr=interval(0,1)", "strategy=glob(zz*)", "seed=1,2", "seed2=[1"])
    interval, glob, syntax = refused.value.problems
    assert "hydra/sweeper=optuna" in interval and "range(start,stop,step)" in interval
    assert "matches nothing" in glob and "eagle3" in glob
    assert "not a valid override" in syntax


@pytest.mark.parametrize("words", [["seed=range(0,1e12)"], ["seed=range(0,1000)", "num_threads=range(1,1000)"]])
def test_absurdly_many_points_are_refused_without_being_made(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="more than 10000 points"):
        parse_grid(words)


# -- the line as Hydra sees it ----------------------------------------------------------------------------------------------------


def test_a_plain_line_has_the_basic_sweeper_and_no_searched_key() -> None:
    read = read_multirun("train", ["seed=1,2", "strategy=eagle3,eagle3_1", "optimizer.lr=5e-4"])
    assert (read.sweeper, read.searched, read.batch) == ("basic", [], None)
    assert read.overrides == ["seed=1,2", "strategy=eagle3,eagle3_1", "optimizer.lr=5e-4"]
    assert read.config["optimizer"]["lr"] == 5e-4 and read.choices["launcher"] == "local"


def test_parameters_of_the_basic_sweeper_come_from_an_experiment_and_before_the_line(tmp_path: Path) -> None:
    folder = options_folder(tmp_path / "mine", "grid")
    text = "hydra:\n  sweeper:\n    max_batch_size: 2\n    params:\n      optimizer.lr: 1e-3,2e-3\n      seed: range(0,3)\n"
    (folder / "experiment" / "grid.yaml").write_text("# @package _global_\n" + text)
    read = read_multirun("train", ["--config-dir", str(folder), "experiment=grid", "seed=5"])
    assert (read.sweeper, read.batch) == ("basic", 2)
    both = [["optimizer.lr=0.001", "experiment=grid", "seed=5"], ["optimizer.lr=0.002", "experiment=grid", "seed=5"]]
    assert expand(read.overrides, [str(folder)]) == both


def test_a_key_that_does_not_exist_is_left_for_the_check_of_the_points() -> None:
    read = read_multirun("train", ["optimzer.lr=1", "seed=1,2", "hydra.verbose=true"])
    assert (read.sweeper, read.overrides, read.config) == ("basic", ["optimzer.lr=1", "seed=1,2"], {})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["hydra/sweeper=basicc"], "Did you mean 'hydra/sweeper=basic'"),
        (["hydra.sweeper.max_batch=2"], "Did you mean 'hydra.sweeper.max_batch_size'"),
        (["hydra/launcher=joblib"], "launcher=local or launcher=slurm"),
        (["+hydra.sweeper.params.seed='1,2'"], "hydra.sweeper.params: can be given in a YAML file only"),
        (["hydra.sweeper.params={seed: '1,2'}"], "hydra.sweeper.params: can be given in a YAML file only"),
    ],
)
def test_mistakes_in_words_for_hydra(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_multirun("train", [*words, "seed=1,2"])
    assert says in str(refused.value) and len(refused.value.problems) == 1


def test_a_sweeper_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.errors import MissingConfigException

    def missing(*_: object) -> None:
        raise MissingConfigException("In 'train': Could not find 'hydra/sweeper/optuna'", "hydra/sweeper/optuna")

    monkeypatch.setattr(multirun, "_hydra_multirun", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'specforge\[optuna\]'"):
        read_multirun("train", ["hydra/sweeper=optuna", "seed=1,2"])


# -- a sampler --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def optuna() -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="hydra-optuna-sweeper is not installed (extra: optuna)")


@pytest.fixture
def asked(tmp_path: Path) -> list[list[list[str]]]:
    return []


def test_optuna_proposes_sees_the_values_and_maximises(optuna: None, asked: list[list[list[str]]], tmp_path: Path) -> None:
    words = ["hydra/sweeper=optuna", "optimizer.lr=interval(0.1,0.9)", "trainer.epochs=1,2", "seed=5", "hydra.sweeper.n_trials=7",
             "hydra.sweeper.n_jobs=3", "hydra.sweeper.sampler.seed=1"]  # fmt: skip
    read = read_multirun("train", words)
    assert (read.sweeper, read.searched) == ("optuna", ["optimizer.lr", "trainer.epochs"])

    def launch(lines: list[list[str]]) -> list[float | None]:
        asked.append(lines)
        return [float(dict(word.split("=") for word in line)["optimizer.lr"]) for line in lines]

    propose("train", words, "optuna", tmp_path, launch)
    assert [len(lines) for lines in asked] == [3, 3, 1]
    drawn = [dict(word.split("=") for word in line) for lines in asked for line in lines]
    assert all(one["seed"] == "5" and one["trainer.epochs"] in "12" and 0.1 <= float(one["optimizer.lr"]) <= 0.9 for one in drawn)
    highest = max(float(one["optimizer.lr"]) for one in drawn)
    assert f"best_value: {highest}" in (tmp_path / "optimization_results.yaml").read_text()


def test_optuna_goes_on_after_failures_and_the_same_seed_proposes_the_same(
    optuna: None, asked: list[list[list[str]]], tmp_path: Path
) -> None:
    words = [
        "hydra/sweeper=optuna",
        "seed=range(1,9)",
        "hydra.sweeper.n_trials=4",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=2",
    ]
    for _ in range(2):
        count = iter((None, 1.0, None, 2.0))
        propose("train", words, "optuna", tmp_path, lambda lines, count=count: asked.append(lines) or [next(count)])  # type: ignore[misc]
    assert len(asked) == 8 and asked[:4] == asked[4:]
    assert "best_value: 2.0" in (tmp_path / "optimization_results.yaml").read_text()


def test_a_key_given_twice_is_searched_when_the_last_one_is_a_sweep(optuna: None, asked: list[list[list[str]]], tmp_path: Path) -> None:
    words = ["hydra/sweeper=optuna", "seed=100", "hydra.sweeper.n_trials=1", "hydra.sweeper.n_jobs=1", "seed=1,2"]
    propose("train", words, "optuna", tmp_path, lambda lines: asked.append(lines) or [1.0])  # type: ignore[func-returns-value, list-item]
    assert asked[0][0][0] in ("seed=1", "seed=2")


def test_points_can_be_composed_while_a_sampler_is_at_work(optuna: None, tmp_path: Path) -> None:
    from specforge.config.compose import compose_overrides

    seeds: list[int] = []

    def launch(lines: list[list[str]]) -> list[float | None]:
        seeds.extend(compose_overrides("train", line).config["seed"] for line in lines)
        return [1.0 for _ in lines]

    propose("train", ["hydra/sweeper=optuna", "seed=3,4", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"], "optuna", tmp_path, launch)
    assert len(seeds) == 2 and set(seeds) <= {3, 4}


def test_a_parameter_that_a_sampler_does_not_have_is_refused(optuna: None) -> None:
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.n_trails: no such key\. Did you mean 'hydra\.sweeper\.n_trials'"):
        read_multirun("train", ["hydra/sweeper=optuna", "seed=1,2", "hydra.sweeper.n_trails=3"])
