"""Samples of many prompts: a window of them in flight, and how far they have come.

`samples/many.py` has the methods that users call. Progress is only shown on a terminal or in a
notebook's cell.
"""

from __future__ import annotations

import asyncio
import collections
import queue
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sized
from typing import Literal, TypeAlias

from tinsmith.client.futures import APIFuture, seconds
from tinsmith.errors import APITimeoutError, ValidationError
from tinsmith.observe import terminal as observe
from tinsmith.types.inputs import ModelInput
from tinsmith.types.sampling import SampleResponse

Progress = bool | Callable[[int, int | None], object] | None
"""True for a bar on a terminal or in a notebook, a function that is called with the number of
finished items and the total (None if unknown), or None for nothing."""


class ProgressTeller:
    """Shows progress as a bar, or reports it to a function; used in a `with` block."""

    def __init__(self, progress: Progress, total: int | None) -> None:
        self._total = total
        self._done = 0
        self._tell = progress if callable(progress) else None
        self._bar: observe.Progress | None = None
        if progress and self._tell is None:
            self._bar = observe.Progress("samples", total, is_left=True)

    def one_more(self) -> None:
        """Count one more item as finished."""
        self._done += 1
        if self._tell is not None:
            self._tell(self._done, self._total)
        if self._bar is not None:
            self._bar.add(1)

    def __enter__(self) -> ProgressTeller:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.hide()


IN_FLIGHT = 1000
"""How many samples are in flight at once by default."""

OnError: TypeAlias = Literal["raise", "return"]
Outcome: TypeAlias = SampleResponse | Exception
Start: TypeAlias = Callable[[ModelInput], APIFuture[SampleResponse]]
Settled: TypeAlias = tuple[int, APIFuture[SampleResponse]]


class Window:
    """The samples in flight, and the prompts that are still to come."""

    def __init__(
        self,
        prompts: Iterable[ModelInput],
        start: Start,
        *,
        on_error: OnError,
        max_in_flight: int | None,
        timeout_s: float | None,
    ) -> None:
        if on_error not in ("raise", "return"):
            raise ValidationError(f"on_error must be 'raise' or 'return', not {on_error!r}")
        if max_in_flight is not None and max_in_flight < 1:
            raise ValidationError(f"max_in_flight must be 1 or more, not {max_in_flight}")
        self._prompts = enumerate(prompts)
        self._start = start
        self._on_error = on_error
        self._size = max_in_flight or IN_FLIGHT
        self._timeout_s = seconds(timeout_s, "sample_many")
        self._ends_at = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        self._under_way: dict[int, APIFuture[SampleResponse]] = {}
        self._is_exhausted = False
        self.total = len(prompts) if isinstance(prompts, Sized) else None

    def fill(self, on_settled: Callable[[Settled], object]) -> bool:
        """Start samples until the window is full; returns whether any is in flight."""
        while not self._is_exhausted and len(self._under_way) < self._size:
            try:
                index, prompt = next(self._prompts)
            except StopIteration:
                self._is_exhausted = True
                break
            future = self._start(prompt)
            self._under_way[index] = future
            future.when_settled(lambda future, index=index: on_settled((index, future)))  # type: ignore[misc]
        return bool(self._under_way)

    def take(self, settled: Settled) -> tuple[int, Outcome]:
        """The outcome of a settled sample; raises its error if `on_error` says so."""
        index, future = settled
        del self._under_way[index]
        try:
            return index, future.result()
        except Exception as error:  # returned or raised
            if self._on_error == "return":
                return index, error
            error.add_note(f"sample_many: prompt {index}")
            raise

    def left_s(self) -> float | None:
        """The time left for the next sample.

        Raises:
            APITimeoutError: There is none.
        """
        if self._ends_at is None:
            return None
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise self.late()
        return left_s

    def late(self) -> APITimeoutError:
        """The error for when the time is up."""
        return APITimeoutError(f"sample_many: not done within {self._timeout_s:g} s")

    def abandon(self) -> None:
        """Cancel the samples in flight."""
        under_way, self._under_way = list(self._under_way.values()), {}
        for future in under_way:
            future.cancel()

    def completed(self, progress: Progress) -> Generator[tuple[int, Outcome], None, None]:
        """The samples in the order in which they return, for threads."""
        arrivals: queue.SimpleQueue[Settled] = queue.SimpleQueue()
        try:
            with ProgressTeller(progress, self.total) as teller:
                while self.fill(arrivals.put):
                    try:
                        settled = arrivals.get(timeout=self.left_s())
                    except queue.Empty:
                        raise self.late() from None
                    outcome = self.take(settled)
                    teller.one_more()
                    yield outcome
        finally:
            self.abandon()

    async def completed_async(
        self, progress: Progress
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        """The samples in the order in which they return, for coroutines."""
        arrivals = _Arrivals(asyncio.get_running_loop())
        try:
            with ProgressTeller(progress, self.total) as teller:
                while self.fill(arrivals.put):
                    try:
                        async with asyncio.timeout(self.left_s()):
                            settled = await arrivals.get()
                    except TimeoutError:
                        raise self.late() from None
                    outcome = self.take(settled)
                    teller.one_more()
                    yield outcome
        finally:
            self.abandon()


class _Arrivals:
    """Passes settled samples from the background loop to the user's; a burst wakes it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._settled: collections.deque[Settled] = collections.deque()
        self._grown = asyncio.Event()
        self._is_woken = False

    def put(self, settled: Settled) -> None:
        # Append, then look at the flag; the loop clears the flag, then looks: nothing is missed.
        self._settled.append(settled)
        if not self._is_woken and not self._loop.is_closed():
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_woken = False
        self._grown.set()

    async def get(self) -> Settled:
        while not self._settled:
            self._grown.clear()
            await self._grown.wait()
        return self._settled.popleft()
