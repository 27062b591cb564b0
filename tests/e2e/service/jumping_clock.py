"""Runs `tinsmith` in a process whose wall clock is off by what a file says, which may change.

python jumping_clock.py FILE serve …
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path


def main(file: Path, *arguments: str) -> None:
    """Set the clock, and run."""
    true_time = time.time

    def wall() -> float:
        return true_time() + float(file.read_text())

    time.time = wall
    time.time_ns = lambda: int(wall() * 1e9)
    sys.argv = ["tinsmith", *arguments]
    runpy.run_module("tinsmith", run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
