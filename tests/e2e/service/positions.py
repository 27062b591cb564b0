"""How far a service's ledger is known to be durable, as the file beside it says."""

from __future__ import annotations

import json
import time
from pathlib import Path

WAIT_S = 90.0


def wait_caught_up(data: Path, commits: int) -> None:
    """Until the position beside the database has so many commits."""
    deadline = time.monotonic() + WAIT_S
    marker = data / "ledger" / "ledger.position"
    while json.loads(marker.read_bytes().rpartition(b"}")[0] + b"}")["commits"] < commits:
        assert time.monotonic() < deadline
        time.sleep(0.02)
