"""Tokens of one sample as they are drawn.

`StreamReader` lives on the background loop: it submits the sample, reads its events, and goes on
after a lost connection where it was, so that no token is lost and none comes twice. `SampleStream`
and `AsyncSampleStream` are what users iterate over; each step asks the reader for what has come,
so that a slow user holds up the connection and memory stays bounded.

Where the service offers no streaming the whole sample is waited for and given out at its end.
`docs/extensions.md` says what travels.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import msgspec

from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture
from tinsmith.client.poller import Poll
from tinsmith.client.retry import may_pass
from tinsmith.client.sampler import Sampler
from tinsmith.client.session import SessionLease
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    DecodeError,
    RateLimitError,
    TinkerError,
)
from tinsmith.types import extensions as x
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import SampleResponse, StopReason
from tinsmith.wire import json_format, proto_format
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import to_http
from tinsmith.wire.failures import error_from_failed
from tinsmith.wire.sse import Event, EventDecoder

_log = logging.getLogger(__name__)

IDLE_S = 45.0
"""A stream that is silent for so long is taken for lost; services send comments in between."""
GONE = 410
NOT_OFFERED = (404, 405)
MOST_RESUBMISSIONS = 3


class SampleEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What is new in a stream: tokens of one sequence, or at its end the whole answer."""

    index: int = 0
    """Which of the sequences the tokens belong to."""
    tokens: list[int] = []
    """The new ones alone."""
    logprobs: list[float] | None = None
    """One for each of the tokens, if the service sends them."""
    stop_reason: StopReason | None = None
    """Why the sequence ended, with its last tokens."""
    response: SampleResponse | None = None
    """The whole answer, in the last event of the stream alone."""


