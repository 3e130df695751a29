"""Multirun: check every point first, then give those that are not finished yet to the launcher.

A point that fails stops nothing; the table at the end says what became of each. Started again, the same sweep skips what is finished and
goes on with what was interrupted, in its folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from specforge.config.from_run import config_dirs, split_flags
from specforge.config.multirun import BASIC, Multirun, read_multirun
from specforge.config.points import parse_grid, searchpath
from specforge.errors import ConfigError
from specforge.launch.frontend import EPHEMERAL, report, shown
from specforge.launch.sweep_points import check_points
from specforge.launch.sweep_record import open_sweep, sweep_folder, sweep_name
from specforge.launch.sweep_run import SweepRun


def sweep(command: str, arguments: Sequence[str]) -> int:
    """Expand, check all, run all; 0 if every point succeeded or was submitted, 1 if any failed, 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        ConfigError: a point does not check; nothing has been started then.
        RunError: the same sweep is at work already.
    """
    if command in EPHEMERAL:
        raise ConfigError(f"-m: {command.replace('_', '-')} only prints; run it once for each value.")
    flags, _ = split_flags(arguments)
    printing = [f for f in flags if f in ("--cfg", "-c", "--info", "-i", "--help", "-h")]
    if printing:
        raise ConfigError(f"{printing[0]}: prints one configuration and does not go with -m. Remove one of the two.")
    multirun = read_multirun(command, arguments)
    if multirun.sweeper != BASIC:
        from specforge.launch.sweep_search import search

        return search(command, arguments, multirun)
    return _run_grid(command, arguments, multirun)


def shared_words(arguments: Sequence[str]) -> list[str]:
    """What every point's line begins with: the flags, and where Hydra looks for options."""
    flags, overrides = split_flags(arguments)
    return [*flags, *(word for word in overrides if word.startswith("hydra.searchpath="))]


def _run_grid(command: str, arguments: Sequence[str], multirun: Multirun) -> int:
    grid = parse_grid(multirun.overrides, [*config_dirs(arguments), *searchpath(arguments)])
    points = check_points(command, shared_words(arguments), grid.points(), grid.swept)
    configs = [point.ready.config for point in points]
    name = sweep_name([config["name"] for config in configs], grid.swept)
    folder = sweep_folder(configs[0]["output_dir"], name, command, grid.fixed, grid.swept)
    with open_sweep(folder, command, arguments, grid.swept) as record:
        report(f"{len(points)} points checked, sweep folder {shown(folder)}")
        run = SweepRun(record)
        run.add(points)
        batch = multirun.batch or len(points)
        for start in range(0, len(points), batch):
            if not run.stopped_by:
                run.work(points[start : start + batch])
        return run.end()
