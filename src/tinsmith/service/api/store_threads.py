"""Threads for calls to the checkpoint store alone.

A store may be a slow disk or another machine, and a client may download many files at once. Bodies
are decoded and large payloads written on the event loop's default threads, which must never wait
behind a download.
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
    """A few threads, which end with the last reference to this."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="tinsmith-store")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work` on one of the threads; a cancelled call still runs to its end."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, functools.partial(work, *args, **kwargs))
