"""Points that a sampler proposes one batch after the other (``hydra/sweeper=optuna``): the value of each decides the next.

The objective is the best ``walk_accept_length`` of the run. Every proposal is checked when it comes; one that does not check, or whose run
fails, is reported to the sampler as failed and the search goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specforge.config.multirun import Multirun, propose
from specforge.errors import ConfigError, SpecForgeError
from specforge.launch.frontend import report, shown
from specforge.launch.sweep_points import Point, check_point, label_of
from specforge.launch.sweep_record import PointRecord, key_of, open_sweep, sweep_folder, sweep_name
from specforge.launch.sweep_run import SweepRun

OBJECTIVE = "walk_accept_length"


class _Ended(Exception):
    """A signal came while a point ran; leaves the sampler."""


def search(command: str, arguments: Sequence[str], multirun: Multirun) -> int:
    """Let the sampler choose until it has enough points; exit codes as of a sweep, failed proposals do not count against it.

    Raises:
        ConfigError: nothing is searched, the objective cannot be measured, or points would not be waited for.
    """
    _require_objective(command, multirun)
    _require_values_in_time(multirun)
    keys = multirun.searched
    fixed = [word for word in multirun.overrides if key_of(word) not in keys]
    name = sweep_name([_name(multirun)], keys)
    folder = sweep_folder(str(multirun.config.get("output_dir", "outputs")), name, command, fixed, keys)
    with open_sweep(folder, command, arguments, keys) as record:
        report(f"{multirun.sweeper} chooses {', '.join(keys)}; objective: best {OBJECTIVE}; sweep folder {shown(folder)}")
        run = SweepRun(record, known=False)
        asked = _Asked(command, arguments, keys, run)
        try:
            propose(command, arguments, multirun.sweeper, folder, asked.launch)
        except _Ended:
            pass
        except ConfigError as error:
            if not asked.count:  # the search space itself; later it is the sampler that has nothing to choose from
                raise
            report(str(error))
        code = run.end()
        _print_best(run, folder, asked)
        return 0 if code == 1 and any(point.status == "done" for point in run.order) else code


class _Asked:
    """What the sampler talks to: lines of overrides in, values out."""

    def __init__(self, command: str, arguments: Sequence[str], keys: Sequence[str], run: SweepRun) -> None:
        from specforge.launch.sweep import shared_words

        self.command, self.keys, self.run = command, keys, run
        self.shared = shared_words(arguments)
        self.count = 0

    def launch(self, lines: list[list[str]]) -> list[float | None]:
        checked = [self._check(line) for line in lines]
        found = list({point.id: point for point in checked if point is not None}.values())
        self.run.add(found)
        self.run.work(found)
        if self.run.stopped_by:
            raise _Ended
        return [None if point is None else self._value(self.run.record.points[point.id]) for point in checked]

    def _check(self, line: list[str]) -> Point | None:
        self.count += 1
        swept = [word for word in line if key_of(word) in self.keys]
        label = label_of(swept)
        try:
            return check_point(self.command, self.shared, line, swept, label)
        except SpecForgeError as error:
            report(f"proposal {self.count} ({label}) does not check and counts as failed: {error}")
            record = self.run.record.point(f"refused {' '.join(swept)}", label, line)
            record.status, record.note = "refused", str(error)
            if record not in self.run.order:
                self.run.order.append(record)
            self.run.record.save()
            return None

    def _value(self, record: PointRecord) -> float | None:
        """The objective of a finished point; null when it failed or measured nothing."""
        from specforge.report.run_data import read_run

        if record.status != "done" or record.folder is None:
            return None
        best = read_run(record.folder).best(OBJECTIVE)
        record.value = best[0] if best else None
        if best is None:
            record.note = f"measured no {OBJECTIVE}"
        self.run.record.save()
        report(f"{record.label}: {OBJECTIVE} {'-' if record.value is None else format(record.value, '.4f')}")
        return record.value


def _require_objective(command: str, multirun: Multirun) -> None:
    if command != "train":
        raise ConfigError(f"hydra/sweeper={multirun.sweeper}: optimises training runs ({OBJECTIVE}), not {command.replace('_', '-')}.")
    if not multirun.searched:
        raise ConfigError(
            f"hydra/sweeper={multirun.sweeper}: no key to search over. Name one, for example 'optimizer.lr=tag(log,interval(1e-4,1e-2))' or "
            "strategy.ttt_length=3,5,7."
        )
    data = multirun.config.get("data")
    if isinstance(data, dict) and "eval_path" in data and data["eval_path"] is None and "data" not in multirun.searched:
        raise ConfigError(f"data.eval_path=null: the objective {OBJECTIVE} needs held-out conversations. Set data.eval_path=<file>.jsonl")


def _require_values_in_time(multirun: Multirun) -> None:
    """The next proposal depends on the last values, so points must be waited for."""
    launcher, chosen = multirun.config.get("launcher"), multirun.choices.get("launcher")
    waits: Any = launcher.get("wait") if isinstance(launcher, dict) else None
    if isinstance(launcher, dict) and launcher.get("dry_run") is True:
        raise ConfigError(
            f"launcher.dry_run=true with hydra/sweeper={multirun.sweeper}: no run, no value to choose by. Remove one of the two."
        )
    if chosen not in (None, "local") and waits is not True:
        raise ConfigError(
            f"launcher={chosen} with hydra/sweeper={multirun.sweeper}: each proposal depends on the values of the ones before, and this launcher "
            "returns before they are there. Add launcher.wait=true, or use launcher=local."
        )


def _name(multirun: Multirun) -> str:
    from specforge.config.derive import run_name

    return run_name(multirun.config, multirun.choices) if multirun.config else "search"


def _print_best(run: SweepRun, folder: Path, asked: _Asked) -> None:
    measured = [point for point in run.order if point.value is not None]
    if not measured:
        print(f"no point measured {OBJECTIVE}")
        return
    best = max(measured, key=lambda point: point.value or 0.0)
    print(f"best of {asked.count} proposals: {best.label} with {OBJECTIVE} {best.value:.4f}, {shown(Path(best.run_dir or folder))}")
