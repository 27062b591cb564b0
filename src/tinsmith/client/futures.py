"""What a call returns: a result that is on its way, for threads and for coroutines alike.

`APIFuture` is a `concurrent.futures.Future` that can also be awaited, on any event loop. It is
settled on the background loop's thread; user callbacks run on a thread of their own, so that one
which waits for another result holds up nobody's traffic.

Knows nothing of how results are made or fetched.
"""

from __future__ import annotations

import _thread
import asyncio
import collections
import concurrent.futures
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinsmith.client.forking import in_child
from tinsmith.errors import APITimeoutError, ValidationError, without_frames

if TYPE_CHECKING:
    from queue import SimpleQueue

T = TypeVar("T")

_log = logging.getLogger(__name__)

STRETCH_S = 0.5
"""How long a thread waits at a stretch. Python misses a Ctrl-C that comes just before it begins to
wait for a lock, and sees it only when the wait is over."""


class APIFuture(concurrent.futures.Future[T], Generic[T]):
    """A result that is on its way.

    Ask with `result()` from a thread and with `await` from a coroutine, as often as you like: the
    answer is the same object each time, and an error the same error.
    """

    def __init__(self, what: str = "call") -> None:
        super().__init__()
        self._condition = _LazyCondition()  # type: ignore[assignment]  # it has what is used of one
        self.what = what
        self._stop_work: Callable[[], object] | None = None

    def __reduce__(self) -> Any:
        raise TypeError("a future is settled in this process and is not pickled; pass its result")

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: Seconds to wait. When they are over the work goes on, and can be waited for
                again.

        Raises:
            TimeoutError: It did not come in time.
            ValidationError: `timeout` is no number of seconds.
        """
        limit_s = seconds(timeout, self.what)
        ends_at = None if limit_s is None else time.monotonic() + limit_s
        while not self.done():
            left_s = STRETCH_S if ends_at is None else min(STRETCH_S, ends_at - time.monotonic())
            try:
                return super().result(max(0.0, left_s))
            except concurrent.futures.TimeoutError as exc:
                is_late = ends_at is not None and time.monotonic() >= ends_at
                if is_late and not self.done():
                    raise TimeoutError(f"{self.what}: no result within {limit_s:g} s") from exc
        return super().result()  # also where the work itself ended with a TimeoutError

    async def result_async(self, timeout: float | None = None) -> T:
        """Wait for the result in a coroutine. A timeout or cancellation gives the work up.

        Raises:
            APITimeoutError: It did not come in time (a `TimeoutError`).
            ValidationError: `timeout` is no number of seconds.
        """
        limit_s = seconds(timeout, self.what)
        try:
            if limit_s is None:
                return await self._settled()
            return await within(limit_s, self._settled(), self.what)
        except (asyncio.CancelledError, APITimeoutError):
            self.cancel()  # changes nothing if the work itself ended with this error
            raise

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def future(self) -> APIFuture[T]:
        """This future, which is a `concurrent.futures.Future` itself."""
        return self

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Call `fn` with this future once it is settled, on a thread kept for callbacks.

        If it is settled already, `fn` is called at once, here.
        """
        if self.done():
            super().add_done_callback(fn)
        else:
            super().add_done_callback(functools.partial(_callbacks.run, fn))

    def when_settled(self, fn: Callable[[APIFuture[T]], object]) -> None:
        """As `add_done_callback`, on the thread that settles it: `fn` must not block."""
        super().add_done_callback(fn)  # type: ignore[arg-type]  # it is called with this future

    def cancel(self) -> bool:
        """Give the work up, here and where possible on the server; False if it was settled."""
        if not super().cancel():
            return False
        stop = self._take_stop()
        if stop is not None:  # once: a second time would cut short how the work ends
            stop()
        return True

    def stop_work_with(self, stop: Callable[[], object]) -> None:
        """Have `stop` called if the future is cancelled; at once if it was already."""
        self._stop_work = stop
        if self.done():
            unused = self._take_stop()
            if unused is not None and self.cancelled():  # else `cancel` has called it
                unused()

    def _take_stop(self) -> Callable[[], object] | None:
        stop, self._stop_work = self._stop_work, None
        return stop

    def settle(self, value: T) -> None:
        """Give it its result, unless it was cancelled meanwhile."""
        try:
            self.set_result(value)
        except concurrent.futures.InvalidStateError:
            _log.debug("%s: its result came after it was settled", self.what)
        else:
            self._stop_work = None  # it holds the work, which holds the future: a circle

    def fail(self, error: BaseException) -> None:
        """Give it its error, unless it was cancelled meanwhile.

        The error is kept without its traceback, which would keep the request with its body. Where
        it is asked for, it gets the traceback of whoever asks.
        """
        try:
            self.set_exception(without_frames(error))
        except concurrent.futures.InvalidStateError:
            _log.debug("%s: it failed after it was settled: %r", self.what, error)
        else:
            self._stop_work = None

    async def _settled(self) -> T:
        if self.done():
            # As awaiting any other call does: tasks that were begun before have their turn first.
            await asyncio.sleep(0)
        else:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            inbox = _inboxes.of(loop)
            self.when_settled(functools.partial(inbox.put, waiter))
            await waiter
        if self.cancelled():
            raise asyncio.CancelledError(f"{self.what} was cancelled")
        return super().result()


