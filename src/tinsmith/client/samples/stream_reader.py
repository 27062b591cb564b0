"""Reads the events of one streamed sample, over as many connections as it takes.

`StreamReader` runs on the background loop: it submits the sample, reads its events, and resumes
after a lost connection where it was, so that no token is lost or repeated. `samples/stream.py` has
the classes that users iterate over.

If the service does not stream, the reader waits for the whole sample and returns it at its end.
`docs/extensions.md` describes the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tinsmith.client.lease import SessionLease
from tinsmith.client.poller import Poll
from tinsmith.client.retry import may_pass
from tinsmith.client.samples.sample_call import lack_of
from tinsmith.client.samples.sampler import Sampler
from tinsmith.client.waits import in_words, say
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    DecodeError,
    RateLimitError,
    TinkerError,
)
from tinsmith.types import extensions as x
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import SampleResponse, StopReason
from tinsmith.wire import json_format, packed_format, proto_samples
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import packed_request, to_http
from tinsmith.wire.failures import error_from_failed
from tinsmith.wire.sse import EventDecoder, ServerSentEvent

_log = logging.getLogger(__name__)

IDLE_S = 45.0
"""A stream without data for so long counts as lost; services send comments in between."""
GONE = 410
NOT_OFFERED = (404, 405)
PERHAPS_THE_FORM = (400, 415, 422)
MOST_RESUBMISSIONS = 3


class SampleEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream: new tokens of one sequence, or at the end the whole response."""

    index: int = 0
    """The sequence that the tokens belong to."""
    tokens: list[int] = []
    """The new tokens only."""
    logprobs: list[float] | None = None
    """One per token, if the service sends them."""
    stop_reason: StopReason | None = None
    """Why the sequence ended, with its last tokens."""
    response: SampleResponse | None = None
    """The whole response, only in the last event of the stream."""


