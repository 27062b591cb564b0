"""How much room the disk of the data folder has left, told before it is full.

A service whose disk is full refuses commands, and says so when it has refused one. That there is
little room left is known before: it is told once in the log, `/readyz` has it for as long as it
lasts, and a metric tells how much there is. Commands are run all the while, so that the service is
still ready. What a disk refuses for other reasons, such as a quota, is not known here.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger(__name__)

LEAST_BYTES = 1_000_000_000
"""The snapshots of a handful of adapters, and the ledger of a day."""


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


class FreeSpace:
    """That of one folder. For one event loop.

    Attributes:
        free_bytes: How much there was at the last look; 0 before the first.
        problem: What is to be told of it, while it is too little.
    """

    def __init__(self, folder: Path, measure: Callable[[Path], int] = _free_bytes) -> None:
        self._folder = folder
        self._measure = measure
        self.free_bytes = 0
        self.problem: str | None = None

    async def look(self) -> None:
        """Measure it anew."""
        # On a thread: a disk that is far away may take its time.
        self.free_bytes = await asyncio.to_thread(self._measure, self._folder)
        if self.free_bytes >= LEAST_BYTES:
            self.problem = None
            return
        is_news = self.problem is None
        self.problem = (
            f"the disk of {self._folder} has {self.free_bytes / 1e6:,.0f} MB left; make room on it "
            "before commands have to be refused"
        )
        if is_news:
            _log.warning("%s", self.problem)
