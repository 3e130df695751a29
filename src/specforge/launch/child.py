"""One frozen run in a process of its own, as a launcher on this machine starts it for each point of a sweep.

python -m specforge.launch.child CONFIG_FILE RUN_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    from specforge.cli import guarded
    from specforge.launch.frontend import run_frozen
    from specforge.launch.worker import end_with_parent

    end_with_parent()
    sys.exit(guarded(lambda: run_frozen(Path(sys.argv[1]), Path(sys.argv[2]))))
