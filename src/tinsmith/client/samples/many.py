"""Samples of thousands of prompts: a window of them is under way, the rest have not been looked at.

Prompts are taken from their iterable one by one as samples come back, so that they need not all be
in memory. Whatever ends the work early, an error, a timeout, Ctrl-C or a loop that is left, cancels
the samples that are under way.

`ManySamples` holds the methods that users call; how a sample is drawn is for its subclass.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import contextlib
import queue
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sized
from typing import Any, Literal, TypeAlias

from tinsmith.client.futures import APIFuture
from tinsmith.client.progress import Progress, ProgressTeller
from tinsmith.errors import APITimeoutError, ValidationError
from tinsmith.types.inputs import ModelInput
from tinsmith.types.sampling import SampleResponse, SamplingParams

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
        self._timeout_s = timeout_s
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s
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


def completed(window: Window, progress: Progress) -> Generator[tuple[int, Outcome], None, None]:
    """The samples of a window as they come back, for threads."""
    arrivals: queue.SimpleQueue[Settled] = queue.SimpleQueue()
    try:
        with ProgressTeller(progress, "samples", window.total) as teller:
            while window.fill(arrivals.put):
                try:
                    settled = arrivals.get(timeout=window.left_s())
                except queue.Empty:
                    raise window.late() from None
                outcome = window.take(settled)
                teller.one_more()
                yield outcome
    finally:
        window.abandon()


async def completed_async(
    window: Window, progress: Progress
) -> AsyncGenerator[tuple[int, Outcome], None]:
    """The samples of a window as they come back, for coroutines."""
    arrivals = _Arrivals(asyncio.get_running_loop())
    try:
        with ProgressTeller(progress, "samples", window.total) as teller:
            while window.fill(arrivals.put):
                try:
                    async with asyncio.timeout(window.left_s()):
                        settled = await arrivals.get()
                except TimeoutError:
                    raise window.late() from None
                outcome = window.take(settled)
                teller.one_more()
                yield outcome
    finally:
        window.abandon()


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


def in_order(outcomes: dict[int, Outcome]) -> list[Outcome]:
    """What came back, in the order of the prompts."""
    return [outcomes[index] for index in range(len(outcomes))]


class ManySamples(abc.ABC):
    """What a client for samples of single prompts offers for many of them."""

    @abc.abstractmethod
    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        *args: Any,
        **options: Any,
    ) -> APIFuture[SampleResponse]:
        """Start one sample; returns at once."""

    @abc.abstractmethod
    def _check_sample(
        self, num_samples: int, sampling_params: SamplingParams, options: dict[str, Any]
    ) -> None:
        """Raise `ValueError` or `TypeError` if no prompt could be sampled so."""

    def sample_many(
        self,
        prompts: Iterable[ModelInput],
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        on_error: OnError = "raise",
        progress: Progress = None,
        max_in_flight: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> list[Any]:
        """Draw samples of many prompts, a window of them at a time, and wait for them all.

        Prompts are taken from the iterable as samples come back, so it may be a generator over more
        than fits into memory. Ctrl-C cancels what is under way.

        Args:
            prompts: What to continue, one after another.
            sampling_params: How to draw.
            num_samples: How many sequences to draw for each prompt.
            on_error: `"raise"` cancels the rest at the first sample that fails and raises its
                error; `"return"` puts the error where the answer would have been.
            progress: True for a bar on the terminal's stderr, or a function that is called with how
                many are done and how many there are (None if the iterable does not say).
            max_in_flight: How many samples may be under way at once; 1,000 if None.
            timeout: Seconds for all of it; then what is under way is cancelled.
            options: The others of `sample`.

        Returns:
            A `SampleResponse` for each prompt, in their order.

        Raises:
            APITimeoutError: The time was up.
        """
        window = self._window(
            prompts, sampling_params, num_samples, on_error, max_in_flight, timeout, options
        )
        return in_order(dict(completed(window, progress)))

    async def sample_many_async(
        self,
        prompts: Iterable[ModelInput],
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        on_error: OnError = "raise",
        progress: Progress = None,
        max_in_flight: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> list[Any]:
        """As `sample_many`, without blocking the event loop."""
        window = self._window(
            prompts, sampling_params, num_samples, on_error, max_in_flight, timeout, options
        )
        async with contextlib.aclosing(completed_async(window, progress)) as outcomes:
            return in_order({index: outcome async for index, outcome in outcomes})

    def sample_as_completed(
        self,
        prompts: Iterable[ModelInput],
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        on_error: OnError = "raise",
        progress: Progress = None,
        max_in_flight: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Generator[tuple[int, Any], None, None]:
        """As `sample_many`, giving out each prompt's index and answer as soon as it is there.

        Leaving the loop and closing or dropping the generator cancels what is under way.
        """
        window = self._window(
            prompts, sampling_params, num_samples, on_error, max_in_flight, timeout, options
        )
        return completed(window, progress)

    def sample_as_completed_async(
        self,
        prompts: Iterable[ModelInput],
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        on_error: OnError = "raise",
        progress: Progress = None,
        max_in_flight: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncGenerator[tuple[int, Any], None]:
        """As `sample_as_completed`, for `async for`; not to be awaited itself."""
        window = self._window(
            prompts, sampling_params, num_samples, on_error, max_in_flight, timeout, options
        )
        return completed_async(window, progress)

    def _window(
        self,
        prompts: Iterable[ModelInput],
        sampling_params: SamplingParams,
        num_samples: int,
        on_error: OnError,
        max_in_flight: int | None,
        timeout_s: float | None,
        options: dict[str, Any],
    ) -> Window:
        self._check_sample(num_samples, sampling_params, options)

        def start(prompt: ModelInput) -> APIFuture[SampleResponse]:
            return self.sample(prompt, num_samples, sampling_params, **options)

        return Window(
            prompts, start, on_error=on_error, max_in_flight=max_in_flight, timeout_s=timeout_s
        )
