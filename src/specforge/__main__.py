"""``python -m specforge``: the same as the console script ``specforge``."""

from __future__ import annotations

import sys

from specforge.cli import main

if __name__ == "__main__":
    sys.exit(main())
