"""``specforge --help``: the text of ``conf/hydra/help/specforge.yaml`` with every group and its options filled in.

Hydra prints the same from the same file, but copies its whole repository for each group that it lists, which takes seconds once
there are many; here the folders are read directly.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from specforge.config.locate import config_dir


def help_text(extra_dirs: Sequence[str] = ()) -> str:
    """The help page; ``extra_dirs`` are folders given with ``--config-dir``."""
    page = OmegaConf.create({"hydra": {"help": OmegaConf.load(config_dir() / "hydra" / "help" / "specforge.yaml")}})
    groups = "\n".join(f"  {group}: {', '.join(options)}" for group, options in group_options(extra_dirs).items())
    return string.Template(page.hydra.help.template).substitute(APP_CONFIG_GROUPS=groups + "\n")


def group_options(extra_dirs: Sequence[str] = ()) -> dict[str, list[str]]:
    """Every group with its options, both sorted; Hydra's own groups left out."""
    found: dict[str, set[str]] = {}
    for root in (config_dir(), *map(Path, extra_dirs)):
        for path in root.glob("*/**/*.yaml"):
            group = path.parent.relative_to(root).as_posix()
            if group.split("/")[0] != "hydra":
                found.setdefault(group, set()).add(path.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}
