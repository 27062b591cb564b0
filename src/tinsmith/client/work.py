"""What a client has under way, so that closing it ends everything at once.

Whatever a call waits for (a pause, a second try, its turn, a result, a loss that runs), it waits
inside `Work.under_way()`. `Work.end` then cancels the wait, and the call fails with `ClosedError`
instead of staying pending until its wait is over.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from tinsmith.errors import ClosedError


class Work:
    """The tasks of one client. For one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()

    def under_way(self) -> _UnderWay:
        """While the block lasts, `end` ends it with `ClosedError`."""
        return _UnderWay(self)

    def end(self) -> None:
        """End everything that is under way; what begins later is not touched."""
        tasks, self._tasks = self._tasks, set()
        tasks.discard(asyncio.current_task())
        self._ended |= tasks
        for task in tasks:
            task.cancel()

    def _begin(self, task: asyncio.Task[Any]) -> bool:
        if task in self._tasks:
            return False  # within a block of its own already
        self._tasks.add(task)
        return True

    def _was_ended(self, task: asyncio.Task[Any]) -> bool:
        self._tasks.discard(task)
        if task not in self._ended:
            return False
        self._ended.discard(task)
        return True


class _UnderWay:
    __slots__ = ("_task", "_work")

    def __init__(self, work: Work) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        if task is not None and self._work._begin(task):
            self._task = task

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task = self._task
        if task is None or not self._work._was_ended(task):
            return
        # One of the task's cancellations was ours; if there is another, it is the user's.
        if task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise closed_error() from None


def closed_error() -> ClosedError:
    """What a call on a closed client is refused with."""
    return ClosedError("the client is closed", remedy="make a new one")