class StreamReader:
    """Reads the events of one sample. For the background loop; one call at a time."""

    def __init__(
        self,
        sampler: Sampler,
        lease: SessionLease,
        request: SampleRequest,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._session = sampler.session
        self._sampler = sampler
        self._lease = lease
        self._request = request
        self._clock = clock
        self._sleep = sleep
        self._counts = [0] * request.num_samples
        self._opened: x.StreamOpened | None = None
        self._connection: contextlib.AsyncExitStack | None = None
        self._pieces: AsyncIterator[bytes] | None = None
        self._decoder = EventDecoder()
        self._asked_at = 0.0
        self._failing_since: float | None = None
        self._failures = 0
        self._resubmissions = 0
        self._is_sent = False
        self._is_over = False
        self._use = asyncio.Lock()  # a read that is being cancelled ends before the closing begins
        self._error: TinkerError | None = None

    async def read(self) -> list[SampleEvent]:
        """What has come since the last call, as soon as there is something; the end has a response.

        Raises:
            RequestFailedError: The service could not draw the sample.
            APIError: The stream cannot be gone on with.
        """
        async with self._use:
            try:
                await self._session.session_id()  # flags are known from here on
                while True:
                    events = await self._read_once()
                    if events:
                        return events
            except BaseException:
                await self._close()
                raise

    async def close(self) -> None:
        """Let go of the connection; a sample that is not at its end is cancelled."""
        async with self._use:
            await self._close()

    async def _close(self) -> None:
        was_over, self._is_over = self._is_over, True
        try:
            await self._disconnect()
        finally:
            if not was_over and self._opened is not None:
                self._sampler.cancel_on_server(self._opened.request_id, is_offered=True)
            elif not was_over and self._is_sent:
                self._session.spawn(self._cancel_unopened())

    async def _cancel_unopened(self) -> None:
        """Cancel a sample that may have arrived, and whose name has not come back yet.

        Submitting it again tells the name, and does not draw it twice.
        """
        endpoint = ENDPOINTS["asample"]
        try:
            sent = to_http(endpoint, self._request)
            known: UntypedAPIFuture = await self._session.call_with(endpoint, sent)
        except TinkerError as error:
            _log.debug("%s could not be cancelled: %s", self._name(), error)
        else:
            self._sampler.cancel_on_server(known.request_id, is_offered=True)

    async def _read_once(self) -> list[SampleEvent]:
        if not self._session.flags.tinsmith_stream:
            return await self._read_whole()
        try:
            self._raise_kept()
            if self._pieces is None:
                await self._connect()
            return await self._read_piece()
        except RateLimitError as error:
            self._sampler.pause_after(error, self._request.prompt)
        except APIError as error:
            await self._disconnect()
            if isinstance(error, APIStatusError) and error.status_code in NOT_OFFERED:
                return await self._read_unoffered(error)
            if isinstance(error, APIStatusError) and error.status_code == GONE:
                self._begin_anew(error)
            else:
                await self._after_loss(error)
        return []

    # Without streaming

    async def _read_whole(self) -> list[SampleEvent]:
        """The whole sample, in the events that a stream would have brought it in."""
        response = await self._sampler.start(self._request, self._lease)
        self._is_over = True
        events = [
            SampleEvent(
                index=index,
                tokens=sequence.tokens,
                logprobs=sequence.logprobs,
                stop_reason=sequence.stop_reason,
            )
            for index, sequence in enumerate(response.sequences)
        ]
        return [*events, SampleEvent(response=response)]

    async def _read_unoffered(self, error: APIError) -> list[SampleEvent]:
        """The service was replaced by one that does not stream; or the sampler is not there."""
        if any(self._counts):
            raise error
        return await self._read_whole()

    # The connection

    async def _connect(self) -> None:
        if self._request.seq_id is None:
            number = await self._sampler.next_seq_id()
            self._request = self._request.model_copy(update={"seq_id": number})
        with self._session.work.under_way():
            await self._session.limiter.wait()
        endpoint = ENDPOINTS["asample_stream"]
        headers = {"Accept": "text/event-stream"}
        if any(self._counts):
            headers["Last-Event-ID"] = ".".join(map(str, self._counts))
        self._decoder = EventDecoder()
        self._is_sent = True
        connection = contextlib.AsyncExitStack()
        self._pieces = await connection.enter_async_context(
            self._session.stream(
                endpoint, to_http(endpoint, self._request), headers=headers, idle_s=IDLE_S
            )
        )
        self._connection = connection

    async def _disconnect(self) -> None:
        connection, self._connection, self._pieces = self._connection, None, None
        if connection is not None:
            await connection.aclose()

    def _begin_anew(self, error: APIStatusError) -> None:
        """The service lost the sample: draw another, unless tokens of it were given out."""
        self._resubmissions += 1
        if any(self._counts) or self._resubmissions > MOST_RESUBMISSIONS:
            raise error
        self._request = self._request.model_copy(update={"seq_id": None})
        self._opened = None

    async def _after_loss(self, error: APIError) -> None:
        """Wait before connecting again, or raise if that will not help."""
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        budget = self._session.retrier.budget
        asked_s = getattr(error, "retry_after_s", None)
        delay_s = budget.delay_s(self._failures) if asked_s is None else asked_s
        if not may_pass(error) or now - self._failing_since + delay_s > budget.total_s:
            raise error
        self._failures += 1
        _log.debug("stream of %s: %s; going on in %.1f s", self._name(), error, delay_s)
        await self._sleep(delay_s)

    def _name(self) -> str:
        return self._opened.request_id if self._opened else f"sample {self._request.seq_id}"

    # Events

    async def _read_piece(self) -> list[SampleEvent]:
        assert self._pieces is not None
        self._asked_at = self._clock()
        piece = await anext(self._pieces, b"")
        if not piece:
            raise APIConnectionError(f"the stream of {self._name()} broke off")
        events: list[SampleEvent] = []
        try:
            for event in self._decoder.feed(piece):
                made = await self._take(event)
                if made is not None:
                    events.append(made)
                    self._failing_since, self._failures = None, 0
        except TinkerError as error:
            self._error = error
            if not events:
                self._raise_kept()
        return events

    def _raise_kept(self) -> None:
        """Raise what went wrong after the events that were given out before it."""
        error, self._error = self._error, None
        if isinstance(error, DecodeError):
            raise APIResponseValidationError(
                message=f"the stream of {self._name()} cannot be read: {error}"
            ) from error
        if error is not None:
            raise error

    async def _take(self, event: Event) -> SampleEvent | None:
        if event.event == "tokens":
            return self._take_tokens(json_format.decode(event.data, x.StreamedTokens))
        if event.event == "open":
            self._opened = json_format.decode(event.data, x.StreamOpened)
        elif event.event == "queue":
            self._take_queue_state(json_format.decode(event.data, x.StreamedQueueState))
        elif event.event == "result":
            return await self._take_result(json_format.decode(event.data, x.StreamedResult))
        elif event.event == "failed":
            self._is_over = True
            raise error_from_failed(json_format.decode(event.data, dict[str, Any]), self._name())
        return None  # others may come with a newer service

    def _take_tokens(self, told: x.StreamedTokens) -> SampleEvent | None:
        if not 0 <= told.index < len(self._counts) or told.offset < 0:
            raise DecodeError(f"it holds tokens of sequence {told.index} at {told.offset}")
        if told.logprobs is not None and len(told.logprobs) != len(told.tokens):
            raise DecodeError(f"{len(told.logprobs)} logprobs for {len(told.tokens)} tokens")
        known = self._counts[told.index] - told.offset
        if known < 0:
            raise APIConnectionError(f"the stream of {self._name()} left tokens out")
        self._session.limiter.queue_active(self._asked_at)
        tokens = told.tokens[known:]
        if not tokens and told.tokens:
            return None
        self._counts[told.index] += len(tokens)
        return SampleEvent(
            index=told.index,
            tokens=tokens,
            logprobs=None if told.logprobs is None else told.logprobs[known:],
            stop_reason=told.stop_reason,
        )

    def _take_queue_state(self, told: x.StreamedQueueState) -> None:
        limiter = self._session.limiter
        if told.queue_state in ("paused_capacity", "paused_rate_limit"):
            delay_s = None if told.retry_after_ms is None else told.retry_after_ms / 1000
            limiter.queue_paused(delay_s, told.queue_state_reason or "")
        elif told.queue_state == "active":
            limiter.queue_active(self._asked_at)

    async def _take_result(self, told: x.StreamedResult) -> SampleEvent:
        opened = self._opened
        if opened is None:
            raise DecodeError("a result came before the sample's name")
        if told.payload is None:
            response: SampleResponse = await Poll(
                self._session, opened.request_id, "Sample"
            ).result()
        else:
            response = proto_format.decode_sample_response(told.payload)
        self._is_over = True
        await self._disconnect()
        self._sampler.report_retrieved(opened.request_id)
        return SampleEvent(response=response.with_sequence_ids(opened.sample_sequence_ids))


# What users hold


class _Steps:
    """The steps of one stream, asked for from any thread or loop; refers to no user's object."""

    def __init__(self, reader: StreamReader, what: str, timeout_s: float | None) -> None:
        self._reader = reader
        self._what = what
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._waiting: collections.deque[SampleEvent] = collections.deque()
        self._step: APIFuture[Any] | None = None
        self.response: SampleResponse | None = None
        self.is_over = False

    def ready(self) -> SampleEvent | None:
        """The next event, if it is here."""
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
        """Keep what came, and give out the first of it."""
        self._waiting.extend(events)
        if events[-1].response is not None:
            self.response = events[-1].response
            self.is_over = True
        return self._waiting.popleft()

    def abandon(self) -> None:
        """Nobody wants the rest."""
        self._waiting.clear()
        if self.is_over:
            return
        self.is_over = True
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
        """The whole answer; reads the stream to its end.

        Raises:
            RuntimeError: The stream was closed before its end.
        """
        for _ in self:
            pass
        return _whole(self._steps)

    def close(self) -> None:
        """Give the rest up, here and on the server; nothing happens at the stream's end."""
        self._steps.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """The whole answer; reads the stream to its end.

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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


def _whole(steps: _Steps) -> SampleResponse:
    if steps.response is None:
        raise RuntimeError("the stream was closed before its end, and so has no result")
    return steps.response
