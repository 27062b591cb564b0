"""Tinsmith's extensions of the protocol, for tests that switch them on by their flags.

A flag that is not set makes its route a 404, as it is on any other service. Samples that come by
these routes are samples like all others: rules for `asample` strike each of them, also inside of
a batch, where a rule's `status` refuses that item alone.

`docs/extensions.md` is the contract.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from tinsmith.errors import (
    APIStatusError,
    BadRequestError,
    BodyTooLargeError,
    NotFoundError,
    TinkerError,
)
from tinsmith.testing.commands import Command, Commands
from tinsmith.testing.faults import ExchangeFault, Faults, StreamFault
from tinsmith.testing.http_server import StreamedReply
from tinsmith.testing.received import ReceivedRequest
from tinsmith.testing.sampling import Samplers
from tinsmith.testing.settings import ServiceSettings
from tinsmith.types import extensions as x
from tinsmith.types.futures import FutureCompletion, FutureFailed, RequestFailedResponse
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import SampleResponse
from tinsmith.wire import json_format
from tinsmith.wire.content import is_packed
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import request_from_fields
from tinsmith.wire.failures import status_of
from tinsmith.wire.retry_after import retry_after_s
from tinsmith.wire.sse import Event, encode_comment, encode_event

KEEP_ALIVE_S = 15.0
MOST_LINGER_S = 0.1


class Extensions:
    """Answers the routes below `/tinsmith/`."""

    def __init__(
        self,
        settings: ServiceSettings,
        flags: dict[str, Any],
        commands: Commands,
        samplers: Samplers,
        faults: Faults,
    ) -> None:
        self._settings = settings
        self._flags = flags
        self._commands = commands
        self._samplers = samplers
        self._faults = faults

    def handlers(self) -> dict[str, Callable[[ReceivedRequest], Any]]:
        """What answers each endpoint."""
        return {
            "asample_many": self.sample_many,
            "retrieve_results": self.retrieve,
            "fetch_results": self.fetch,
            "asample_stream": self.stream,
        }

    def check_form(self, content_type: str | None) -> None:
        """Refuse a packed body with 415 where none was offered."""
        if is_packed(content_type) and not self._flags.get("tinsmith_packed_prompts"):
            raise APIStatusError("this service takes no packed bodies", status_code=415)

    # Many samples in one request

    def sample_many(self, received: ReceivedRequest) -> x.SampleManyResponse:
        """Accept each sample or refuse it, whatever becomes of the others."""
        flags = self._offered("tinsmith_batch_items")
        samples = received.request.samples
        if not samples:
            raise BadRequestError("there are no samples in this request")
        if len(samples) > flags.tinsmith_batch_items:
            raise BodyTooLargeError(
                f"{len(samples)} samples in one request; {flags.tinsmith_batch_items} may be"
            )
        if received.body_bytes > flags.tinsmith_batch_bytes:
            raise BodyTooLargeError(
                f"a body of {received.body_bytes} bytes; {flags.tinsmith_batch_bytes} may be"
            )
        return x.SampleManyResponse(items=[self._item(received, fields) for fields in samples])

    def _item(self, received: ReceivedRequest, fields: dict[str, Any]) -> x.SampleManyItem:
        try:
            request = request_from_fields(ENDPOINTS["asample"], fields)
            item = _as_sample(received, request)
            fault = self._faults.of_exchange(item)
            if fault is not None and fault.status is not None:
                return _refused_item(fault)
            accepted = self._samplers.sample(item)
        except TinkerError as exc:
            delay_s = getattr(exc, "retry_after_s", None)
            return x.SampleManyItem(
                status=status_of(exc),
                detail=str(exc),
                retry_after_ms=None if delay_s is None else delay_s * 1000,
            )
        return x.SampleManyItem(
            request_id=accepted.request_id, sample_sequence_ids=accepted.sample_sequence_ids
        )

    # Results in the poll, and many at once

    async def retrieve(self, received: ReceivedRequest) -> x.ResultsRetrieveResponse:
        """Which samples ended, as soon as one has, with what they gave where that is small."""
        inline_bytes = self._offered("tinsmith_inline_bytes").tinsmith_inline_bytes
        request: x.ResultsRetrieveRequest = received.request
        if len(request.retrieved_request_ids) > x.MOST_REPORTED:
            raise BodyTooLargeError(f"at most {x.MOST_REPORTED} results are reported at once")
        target = request.target
        self._samplers.check_known(target.sampling_session_id)
        self._commands.forget(request.retrieved_request_ids)
        feed = self._commands.feed(target.sampling_session_id, target.cloned_sampler_id)
        timeout_s = self._settings.long_poll_s
        if request.timeout is not None:
            timeout_s = min(timeout_s, request.timeout)
        found = await feed.wait_after(request.prev_cursor, timeout_s, wants_pauses=True)
        if found and request.linger_ms > 0:
            await asyncio.sleep(min(request.linger_ms / 1000, MOST_LINGER_S))
            found = await feed.wait_after(request.prev_cursor, 0.0)
        pause = feed.tell_pause()
        if pause is not None:
            pause.note_poll()
        completions, cursor = self._carried(
            found,
            request.prev_cursor,
            min(request.inline_bytes, inline_bytes),
            request.answer_bytes,
        )
        return x.ResultsRetrieveResponse(
            completions=completions,
            cursor=cursor,
            queue_state="active" if pause is None else pause.queue_state,
            queue_state_reason=None if pause is None else pause.reason,
            retry_after_ms=None if pause is None else pause.retry_after_ms,
        )

    def _carried(
        self, found: dict[int, FutureCompletion], cursor: int, inline_bytes: int, answer_bytes: int
    ) -> tuple[list[x.ResultCompletion], int]:
        """The completions with small results, as many as fit, and the cursor of the last."""
        completions: list[x.ResultCompletion] = []
        for number, entry in found.items():
            command = self._commands.known(entry.request_id)
            completion = self._completion(entry, command, inline_bytes)
            if isinstance(completion, x.ResultFinished) and completion.payload is not None:
                answer_bytes -= command.payload_bytes
                if answer_bytes < 0 and completions:
                    break
            completions.append(completion)
            cursor = number
        return completions, cursor

    def _completion(
        self, entry: FutureCompletion, command: Command, inline_bytes: int
    ) -> x.ResultCompletion:
        if isinstance(entry, FutureFailed):
            failure = command.outcome
            assert isinstance(failure, RequestFailedResponse)
            return x.ResultFailed(
                request_id=entry.request_id,
                error=failure.error,
                category=failure.category.value,
            )
        is_carried = self._is_kept(command) and command.payload_bytes <= inline_bytes
        return x.ResultFinished(
            request_id=entry.request_id,
            response_payload_uncompressed_size=entry.response_payload_uncompressed_size,
            payload=b"".join(command.payload) if is_carried else None,
        )

    def fetch(self, received: ReceivedRequest) -> x.ResultsFetchResponse:
        """The results that there are, as many as fit into an answer."""
        self._offered("tinsmith_inline_bytes")
        request: x.ResultsFetchRequest = received.request
        if len(request.request_ids) > x.MOST_FETCHED:
            raise BodyTooLargeError(f"at most {x.MOST_FETCHED} results are given out at once")
        results: list[x.FetchedResult] = []
        left_bytes = request.answer_bytes
        for request_id in request.request_ids:
            result = self._result(request_id)
            if isinstance(result, x.ResultFinished):
                left_bytes -= len(result.payload or b"")
            if left_bytes < 0 and results:
                break
            results.append(result)
        return x.ResultsFetchResponse(results=results)

    def _result(self, request_id: str) -> x.FetchedResult:
        try:
            command = self._commands.known(request_id)
        except NotFoundError:
            return x.ResultUnknown(request_id=request_id)
        if not command.settled.is_set():
            return x.ResultPending(request_id=request_id)
        if not self._is_kept(command):
            return x.ResultGone(request_id=request_id)
        if isinstance(command.outcome, RequestFailedResponse):
            failure = command.outcome
            return x.ResultFailed(
                request_id=request_id, error=failure.error, category=failure.category.value
            )
        return x.ResultFinished(
            request_id=request_id,
            response_payload_uncompressed_size=command.payload_bytes,
            payload=b"".join(command.payload),
        )

    def _is_kept(self, command: Command) -> bool:
        try:
            self._commands.check_lifetime(command)
        except APIStatusError:
            return False
        return True

    # Tokens as they are drawn

    async def stream(self, received: ReceivedRequest) -> StreamedReply:
        """Accept a sample, or find it again, and give out its tokens one by one."""
        self._offered("tinsmith_stream")
        request: SampleRequest = received.request
        accepted = self._samplers.sample(_as_sample(received, request))
        command = self._commands.known(accepted.request_id)
        if command.settled.is_set():
            self._commands.check_lifetime(command)
        position = _position(received.headers.get("last-event-id"), request.num_samples)
        pieces = self._pieces(command, position, self._faults.of_stream(received))
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        return StreamedReply(200, headers, pieces)

    async def _pieces(
        self, command: Command, position: list[int], faults: list[StreamFault]
    ) -> AsyncIterator[bytes]:
        opened = x.StreamOpened(
            request_id=command.request_id, sample_sequence_ids=command.sequence_ids or []
        )
        yield _event("open", opened)
        while not command.settled.is_set():
            if command.hold is not None and command.hold.queue_state != "active":
                yield _event("queue", _queue_state(command))
                command.hold.note_poll()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(KEEP_ALIVE_S, self._settings.long_poll_s)):
                    await command.settled.wait()
            yield encode_comment()
        if isinstance(command.outcome, RequestFailedResponse):
            yield _event("failed", command.outcome)
            return
        if not self._is_kept(command):
            raise ConnectionResetError  # whoever asks again is told that it is gone
        assert isinstance(command.outcome, SampleResponse)
        sent = 0
        for event in _token_events(command.outcome, position):
            async for piece in _struck(event, sent, faults):
                yield piece
            sent += 1
        async for piece in _struck(_result_event(command), sent, faults):
            yield piece

    def _offered(self, flag: str) -> x.ServiceFlags:
        """The flags; raises `NotFoundError` if this one is not set."""
        if not self._flags.get(flag):
            raise NotFoundError(f"this service does not offer what {flag} stands for")
        return msgspec.convert(self._flags, x.ServiceFlags)


def _as_sample(received: ReceivedRequest, request: SampleRequest) -> ReceivedRequest:
    """A sample that came by another route, as if it had come by its own.

    Raises:
        BadRequestError: It has no identity.
    """
    if request.sampling_session_id is None or request.seq_id is None:
        raise BadRequestError("a sample needs its sampling_session_id and its seq_id here")
    return msgspec.structs.replace(received, endpoint="asample", request=request)


def _refused_item(fault: ExchangeFault) -> x.SampleManyItem:
    delay_s = retry_after_s({name.lower(): value for name, value in fault.headers.items()})
    detail = (fault.body or {}).get("detail", "refused, as the test asked")
    return x.SampleManyItem(
        status=fault.status,
        detail=str(detail),
        retry_after_ms=None if delay_s is None else delay_s * 1000,
    )


def _queue_state(command: Command) -> x.StreamedQueueState:
    assert command.hold is not None
    return x.StreamedQueueState(
        queue_state=command.hold.queue_state,
        queue_state_reason=command.hold.reason,
        retry_after_ms=command.hold.retry_after_ms,
    )


def _position(last_event_id: str | None, sequences: int) -> list[int]:
    """How many tokens of each sequence a client has."""
    if not last_event_id:
        return [0] * sequences
    counts = last_event_id.split(".")
    if len(counts) != sequences or not all(c.isascii() and c.isdigit() for c in counts):
        raise BadRequestError(f"Last-Event-ID {last_event_id[:80]!r} is no position of this sample")
    return [int(count[:18]) for count in counts]


def _token_events(response: SampleResponse, position: list[int]) -> list[bytes]:
    """One event for each token that is not counted in the position, all sequences in turn."""
    events = []
    counts = list(position)
    longest = max(len(sequence.token_numbers) for sequence in response.sequences)
    for place in range(max(1, longest)):
        for index, sequence in enumerate(response.sequences):
            tokens, logprobs = sequence.tokens, sequence.logprobs
            if counts[index] != place or place > max(0, len(tokens) - 1):
                continue
            counts[index] = min(place + 1, len(tokens))
            told = x.StreamedTokens(
                index=index,
                offset=place,
                tokens=tokens[place : place + 1],
                logprobs=None if logprobs is None else logprobs[place : place + 1],
                stop_reason=sequence.stop_reason if place + 1 >= len(tokens) else None,
            )
            events.append(_event("tokens", told, ".".join(map(str, counts))))
    return events


def _result_event(command: Command) -> bytes:
    size = command.payload_bytes
    if size > x.STREAMED_RESULT_BYTES:
        return _event("result", x.StreamedResult(response_payload_uncompressed_size=size))
    return _event("result", x.StreamedResult(payload=b"".join(command.payload)))


async def _struck(event: bytes, sent: int, faults: list[StreamFault]) -> AsyncIterator[bytes]:
    """An event, unless a rule keeps it back or cuts the connection in the middle of it."""
    for fault in faults:
        if fault.after_tokens == sent:
            if fault.hold is not None:
                await fault.hold.wait_released()
            if fault.cut:
                yield event[: len(event) // 2]
                raise ConnectionResetError
    yield event


def _event(name: str, data: Any, event_id: str | None = None) -> bytes:
    return encode_event(Event(event=name, data=json_format.encode(data).decode(), id=event_id))
