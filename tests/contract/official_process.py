"""Programs that use the official SDK: each in a process of its own, which prints what it found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 300.0


def said_by(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """What a program printed that came to its end."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "TINKER_TELEMETRY": "0", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
