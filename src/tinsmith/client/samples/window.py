"""The samples under way of many prompts, and how they are waited for.

A window of them is under way at a time; `samples/many.py` is what users call.
"""

from __future__ import annotations

import asyncio
import collections
import queue
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sized
from typing import Literal, TypeAlias

from tinsmith.client.futures import APIFuture, seconds
from tinsmith.client.progress import Progress, ProgressTeller
from tinsmith.errors import APITimeoutError, ValidationError
from tinsmith.types.inputs import ModelInput
from tinsmith.types.sampling import SampleResponse

IN_FLIGHT = 1000
"""How many samples are under way at once, unless said otherwise."""

OnError: TypeAlias = Literal["raise", "return"]
Outcome: TypeAlias = SampleResponse | Exception
Start: TypeAlias = Callable[[ModelInput], APIFuture[SampleResponse]]
Settled: TypeAlias = tuple[int, APIFuture[SampleResponse]]


class Window:
    """The samples under way, and the prompts that are still to come."""

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
            raise ValidationError(f"on_error is 'raise' or 'return', not {on_error!r}")
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
        """Start samples until the window is full; returns whether any is under way."""
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
        """What became of a sample that is settled; raises its error if that is wanted."""
        index, future = settled
        del self._under_way[index]
        try:
            return index, future.result()
        except Exception as error:  # handed on whole
            if self._on_error == "return":
                return index, error
            error.add_note(f"sample_many: prompt {index}")
            raise

    def left_s(self) -> float | None:
        """How long the next sample may be waited for.

        Raises:
            APITimeoutError: No longer.
        """
        if self._ends_at is None:
            return None
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise self.late()
        return left_s

    def late(self) -> APITimeoutError:
        """For when the time is up."""
        return APITimeoutError(f"sample_many: not done within {self._timeout_s:g} s")

    def abandon(self) -> None:
        """Cancel what is under way."""
        under_way, self._under_way = list(self._under_way.values()), {}
        for future in under_way:
            future.cancel()

    def completed(self, progress: Progress) -> Generator[tuple[int, Outcome], None, None]:
        """The samples as they come back, for threads."""
        arrivals: queue.SimpleQueue[Settled] = queue.SimpleQueue()
        try:
            with ProgressTeller(progress, "samples", self.total) as teller:
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
        """The samples as they come back, for coroutines."""
        arrivals = _Arrivals(asyncio.get_running_loop())
        try:
            with ProgressTeller(progress, "samples", self.total) as teller:
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
    """What came back, from the background loop to one of the user's; a burst wakes it once."""

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
