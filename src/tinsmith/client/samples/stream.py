"""The iterators over the tokens of one streamed sample.

Each step asks the `StreamReader` for new events, so that a slow consumer slows the connection down
and memory stays bounded. Leaving a stream before its end cancels the sample.
"""

from __future__ import annotations

import collections
import time
import weakref
from typing import Any, Self

from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture, seconds
from tinsmith.client.samples.stream_reader import SampleEvent, StreamReader
from tinsmith.errors import APITimeoutError
from tinsmith.types.sampling import SampleResponse


class _Steps:
    """The steps of one stream, from any thread or loop; does not refer to the user's iterator."""

    def __init__(self, reader: StreamReader, what: str, timeout_s: float | None) -> None:
        self._reader = reader
        self._what = what
        self._timeout_s = seconds(timeout_s, what)
        self._ends_at = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        self._waiting: collections.deque[SampleEvent] = collections.deque()
        self._step: APIFuture[Any] | None = None
        self.response: SampleResponse | None = None
        self.is_over = False

    def ready(self) -> SampleEvent | None:
        """The next event, if it has arrived."""
        return self._waiting.popleft() if self._waiting else None

    def start(self) -> APIFuture[list[SampleEvent]]:
        """Ask for more."""
        left_s = None if self._ends_at is None else self._ends_at - time.monotonic()
        if left_s is not None and left_s <= 0:
            self.abandon()
            raise APITimeoutError(f"{self._what}: not done within {self._timeout_s:g} s")
        step = background().start(self._reader.read(), self._what, left_s)
        self._step = step
        return step

    def take(self, events: list[SampleEvent]) -> SampleEvent:
        """Store new events, and return the first of them."""
        self._waiting.extend(events)
        if events[-1].response is not None:
            self.response = events[-1].response
            self.is_over = True
        return self._waiting.popleft()

    def abandon(self) -> None:
        """Cancel the rest of the stream."""
        self._waiting.clear()
        if self.is_over:
            return
        self.is_over = True
        if self._reader.is_inherited():
            return  # in a forked child: the connection is the parent's, which still reads
        if self._step is not None:
            self._step.cancel()
        _ = background().start(self._reader.close(), self._what)


class SampleStream:
    """The events of a sample, for `for` loops; see `SamplingClient.sample_stream`.

    Leaving the loop early, closing the stream or dropping it cancels the sample. In a `with` block
    it is closed at the end.
    """

    def __init__(self, reader: StreamReader, what: str, timeout_s: float | None) -> None:
        self._steps = _Steps(reader, what, timeout_s)
        weakref.finalize(self, self._steps.abandon).atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SampleEvent:
        steps = self._steps
        event = steps.ready()
        if event is not None:
            return event
        if steps.is_over:
            raise StopIteration
        try:
            return steps.take(steps.start().result())
        except BaseException:
            steps.abandon()
            raise

    def result(self) -> SampleResponse:
        """The whole response; reads the stream to its end.

        Raises:
            RuntimeError: The stream was closed before its end.
        """
        for _ in self:
            pass
        return _whole(self._steps)

    def close(self) -> None:
        """Cancel the rest of the sample, here and on the server; no effect after its end."""
        self._steps.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncSampleStream:
    """The events of a sample, for `async for` loops; otherwise as `SampleStream`."""

    def __init__(self, reader: StreamReader, what: str, timeout_s: float | None) -> None:
        self._steps = _Steps(reader, what, timeout_s)
        weakref.finalize(self, self._steps.abandon).atexit = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SampleEvent:
        steps = self._steps
        event = steps.ready()
        if event is not None:
            return event
        if steps.is_over:
            raise StopAsyncIteration
        try:
            return steps.take(await steps.start())
        except BaseException:
            steps.abandon()
            raise

    async def result(self) -> SampleResponse:
        """The whole response; reads the stream to its end.

        Raises:
            RuntimeError: The stream was closed before its end.
        """
        async for _ in self:
            pass
        return _whole(self._steps)

    async def aclose(self) -> None:
        """As `SampleStream.close`."""
        self._steps.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _whole(steps: _Steps) -> SampleResponse:
    if steps.response is None:
        raise RuntimeError("the stream was closed before its end: there is no result")
    return steps.response
