"""Cuts the power after a large payload was kept, on a disk that has only what was synced.

Run as `python power_cut.py FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.checkpoints.power_cuts import SimulatedDisk
from tinsmith.service.ledger.payloads import PayloadFiles

PAYLOAD = b"payload" * 50_000

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "disk").mkdir()
    disk = SimulatedDisk(folder / "disk", lambda: None)
    files = PayloadFiles(folder / "disk/payloads")
    files.prepare()
    kept = files.write(PAYLOAD)
    with disk.paused():
        disk.write(set(), folder / "after-cut")
        assert PayloadFiles(folder / "after-cut/payloads").read(kept) == PAYLOAD
