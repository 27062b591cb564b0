"""Threads for what waits on the store of checkpoints, and for nothing else.

A store may be a slow disk or another machine, and a client may fetch many files at once. Bodies
are decoded and large payloads are written on the event loop's own threads; those must never have to
wait behind a download.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

STORE_THREADS = 8

P = ParamSpec("P")
T = TypeVar("T")


class StoreThreads:
    """A few threads, which end when nobody holds this any more."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="tinsmith-store")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` gives, run on one of the threads. A cancelled call lets it run to its end."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, functools.partial(work, *args, **kwargs))
