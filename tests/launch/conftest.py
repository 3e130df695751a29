"""The toy run of tests/training is the program that the launched ranks run; cluster_parts.py here has the plug-ins of the cluster tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "training"), str(Path(__file__).parent)]
