"""Runs `tinsmith` in a process whose wall clock is off by what a file says, which may change.

python jumping_clock.py FILE serve …
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

_file = Path(sys.argv[1])
_time = time.time


def _wall() -> float:
    return _time() + float(_file.read_text())


if __name__ == "__main__":
    time.time = _wall
    time.time_ns = lambda: int(_wall() * 1e9)
    sys.argv = ["tinsmith", *sys.argv[2:]]
    runpy.run_module("tinsmith", run_name="__main__")
