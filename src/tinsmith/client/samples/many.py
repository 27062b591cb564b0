"""Samples of many prompts, a window of them in flight at a time.

Prompts are taken from their iterable one by one as samples return, so that they need not all be in
memory. An error, a timeout, Ctrl-C or leaving the loop cancels the samples in flight.

`ManySamples` has the methods that users call; its subclass draws a single sample, and
`samples/window.py` keeps the window.
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
    from tinsmith.client.samples.window import OnError, Outcome, Progress, Window


class ManySamples(abc.ABC):
    """The methods of a sampling client for many prompts."""

    @abc.abstractmethod
    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        *args: Any,
        **options: Any,
    ) -> APIFuture[SampleResponse]:
        """Start one sample; returns immediately."""

    @abc.abstractmethod
    def _check_sample(
        self, num_samples: int, sampling_params: SamplingParams, options: dict[str, Any]
    ) -> None:
        """Raise `ValueError` or `TypeError` if the arguments are invalid for any prompt."""

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

        Prompts are taken from the iterable as samples return, so it may be a generator over more
        than fits into memory. Ctrl-C cancels the samples in flight.

        Args:
            prompts: The texts to continue.
            sampling_params: Temperature, stop sequences and the like.
            num_samples: How many sequences to draw for each prompt.
            on_error: `"raise"` cancels the rest at the first sample that fails and raises its
                error; `"return"` returns the error in place of the response.
            progress: True for a bar on the terminal's stderr, or a function that is called with the
                number of finished samples and the total (None if the iterable has no length).
            max_in_flight: How many samples may be in flight at once; 1,000 if None.
            timeout: Seconds for the whole call; then the samples in flight are cancelled.
            options: Further arguments of `sample`.

        Returns:
            A `SampleResponse` for each prompt, in order.

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
        """As `sample_many`, yielding each prompt's index and response as soon as it arrives.

        Leaving the loop, closing or dropping the generator cancels the samples in flight.
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
        from tinsmith.client.samples.window import Window  # most programs do not need it

        self._check_sample(num_samples, sampling_params, options)

        def start(prompt: ModelInput) -> APIFuture[SampleResponse]:
            return self.sample(prompt, num_samples, sampling_params, **options)

        return Window(
            prompts, start, on_error=on_error, max_in_flight=max_in_flight, timeout_s=timeout_s
        )


def _in_order(outcomes: dict[int, Outcome]) -> list[Outcome]:
    """The outcomes in the order of the prompts."""
    return [outcomes[index] for index in range(len(outcomes))]