class StreamReader:
    """Reads the events of one sample. For the background loop; one call at a time."""

    def __init__(self, sampler: Sampler, lease: SessionLease, request: SampleRequest) -> None:
        self._session = sampler.session
        self._sampler = sampler
        self._lease = lease
        self._request = request
        self._counts = [0] * request.num_samples
        self._ended: set[int] = set()
        self._opened: x.StreamOpened | None = None
        self._connection: contextlib.AsyncExitStack | None = None
        self._pieces: AsyncIterator[bytes] | None = None
        self._decoder = EventDecoder()
        self._asked_at = 0.0
        self._failing_since: float | None = None
        self._failures = 0
        self._sent_at = 0.0
        self._refused_since: float | None = None
        self._refusals = 0
        self._resubmissions = 0
        self._is_sent = False
        self._takes_packed = True
        self._is_over = False
        self._use = asyncio.Lock()  # a cancelled read ends before `close` starts
        self._error: TinkerError | None = None

    async def read(self) -> list[SampleEvent]:
        """Wait for new events; the last one of a stream has a `response`.

        Raises:
            RequestFailedError: The service could not draw the sample.
            APIError: The stream cannot be resumed.
        """
        async with self._use:
            try:
                self._session.check_open()
                await self._session.session_id()  # flags are known from here on
                while True:
                    events = await self._read_once()
                    if events:
                        return events
            except BaseException:
                await self._close()
                raise

    def is_inherited(self) -> bool:
        """Whether it belongs to the parent of this forked process."""
        return self._session.is_inherited()

    async def close(self) -> None:
        """Close the connection, and cancel a sample that has not ended."""
        async with self._use:
            await self._close()

    async def _close(self) -> None:
        was_over, self._is_over = self._is_over, True
        try:
            await self._disconnect()
        finally:
            if not was_over and self._opened is not None:
                self._sampler.dismiss(self._opened.request_id)
                self._sampler.cancel_on_server(self._opened.request_id, is_offered=True)
            elif not was_over and self._is_sent:
                self._session.spawn(self._cancel_unopened())

    async def _cancel_unopened(self) -> None:
        """Cancel a sample that may have been accepted, but whose id has not arrived yet.

        Submitting it again returns its id, and does not draw it twice.
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
            self._after_429(error)
        except APIError as error:
            await self._disconnect()
            status = error.status_code if isinstance(error, APIStatusError) else None
            if status in NOT_OFFERED:
                return await self._read_unoffered(error)
            if isinstance(error, APIStatusError) and status == GONE:
                self._resubmit(error)
            elif status in PERHAPS_THE_FORM and self._is_packed:
                self._takes_packed = False  # as text it is accepted, or refused with its own error
            else:
                await self._after_loss(error)
        return []

    # Without streaming

    async def _read_whole(self) -> list[SampleEvent]:
        """Draw the whole sample, and return it as the events of a stream."""
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
        """The service was replaced by one that does not stream; or there is no such sampler."""
        if any(self._counts):
            raise error
        return await self._read_whole()

    # The connection

    async def _connect(self) -> None:
        if self._request.seq_id is None:
            number = await self._sampler.next_seq_id()
            self._request = self._request.model_copy(update={"seq_id": number})
        with self._session.work.under_way():
            late_s = self._sampler.refusals.late_s(self._refusals)
            await self._session.limiter.wait(late_s=late_s)
        endpoint = ENDPOINTS["asample_stream"]
        headers = {"Accept": "text/event-stream"}
        if any(self._counts):
            headers["Last-Event-ID"] = ".".join(map(str, self._counts))
        self._decoder = EventDecoder()
        self._is_sent = True
        self._sent_at = time.monotonic()
        if self._is_packed:
            sent = packed_request(endpoint, packed_format.encode(self._request))
        else:
            sent = to_http(endpoint, self._request)
        connection = contextlib.AsyncExitStack()
        self._pieces = await connection.enter_async_context(
            self._session.stream(endpoint, sent, headers=headers, idle_s=IDLE_S)
        )
        self._connection = connection
        self._refused_since, self._refusals = None, 0
        if self._session.limiter.refusals:
            self._session.limiter.sample_taken()

    @property
    def _is_packed(self) -> bool:
        """Whether token ids are sent as memory."""
        return self._session.flags.tinsmith_packed_prompts and self._takes_packed

    async def _disconnect(self) -> None:
        connection, self._connection, self._pieces = self._connection, None, None
        if connection is not None:
            await connection.aclose()

    def _resubmit(self, error: APIStatusError) -> None:
        """The service lost the sample: draw another, unless tokens of it were returned."""
        self._resubmissions += 1
        if any(self._counts) or self._resubmissions > MOST_RESUBMISSIONS:
            raise error
        self._request = self._request.model_copy(update={"seq_id": None})
        self._opened = None

    async def _after_loss(self, error: APIError) -> None:
        """Wait before reconnecting, or raise if that will not help."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        failing_s = now - self._failing_since
        budget = self._sampler.retrier.budget
        delay_s = budget.next_delay_s(error, self._failures, failing_s) if may_pass(error) else None
        self._failures += 1
        if delay_s is None:
            error.add_note(
                f"stream of {self._name()}: gave up after {self._failures} attempt(s) "
                f"and {failing_s:.1f} s"
            )
            raise error
        _log.debug("stream of %s: %s; resuming in %.1f s", self._name(), error, delay_s)
        await asyncio.sleep(delay_s)

    def _after_429(self, error: RateLimitError) -> None:
        """Pause all samples of the key, or raise if that has not helped for too long."""
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
        self._refusals += 1
        refusals = self._sampler.refusals
        refusals.pause(error, self._request.prompt, self._sent_at)
        refused_s = now - self._refused_since
        if refusals.is_hopeless(refused_s):
            refusals.tell_effort(error, self._refusals, refused_s)
            raise error

    def _name(self) -> str:
        return self._opened.request_id if self._opened else f"sample {self._request.seq_id}"

    # Events

    async def _read_piece(self) -> list[SampleEvent]:
        assert self._pieces is not None
        self._asked_at = time.monotonic()
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
        """Raise the error that came after events that were returned first."""
        error, self._error = self._error, None
        if isinstance(error, DecodeError):
            raise APIResponseValidationError(
                message=f"the stream of {self._name()} cannot be read: {error}"
            ) from error
        if error is not None:
            raise error

    async def _take(self, event: ServerSentEvent) -> SampleEvent | None:
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
        return None  # a newer service may send others

    def _take_tokens(self, tokens: x.StreamedTokens) -> SampleEvent | None:
        if not 0 <= tokens.index < len(self._counts) or tokens.offset < 0:
            raise DecodeError(f"invalid position: sequence {tokens.index}, offset {tokens.offset}")
        if tokens.logprobs is not None and len(tokens.logprobs) != len(tokens.tokens):
            raise DecodeError(f"{len(tokens.logprobs)} logprobs for {len(tokens.tokens)} tokens")
        known = self._counts[tokens.index] - tokens.offset
        if known < 0:
            raise APIConnectionError(f"the stream of {self._name()} skipped tokens")
        self._session.limiter.queue_active(self._asked_at)
        new = tokens.tokens[known:]
        if not new and (tokens.tokens or tokens.index in self._ended):
            return None
        if tokens.stop_reason is not None:
            self._ended.add(tokens.index)
        self._counts[tokens.index] += len(new)
        return SampleEvent(
            index=tokens.index,
            tokens=new,
            logprobs=None if tokens.logprobs is None else tokens.logprobs[known:],
            stop_reason=tokens.stop_reason,
        )

    def _take_queue_state(self, event: x.StreamedQueueState) -> None:
        limiter = self._session.limiter
        reason = event.queue_state_reason or ""
        say(in_words(event.queue_state, reason))
        if event.queue_state in ("paused_capacity", "paused_rate_limit"):
            asked_s = self._sampler.retrier.budget.asked_s(event.retry_after_ms)
            limiter.queue_paused(asked_s, reason)
        elif event.queue_state == "active":
            limiter.queue_active(self._asked_at)

    async def _take_result(self, event: x.StreamedResult) -> SampleEvent:
        opened = self._opened
        if opened is None:
            raise DecodeError("a result came before the sample's id")
        if event.payload is None:
            response: SampleResponse = await Poll(
                self._session, opened.request_id, "Sample", retrier=self._sampler.retrier
            ).result()
        else:
            response = proto_samples.decode_sample_response(event.payload)
        self._is_over = True
        await self._disconnect()
        self._sampler.report_retrieved(opened.request_id)
        self._sampler.dismiss(opened.request_id)
        lack = lack_of(self._request, response, opened.request_id)
        if lack is not None:
            raise lack
        return SampleEvent(response=response.with_sequence_ids(opened.sample_sequence_ids))
