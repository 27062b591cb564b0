"""Waiting for the ledger on behalf of a client that may leave at any moment.

A wait ends when what is waited for has come, when its time is up, when the client leaves, or when
the server is about to stop; then the client is told to ask again, and asks another server or the
next one here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tinsmith.server.call import Call
from tinsmith.server.incoming import ClientLeftError

T = TypeVar("T")


class Waits:
    """All waits of one server. For one event loop."""

    def __init__(self) -> None:
        self._waits: set[_Wait] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        """How many wait now."""
        return len(self._waits) + len(self._tasks)

    def close(self) -> None:
        """End all waits, and every later one at once."""
        self._is_closed = True
        for wait in list(self._waits):
            wait.cancel()
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
        wait, left = _Wait(), call.left()
        self._waits.add(wait)
        left.add_done_callback(wait.cancel)
        try:
            return await work
        except asyncio.CancelledError:
            if not wait.is_ours():
                raise
            if left.done():
                raise ClientLeftError from None
            return None
        finally:
            self._waits.discard(wait)
            wait.is_over = True
            left.cancel()


class _Wait:
    """A wait in the task that answers a request; a task of its own would cost as much again."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "waits are made in coroutines"
        self._task = task
        self._is_cancelled = False
        self.is_over = False

    def cancel(self, _: object = None) -> None:
        """End it, if it goes on."""
        if not self._is_cancelled and not self.is_over:
            self._is_cancelled = True
            self._task.cancel()

    def is_ours(self) -> bool:
        """Whether a cancellation that arrived came from here, and from nobody else too."""
        return self._is_cancelled and self._task.uncancel() == 0
