"""Watches the free space on the disk of the data folder, and warns before it is full.

A service whose disk is full refuses commands. Before that, little free space is logged once, shown
by `/readyz` for as long as it lasts, and measured by a metric. The service stays ready meanwhile.
What a disk refuses for other reasons, such as a quota, is not known here.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger(__name__)

LEAST_BYTES = 1_000_000_000
"""Room for the snapshots of a few adapters, and for a day of the ledger."""


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


class FreeSpace:
    """The free space of one folder's disk. For one event loop.

    Attributes:
        free_bytes: As of the last measurement; 0 before the first.
        problem: The warning, while there is too little.
    """

    def __init__(self, folder: Path, measure: Callable[[Path], int] = _free_bytes) -> None:
        self._folder = folder
        self._measure = measure
        self.free_bytes = 0
        self.problem: str | None = None

    async def look(self) -> None:
        """Measure the free space."""
        # On a thread: a network disk may take long.
        self.free_bytes = await asyncio.to_thread(self._measure, self._folder)
        if self.free_bytes >= LEAST_BYTES:
            self.problem = None
            return
        is_news = self.problem is None
        self.problem = (
            f"the disk of {self._folder} has {self.free_bytes / 1e6:,.0f} MB left; free some space "
            "before commands are refused"
        )
        if is_news:
            _log.warning("%s", self.problem)
