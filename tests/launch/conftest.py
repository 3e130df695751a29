"""The toy run of tests/training is the program that the launched ranks run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))
