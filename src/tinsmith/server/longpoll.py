"""Waiting for the ledger on behalf of a client that may leave at any moment.

A wait ends when what is waited for has come, when its time is up, when the client leaves, or when
the server is about to stop; then the client is told to ask again, and asks another server or the
next one here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tinsmith.server.bodies import ClientLeftError
from tinsmith.server.call import Call

T = TypeVar("T")


class Waits:
    """All waits of one server. For one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        """How many wait now."""
        return len(self._tasks)

    def close(self) -> None:
        """End all waits, and every later one at once."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A wait that its caller ends; `close` cancels it too."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._is_closed:
            task.cancel()
        return task

    async def until(self, work: Coroutine[Any, Any, T], call: Call) -> T | None:
        """What the work gives; None if the server is about to stop.

        Raises:
            ClientLeftError: The client left first, and the work was cancelled.
        """
        if self._is_closed:
            work.close()
            return None
        task = asyncio.create_task(work)
        left = asyncio.ensure_future(call.left())
        self._tasks.add(task)
        try:
            await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return None if task.cancelled() else task.result()
            raise ClientLeftError
        finally:
            self._tasks.discard(task)
            task.cancel()
            left.cancel()
