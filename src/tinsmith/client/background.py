"""The background thread that does all of the client's I/O.

One thread per process runs one event loop from the first call on: on Linux one that keeps the GIL
while it has something to do (`held_gil.py`), elsewhere uvloop's or asyncio's own. `start` submits a
coroutine from any thread or event loop and returns a future immediately; a burst of them wakes the
loop once.

A forked child starts a thread of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import concurrent.futures
import functools
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from tinsmith.client.forking import in_child
from tinsmith.client.futures import APIFuture, seconds, settle_on, within
from tinsmith.client.waits import FUTURES, WaitReporter
from tinsmith.errors import ClosedError, ValidationError

T = TypeVar("T")

STOP_TIMEOUT_S = 5.0
WIND_DOWN_S = 1.0

_log = logging.getLogger(__name__)


class Background:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        settle_on(self.loop)
        self._queue: collections.deque[
            tuple[Coroutine[Any, Any, Any], APIFuture[Any], float | None]
        ] = collections.deque()
        self._is_woken = False
        self.waits = WaitReporter(FUTURES, clock=self.loop.time, later=self.loop.call_later)
        """Logs what users wait for."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="tinsmith-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def start(
        self, work: Coroutine[Any, Any, T], what: str = "call", timeout: float | None = None
    ) -> APIFuture[T]:
        """Run a coroutine on the loop; returns immediately.

        Coroutines of one thread start in the order in which they are submitted. Cancelling the
        future cancels the coroutine.

        Args:
            work: The coroutine.
            what: Its name, for messages.
            timeout: Seconds after which it fails with `APITimeoutError`; None for never.

        Raises:
            ValidationError: `timeout` is not a number of seconds.
        """
        try:
            limit_s = seconds(timeout, what)
        except ValidationError:
            work.close()
            raise
        future: APIFuture[T] = APIFuture(what)
        # Append, then look at the flag; the loop clears the flag, then drains: nothing is missed.
        self._queue.append((work, future, limit_s))
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._drain)
        return future

    def run(
        self, work: Coroutine[Any, Any, T], what: str = "call", timeout: float | None = None
    ) -> T:
        """Run a coroutine on the loop and wait for it.

        Raises:
            RuntimeError: Called on the loop's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(
                f"{what}: a blocking call on tinsmith's own event loop would wait for itself; "
                "await its _async variant there, or call it on another thread"
            )
        return self.start(work, what, timeout).result()

    def call_soon(self, fn: Callable[..., object], *args: Any) -> None:
        """Call `fn` on the loop's thread."""
        self.loop.call_soon_threadsafe(fn, *args)

    def _drain(self) -> None:
        self._is_woken = False
        while self._queue:
            work, future, timeout = self._queue.popleft()
            if future.cancelled():
                work.close()
                continue
            task = self.loop.create_task(_settle(work, future, timeout, self.waits))
            self._tasks.add(task)  # a loop holds its tasks weakly
            task.add_done_callback(self._tasks.discard)
            future.stop_work_with(lambda task=task: self.call_soon(task.cancel))  # type: ignore[misc]

    def stop(self) -> None:
        """Stop the loop and its thread; pending coroutines and their futures are cancelled."""
        self.call_soon(self._begin_to_stop)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()

    def _begin_to_stop(self) -> None:
        for work, future, _ in self._queue:
            work.close()
            future.cancel()
        self._queue.clear()
        self._stopping = self.loop.create_task(self._wind_down())

    async def _wind_down(self) -> None:
        """Cancel all tasks, give them a moment to end, and stop the loop."""
        ends_at = self.loop.time() + WIND_DOWN_S
        # In rounds: a task that ends may have started another.
        while (tasks := asyncio.all_tasks() - {self._stopping}) and self.loop.time() < ends_at:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=max(0.0, ends_at - self.loop.time()))
        await asyncio.sleep(0)  # wakes the waiters of what was settled
        self.loop.stop()


