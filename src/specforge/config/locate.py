"""Where the configuration groups are: ``conf/`` of a checkout, else the copy inside the installed package."""

from __future__ import annotations

from pathlib import Path

from specforge.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]


def config_dir(package: Path = _PACKAGE) -> Path:
    """The first existing of ``<checkout>/conf`` and ``<package>/conf``, absolute.

    The checkout comes first because an editable install also leaves a frozen copy of ``conf/`` behind, which would go stale.
    ``package`` is the folder of the ``specforge`` package; only tests pass another one.

    Raises:
        ConfigError: neither folder exists.
    """
    candidates = (package.parents[1] / "conf", package / "conf")
    for candidate in candidates:
        # base.yaml tells our folder from any other folder that is called conf.
        if (candidate / "base.yaml").is_file():
            return candidate
    tried = " and ".join(str(c) for c in candidates)
    raise ConfigError(f"conf/: no configuration folder found (looked in {tried}). Install specforge again, or run it from a checkout.")
