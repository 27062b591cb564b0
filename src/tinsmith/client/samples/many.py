"""Samples of thousands of prompts: a window of them is under way, the rest have not been looked at.

Prompts are taken from their iterable one by one as samples come back, so that they need not all be
in memory. Whatever ends the work early, an error, a timeout, Ctrl-C or a loop that is left, cancels
the samples that are under way.

`ManySamples` holds the methods that users call; how a sample is drawn is for its subclass, and what
is under way in `samples/window.py`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import AsyncGenerator, Generator, Iterable
from typing import TYPE_CHECKING, Any

from tinsmith.client.futures import APIFuture
from tinsmith.types.inputs import ModelInput
from tinsmith.types.sampling import SampleResponse, SamplingParams

if TYPE_CHECKING:
    from tinsmith.client.progress import Progress
    from tinsmith.client.samples.window import OnError, Outcome, Window


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
        return _in_order(dict(window.completed(progress)))

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
        async with contextlib.aclosing(window.completed_async(progress)) as outcomes:
            return _in_order({index: outcome async for index, outcome in outcomes})

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
        return window.completed(progress)

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
        return window.completed_async(progress)

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
        from tinsmith.client.samples.window import Window  # most programs never ask for many

        self._check_sample(num_samples, sampling_params, options)

        def start(prompt: ModelInput) -> APIFuture[SampleResponse]:
            return self.sample(prompt, num_samples, sampling_params, **options)

        return Window(
            prompts, start, on_error=on_error, max_in_flight=max_in_flight, timeout_s=timeout_s
        )


def _in_order(outcomes: dict[int, Outcome]) -> list[Outcome]:
    """What came back, in the order of the prompts."""
    return [outcomes[index] for index in range(len(outcomes))]