async def _settle(
    work: Coroutine[Any, Any, T], future: APIFuture[T], timeout_s: float | None, waits: WaitReporter
) -> None:
    wait = waits.begin_here(future.what)
    try:
        value = await (work if timeout_s is None else within(timeout_s, work, future.what))
    except asyncio.CancelledError:
        if not future.cancel():
            raise
    except (Exception, concurrent.futures.CancelledError) as error:  # noqa: BLE001 - the future raises it
        future.fail(error)
    else:
        future.settle(value)
    finally:
        waits.end(wait)


class Work:
    """The tasks of one client, so that closing it ends everything at once. For one event loop.

    Whatever a call waits for (a pause, a retry, its place in the queue, a result, a loss function),
    it waits inside `under_way()`. `end` then cancels the wait, and the call fails with
    `ClosedError` instead of staying pending until its wait is over.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()

    def under_way(self) -> _UnderWay:
        """A block that `end` ends with `ClosedError`."""
        return _UnderWay(self)

    def end(self) -> None:
        """End all blocks that have been entered; later ones are not affected."""
        tasks, self._tasks = self._tasks, set()
        tasks.discard(asyncio.current_task())
        self._ended |= tasks
        for task in tasks:
            task.cancel()

    def _begin(self, task: asyncio.Task[Any]) -> bool:
        if task in self._tasks:
            return False  # it is inside an outer block
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
    """The error of a call on a closed client."""
    return ClosedError("the client is closed", remedy="create a new one")


def _new_loop() -> asyncio.AbstractEventLoop:
    from tinsmith.client import held_gil

    loop = held_gil.new_event_loop()
    if loop is None:
        try:
            import uvloop
        except ImportError:
            loop = asyncio.new_event_loop()
        else:
            loop = uvloop.new_event_loop()
    loop.getaddrinfo = _addresses_of  # type: ignore[method-assign]
    return loop


async def _addresses_of(host: Any, port: Any, **wanted: int) -> Any:
    """`getaddrinfo` on a daemon thread: a name server may not answer for a minute.

    The interpreter's exit would wait for an executor's thread, and libuv's exit for its own, which
    a forked child does not have.
    """
    numeric = {**wanted, "flags": wanted.get("flags", 0) | socket.AI_NUMERICHOST}
    try:
        return socket.getaddrinfo(host, port, **numeric)  # an address, not a name
    except socket.gaierror:
        found: concurrent.futures.Future[Any] = concurrent.futures.Future()
        find = functools.partial(socket.getaddrinfo, host, port, **wanted)
        threading.Thread(
            target=_find, args=(find, found), name="tinsmith-names", daemon=True
        ).start()
        return await asyncio.wrap_future(found)


def _find(find: Callable[[], Any], found: concurrent.futures.Future[Any]) -> None:
    if not found.set_running_or_notify_cancel():  # cancelled
        return
    try:
        found.set_result(find())
    except (OSError, UnicodeError) as error:
        found.set_exception(error)


class _Holder:
    """The background loop of this process, or none yet."""

    def __init__(self) -> None:
        self.current: Background | None = None
        self.of_parents: list[Background] = []
        self.lock = threading.Lock()

    def forget(self) -> None:
        """Reset in a forked child, which has no threads, and whose lock may be held."""
        if self.current is not None:
            # Kept: freeing a loop closes its descriptors, which the parent still uses.
            self.of_parents.append(self.current)
        self.current = None
        self.lock = threading.Lock()

    def stop(self) -> None:
        """End the loop when the interpreter exits."""
        if self.current is not None:
            self.current.stop()
            self.current = None


_holder = _Holder()
atexit.register(_holder.stop)


def background() -> Background:
    """The background loop of this process, started if it is not running."""
    if _holder.current is None:
        with _holder.lock:
            if _holder.current is None:
                _holder.current = Background()
    return _holder.current


def is_running() -> bool:
    """Whether this process has one, and so may have sent something."""
    return _holder.current is not None


in_child(_holder.forget)
