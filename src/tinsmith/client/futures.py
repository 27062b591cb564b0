"""The future that a call returns, for threads and coroutines alike.

`APIFuture` is a `concurrent.futures.Future` that can also be awaited, on any event loop. It is
settled on the background loop's thread; user callbacks run on a separate thread, so that one that
waits for another result does not block the client's I/O.

Knows nothing of how results are computed or fetched.
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
"""How long a thread waits at a time. Python notices a Ctrl-C that comes just before it starts to
wait for a lock only when the wait is over."""


class APIFuture(concurrent.futures.Future[T], Generic[T]):
    """The pending result of a call.

    Use `result()` in a thread and `await` in a coroutine, as often as you like: you get the same
    object, or the same error, each time.
    """

    def __init__(self, what: str = "call") -> None:
        super().__init__()
        self._condition = _LazyCondition()  # type: ignore[assignment]  # it has what is used of one
        self.what = what
        self._stop_work: Callable[[], object] | None = None

    def __reduce__(self) -> Any:
        raise TypeError("a future cannot be pickled; pass its result instead")

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: Seconds to wait. The call continues after a timeout, and can be waited for
                again.

        Raises:
            TimeoutError: There was no result in time.
            ValidationError: `timeout` is not a number of seconds.
            RuntimeError: Called on the client's own event loop, which would wait for itself.
        """
        limit_s = seconds(timeout, self.what)
        ends_at = None if limit_s is None else time.monotonic() + limit_s
        if not self.done():
            self._refuse_on_own_loop("result()")
        while not self.done():
            left_s = STRETCH_S if ends_at is None else min(STRETCH_S, ends_at - time.monotonic())
            try:
                return super().result(max(0.0, left_s))
            except concurrent.futures.TimeoutError as exc:
                is_late = ends_at is not None and time.monotonic() >= ends_at
                if is_late and not self.done():
                    raise TimeoutError(f"{self.what}: no result within {limit_s:g} s") from exc
        return super().result()  # also where the work itself ended with a TimeoutError

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call to end; its error, or None if it has a result.

        Raises:
            TimeoutError: It did not end in time.
            RuntimeError: As in `result`.
        """
        if not self.done():
            self._refuse_on_own_loop("exception()")
        return super().exception(timeout)

    def _refuse_on_own_loop(self, method: str) -> None:
        loop = asyncio._get_running_loop()
        if loop is not None and loop in _inboxes.own_loops:
            raise RuntimeError(
                f"{self.what}: {method} on tinsmith's own event loop would wait for itself; await "
                f"the future there, or call {method} on another thread"
            )

    async def result_async(self, timeout: float | None = None) -> T:
        """Wait for the result in a coroutine. A timeout or cancellation cancels the call.

        Raises:
            APITimeoutError: There was no result in time (a `TimeoutError`).
            ValidationError: `timeout` is not a number of seconds.
        """
        limit_s = seconds(timeout, self.what)
        try:
            if limit_s is None:
                return await self._settled()
            return await within(limit_s, self._settled(), self.what)
        except (asyncio.CancelledError, APITimeoutError):
            self.cancel()  # has no effect if the call itself ended with this error
            raise

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def coroutine(self) -> Coroutine[Any, Any, T]:
        """A coroutine that waits for the result, for `asyncio.create_task` and the like."""
        return self.result_async()

    def future(self) -> APIFuture[T]:
        """This future, which is a `concurrent.futures.Future` itself."""
        return self

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Call `fn` with this future once it is settled, on a thread for callbacks.

        If it is already settled, `fn` is called immediately, on this thread.
        """
        if self.done():
            super().add_done_callback(fn)
        else:
            super().add_done_callback(functools.partial(_callbacks.run, fn))

    def when_settled(self, fn: Callable[[APIFuture[T]], object]) -> None:
        """As `add_done_callback`, on the thread that settles the future: `fn` must not block."""
        super().add_done_callback(fn)  # type: ignore[arg-type]  # it is called with this future

    def cancel(self) -> bool:
        """Cancel the call, here and where possible on the server; False if it was settled."""
        if not super().cancel():
            return False
        stop = self._take_stop()
        if stop is not None:  # once: a second time would interrupt its cleanup
            stop()
        return True

    def stop_work_with(self, stop: Callable[[], object]) -> None:
        """Call `stop` if the future is cancelled; immediately if it was already."""
        self._stop_work = stop
        if self.done():
            unused = self._take_stop()
            if unused is not None and self.cancelled():  # else `cancel` has called it
                unused()

    def _take_stop(self) -> Callable[[], object] | None:
        stop, self._stop_work = self._stop_work, None
        return stop

    def settle(self, value: T) -> None:
        """Set the result, unless the future was cancelled meanwhile."""
        try:
            self.set_result(value)
        except concurrent.futures.InvalidStateError:
            _log.debug("%s: a result arrived after it was settled", self.what)
        else:
            self._stop_work = None  # it refers to the task, which refers to the future

    def fail(self, error: BaseException) -> None:
        """Set the error, unless the future was cancelled meanwhile.

        The error is stored without its traceback, which would keep the request and its body alive;
        it gets the traceback of the caller that it is raised to.
        """
        try:
            self.set_exception(without_frames(error))
        except concurrent.futures.InvalidStateError:
            _log.debug("%s: an error arrived after it was settled: %r", self.what, error)
        else:
            self._stop_work = None

    async def _settled(self) -> T:
        if self.done():
            # As awaiting any other call does: tasks that were started before run first.
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
    """A lock, and a condition that is created when a thread waits for it.

    Most futures are awaited by coroutines, or settled before they are asked for. A condition is
    nine objects; with thousands of pending futures the garbage collector visits them all the time.
    """

    __slots__ = ("_condition",)

    def __init__(self) -> None:
        self._condition: threading.Condition | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait to be notified. The caller holds the lock, so only one condition is created."""
        if self._condition is None:
            self._condition = threading.Condition(self)
        return self._condition.wait(timeout)

    def notify_all(self) -> None:
        condition, self._condition = self._condition, None  # it refers to us
        if condition is not None:
            condition.notify_all()


def seconds(timeout: float | None, what: str) -> float | None:
    """A timeout in seconds; None for no limit, which infinity means too.

    Raises:
        ValidationError: It is not a number. NaN would disturb the timers of an event loop.
    """
    if timeout is None:
        return None
    try:
        limit_s = float(timeout)
    except (TypeError, ValueError):
        limit_s = math.nan
    if math.isnan(limit_s):
        raise ValidationError(
            f"{what}: timeout is {timeout!r:.80}", remedy="pass seconds, or None for no limit"
        )
    return limit_s if limit_s < threading.TIMEOUT_MAX else None


async def within(timeout_s: float, work: Coroutine[Any, Any, T], what: str) -> T:
    """Await something for a limited time.

    Raises:
        APITimeoutError: The time was over; the work has been cancelled.
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
    """Waiters of one event loop whose futures are settled; a burst of them costs one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._ready: collections.deque[asyncio.Future[None]] = collections.deque()
        self._is_woken = False

    def put(self, waiter: asyncio.Future[None], _: object = None) -> None:
        """Wake a waiter."""
        # Append, then look at the flag; the loop clears the flag, then drains: nothing is missed.
        self._ready.append(waiter)
        if self._is_woken:
            return
        self._is_woken = True
        here = asyncio._get_running_loop()
        if here is not None and here is _inboxes.settling_loop:
            here.call_soon(self._wake)  # with all that this iteration settles
        else:
            self._wake()  # another loop may not run again

    def _wake(self) -> None:
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the loop is closed: there are no waiters
            _log.debug("a result arrived for an event loop that is closed")
            self._is_woken = False  # so that the next one is dropped too
            self._ready.clear()  # waiters refer to their loop, which would never be freed

    def _drain(self) -> None:
        self._is_woken = False
        while self._ready:
            waiter = self._ready.popleft()
            if not waiter.done():
                waiter.set_result(None)


class _Inboxes:
    """The inbox of each event loop that waits for results."""

    def __init__(self) -> None:
        self.reset()
        in_child(self.reset)

    def reset(self) -> None:
        self.settling_loop: asyncio.AbstractEventLoop | None = None
        self.own_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        """The one that settles futures, and in tests those that did."""
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
    """Name the loop that settles futures; it runs until all waiters have been woken."""
    _inboxes.settling_loop = loop
    _inboxes.own_loops.add(loop)


class _CallbackThread:
    """Runs user callbacks one after another, on a thread that the first one starts."""

    def __init__(self) -> None:
        self.reset()
        in_child(self.reset)

    def reset(self) -> None:
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
            except BaseException:  # noqa: BLE001 - user code; not even SystemExit may end the thread
                _log.exception("a future's callback raised an error")
            del fn, future  # else the last one is kept alive until the next arrives


_callbacks = _CallbackThread()


def run_callback(fn: Callable[[], object]) -> None:
    """Call user code on the thread for callbacks; an error that it raises is logged."""
    _callbacks.run(lambda _: fn(), None)
