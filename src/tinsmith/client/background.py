"""The thread on which all of the client's I/O happens, and the way over to it.

One thread per process runs one event loop from the first call on: on Linux one that keeps the
interpreter's lock while it has something to do (`held_gil.py`), elsewhere uvloop or asyncio's own.
`start` hands a coroutine over from any thread or event loop and returns a future at once:
coroutines wait in one queue, and a burst of them wakes the loop once.

A forked child begins with a thread of its own.
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
from typing import Any, TypeVar

from tinsmith.client.forking import in_child
from tinsmith.client.futures import APIFuture, seconds, settle_on, within
from tinsmith.client.waits import FUTURES, Waits
from tinsmith.errors import ValidationError

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
        self.waits = Waits(FUTURES, clock=self.loop.time, later=self.loop.call_later)
        """What users wait for here."""
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
        """Run a coroutine on the loop; returns at once.

        Coroutines of one thread begin in the order in which they are handed over. Cancelling the
        future cancels the coroutine, and so does the end of its time.

        Args:
            work: What to run.
            what: What it is, for messages.
            timeout: Seconds after which it is given up with `APITimeoutError`; None for never.

        Raises:
            ValidationError: `timeout` is no number of seconds.
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
            raise RuntimeError(f"{what}: a blocking call on tinsmith's own thread would never end")
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
        """End the loop and its thread. Work under way is cancelled, and its futures with it."""
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
        """Cancel all tasks, give them a moment to end in order, and stop the loop."""
        ends_at = self.loop.time() + WIND_DOWN_S
        # In rounds: one that ends may have started another.
        while (tasks := asyncio.all_tasks() - {self._stopping}) and self.loop.time() < ends_at:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=max(0.0, ends_at - self.loop.time()))
        await asyncio.sleep(0)  # whoever waits for what was settled is woken
        self.loop.stop()

    @property
    def task_count(self) -> int:
        """How many handed-over coroutines are under way."""
        return len(self._tasks)


async def _settle(
    work: Coroutine[Any, Any, T], future: APIFuture[T], timeout_s: float | None, waits: Waits
) -> None:
    wait = waits.begin_here(future.what)
    try:
        value = await (work if timeout_s is None else within(timeout_s, work, future.what))
    except asyncio.CancelledError:
        if not future.cancel():
            raise
    except (Exception, concurrent.futures.CancelledError) as error:  # noqa: BLE001 - handed on whole
        future.fail(error)
    else:
        future.settle(value)
    finally:
        waits.end(wait)


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
    """`getaddrinfo`, on a thread that nobody waits for: a name server may be silent for a minute.

    The interpreter's exit waits for the threads of executors, and libuv at its end for its own, of
    which a forked child has none.
    """
    numeric = {**wanted, "flags": wanted.get("flags", 0) | socket.AI_NUMERICHOST}
    try:
        return socket.getaddrinfo(host, port, **numeric)  # asks nobody
    except socket.gaierror:
        found: concurrent.futures.Future[Any] = concurrent.futures.Future()
        find = functools.partial(socket.getaddrinfo, host, port, **wanted)
        threading.Thread(
            target=_find, args=(find, found), name="tinsmith-names", daemon=True
        ).start()
        return await asyncio.wrap_future(found)


def _find(find: Callable[[], Any], found: concurrent.futures.Future[Any]) -> None:
    if not found.set_running_or_notify_cancel():  # from here on nobody else settles it
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
        """Begin anew: a child has none of its parent's threads, and one may have held the lock."""
        if self.current is not None:
            # Kept: to free a loop closes what it listens on, which the parent still listens on.
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