class _LazyCondition(_thread.RLock):  # type: ignore[misc]  # it is not final, though mypy thinks so
    """A lock, and a condition that is made when a thread waits for it.

    Most futures are awaited by coroutines, or settled before anybody asks. A condition is nine
    objects; with thousands of futures under way the garbage collector looks at them all the time.
    """

    __slots__ = ("_condition",)

    def __init__(self) -> None:
        self._condition: threading.Condition | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """Whoever calls this has acquired it, and so nobody else makes one meanwhile."""
        if self._condition is None:
            self._condition = threading.Condition(self)
        return self._condition.wait(timeout)

    def notify_all(self) -> None:
        condition, self._condition = self._condition, None  # it holds us: a circle
        if condition is not None:
            condition.notify_all()


def seconds(timeout: float | None, what: str) -> float | None:
    """How long a user wants to wait; None for as long as it takes, which infinity says too.

    Raises:
        ValidationError: It is no number: on an event loop it would disturb all other clocks.
    """
    if timeout is None:
        return None
    try:
        limit_s = float(timeout)
    except (TypeError, ValueError):
        limit_s = math.nan
    if math.isnan(limit_s):
        raise ValidationError(
            f"{what}: timeout is {timeout!r:.80}", remedy="give seconds, or None to wait for ever"
        )
    return limit_s if limit_s < threading.TIMEOUT_MAX else None


async def within(timeout_s: float, work: Coroutine[Any, Any, T], what: str) -> T:
    """Await something for a limited time.

    Raises:
        APITimeoutError: It was not done in time; it has been cancelled.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await work
    except TimeoutError as exc:
        if not limit.expired():
            raise  # the work's own
        raise APITimeoutError(f"{what}: not done within {timeout_s:g} s") from exc


class _Inbox:
    """Waiters of one event loop that can go on; a burst of them costs one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._ready: collections.deque[asyncio.Future[None]] = collections.deque()
        self._is_woken = False

    def put(self, waiter: asyncio.Future[None], _: object = None) -> None:
        """Let a waiter go on; the future that was settled may be given too."""
        # Append, then look at the flag; the loop clears the flag, then drains: nothing is missed.
        self._ready.append(waiter)
        if self._is_woken:
            return
        self._is_woken = True
        here = asyncio._get_running_loop()
        if here is not None and here is _inboxes.settling_loop:
            here.call_soon(self._wake)  # whatever else is settled in this turn goes along
        else:
            self._wake()  # somebody else's loop may have no further turn

    def _wake(self) -> None:
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the loop is closed, and so nobody waits
            _log.debug("a result came for an event loop that is closed")
            self._is_woken = False  # nor is the next one kept
            self._ready.clear()  # waiters hold their loop, which would be kept for ever

    def _drain(self) -> None:
        self._is_woken = False
        while self._ready:
            waiter = self._ready.popleft()
            if not waiter.done():
                waiter.set_result(None)


class _Inboxes:
    """The inbox of each event loop that waits for results."""

    def __init__(self) -> None:
        self.begin_anew()
        in_child(self.begin_anew)

    def begin_anew(self) -> None:
        self.settling_loop: asyncio.AbstractEventLoop | None = None
        self._of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Inbox] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    def of(self, loop: asyncio.AbstractEventLoop) -> _Inbox:
        with self._lock:
            inbox = self._of.get(loop)
            if inbox is None:
                inbox = self._of[loop] = _Inbox(loop)
            return inbox


_inboxes = _Inboxes()


def settle_on(loop: asyncio.AbstractEventLoop) -> None:
    """Futures are settled on this loop, which goes on until all who wait have been woken."""
    _inboxes.settling_loop = loop


class _CallbackThread:
    """Runs user callbacks one after another, on a thread that is started for the first."""

    def __init__(self) -> None:
        self.begin_anew()
        in_child(self.begin_anew)

    def begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[tuple[Callable[[Any], object], Any]] | None = None

    def run(self, fn: Callable[[Any], object], future: Any) -> None:
        with self._lock:
            if self._waiting is None:
                from queue import SimpleQueue

                self._waiting = SimpleQueue()
                threading.Thread(
                    target=self._work, args=(self._waiting,), name="tinsmith-callbacks", daemon=True
                ).start()
            self._waiting.put((fn, future))

    def _work(self, waiting: SimpleQueue[tuple[Callable[[Any], object], Any]]) -> None:
        while True:
            fn, future = waiting.get()
            try:
                fn(future)
            except BaseException:  # noqa: BLE001 - it is user code; not even its exit may end others
                _log.exception("a callback of a future raised an error")
            del fn, future  # or the last one would be kept alive until the next comes


_callbacks = _CallbackThread()


def run_callback(fn: Callable[[], object]) -> None:
    """Call user code on the thread kept for it; an error that it raises is logged."""
    _callbacks.run(lambda _: fn(), None)
