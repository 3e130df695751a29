"""What the demo promises, read from its run folder: python tests/check_demo.py outputs/demo (run by CI after `make demo`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: Path) -> int:
    """Exit 1 with the reasons if accept_length, losslessness or an artefact falls short."""
    run = max((p for p in folder.iterdir() if p.is_dir()), key=lambda p: p.name)
    report = json.loads(max((run / "evaluate").glob("2*.json")).read_text())
    before, after = (entry["decoding"] for entry in report["drafts"].values())
    low = after["accept_length_interval_95"][0]
    checks = {
        f"accept_length {after['accept_length']:.3f} is at least 1.5": after["accept_length"] >= 1.5,
        f"its interval starts at {low:.3f}, above the untrained {before['accept_length']:.3f}": low > before["accept_length"],
        f"{after['lossless_requests']} of {after['compared_requests']} outputs equal those without the draft": after["compared_requests"]
        > 0
        and after["lossless_requests"] == after["compared_requests"],
        "the export is there": (run / "export/sglang/model.safetensors").is_file(),
    }
    for text, held in checks.items():
        print("ok  " if held else "FAIL", text)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
