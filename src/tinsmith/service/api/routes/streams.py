"""Tokens as they are sampled, as server-sent events; docs/extensions.md has the protocol.

Tokens come from the ledger's board while a sample runs, if it was watched from its start; what the
board missed comes from the result, once there is one. So a client that joins late, or asks a server
that saw nothing of the run, gets the same tokens, only later.

A stream whose client disconnected is watched for a while longer, so that the client can resume it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from tinsmith.errors import (
    BadRequestError,
    RateLimitError,
    ResultGoneError,
    UnknownEntryError,
)
from tinsmith.service.api.api_call import ApiCall, Handler, StreamedReply
from tinsmith.service.api.routes.extensions import check_identity, offered, sample_payload
from tinsmith.service.api.submissions import KIND, submit_sample
from tinsmith.service.ledger.board import Board, TokenPiece
from tinsmith.service.ledger.records import Command, QueueId, Result, request_id
from tinsmith.types import extensions as x
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import SampledSequence, SampleResponse
from tinsmith.wire import json_format
from tinsmith.wire.content import EVENT_STREAM_TYPE
from tinsmith.wire.sse import ServerSentEvent, encode_comment, encode_event
from tinsmith.wire.stored import read_failure, read_result

KEEP_ALIVE_S = 15.0
MOST_OF_TENANT = 1024
"""The most streams of one tenant, including those without a client: others need some too."""
LINGER_S = 30.0
"""How long a stream is watched after its client has left."""
_WAIT_S = 3600.0


async def asample_stream(call: ApiCall) -> StreamedReply:
    """Accept a sample, or find it again, and stream its tokens as they are sampled."""
    offered(call, call.settings.offers_streams)
    request: SampleRequest = call.request
    check_identity(request)
    board = call.ledger.board
    known = request_id(QueueId(request.sampling_session_id or ""), request.seq_id or 0)
    of_tenant = call.context.streams_of
    if of_tenant[call.tenant_id] >= MOST_OF_TENANT or not board.watch(known):
        raise RateLimitError("too many samples are being streamed", retry_after_s=1.0)
    of_tenant[call.tenant_id] += 1
    try:
        # Watched before it exists, so that not even its first token is missed.
        await board.flush()
        is_new = not await _is_known(call, known)
        accepted = await submit_sample(call)
        position = _position(call.headers.get("last-event-id"), request.num_samples)
        if is_new:
            call.context.whole_streams.add(known)
        command = await call.context.lookups.command(call.tenant_id, accepted.request_id)
        if command.is_gone:
            raise ResultGoneError(f"the result of {known} has been deleted")
    except BaseException:
        _let_go(call, known)
        raise
    is_live = known in call.context.whole_streams
    # The stream may last long, and does not need the request any more.
    call = dataclasses.replace(call, request=None, body=b"")
    pieces = _events(call, accepted, command, position, is_live=is_live)
    headers = {"Content-Type": EVENT_STREAM_TYPE, "Cache-Control": "no-store"}
    return StreamedReply(200, headers, pieces)


async def _is_known(call: ApiCall, known: str) -> bool:
    try:
        await call.ledger.command(known)
    except UnknownEntryError:
        return False
    return True


async def _events(
    call: ApiCall,
    accepted: UntypedAPIFuture,
    command: Command,
    position: list[int],
    *,
    is_live: bool,
) -> AsyncIterator[bytes]:
    sent = _Sent(position)
    is_over = False
    try:
        opened = x.StreamOpened(
            request_id=accepted.request_id,
            sample_sequence_ids=accepted.sample_sequence_ids or [],
        )
        yield _event("open", opened)
        settled = call.context.long_polls.start(_wait_settled(call, command.request_id))
        async for event in _while_it_runs(call, command, sent, settled, is_live=is_live):
            yield event
        if settled.cancelled():
            return  # the server stops: without a result event the client resumes elsewhere
        result = await call.ledger.result(command.request_id)
        assert result is not None, "settled commands have a result"
        call.context.admission.settled(call.tenant_id, command.request_id)
        is_over = True
        for event in _ending(result, sent):
            yield event
    finally:
        # A client that lost its connection may resume the stream.
        linger_s = 0.0 if is_over else LINGER_S
        loop = asyncio.get_running_loop()
        loop.call_later(linger_s, _let_go, call, command.request_id)


async def _while_it_runs(
    call: ApiCall, command: Command, sent: _Sent, settled: asyncio.Task[None], *, is_live: bool
) -> AsyncIterator[bytes]:
    """Tokens, changes of the queue and keep-alives, until the command is settled."""
    board, known = call.ledger.board, command.request_id
    told, restarts, queue = 0, board.restarts(known), board.queue_state(command.queue_id)
    if queue.state != "active":
        yield _queue_event(board, command)
    try:
        while not settled.done():
            news = asyncio.create_task(_news(board, known, told, is_live=is_live))
            try:
                await asyncio.wait((settled, news), return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            if board.restarts(known) != restarts:
                told, restarts = 0, board.restarts(known)
                sent.start_anew()
                continue
            if board.queue_state(command.queue_id) != queue:
                queue = board.queue_state(command.queue_id)
                yield _queue_event(board, command)
            if not news.done() or news.cancelled():
                continue
            pieces = news.result()
            told += len(pieces)
            for event in sent.events(pieces):
                yield event
            if not pieces:
                yield encode_comment()
        if not settled.cancelled():
            settled.result()
    finally:
        settled.cancel()


async def _wait_settled(call: ApiCall, known: str) -> None:
    while not (await call.ledger.wait_settled(known, timeout_s=_WAIT_S)).is_settled:
        pass


async def _news(board: Board, known: str, told: int, *, is_live: bool) -> list[TokenPiece]:
    if is_live:
        return await board.wait_tokens(known, told, timeout_s=KEEP_ALIVE_S)
    await asyncio.sleep(KEEP_ALIVE_S)
    return []


def _let_go(call: ApiCall, known: str) -> None:
    board = call.ledger.board
    board.unwatch(known)
    call.context.streams_of[call.tenant_id] -= 1
    if call.context.streams_of[call.tenant_id] <= 0:
        del call.context.streams_of[call.tenant_id]
    if not board.is_watched(known):
        call.context.whole_streams.discard(known)


class _Sent:
    """How many tokens of each sequence the client has, and how many the board has reported."""

    def __init__(self, position: list[int]) -> None:
        self._counts = position
        self._told = [0] * len(position)

    def start_anew(self) -> None:
        """The command runs again; what the client has is not sent again."""
        self._told = [0] * len(self._told)

    def events(self, pieces: list[TokenPiece]) -> list[bytes]:
        """One event for each piece with tokens that the client lacks."""
        events = []
        for piece in pieces:
            index = piece.sequence
            skipped = self._counts[index] - self._told[index]
            self._told[index] += len(piece.tokens)
            if skipped < 0 or skipped >= len(piece.tokens):
                continue
            logprobs = list(piece.logprobs[skipped:]) if piece.logprobs else None
            events.append(self._tokens(index, list(piece.tokens[skipped:]), logprobs))
        return events

    def rest(self, index: int, sequence: SampledSequence) -> bytes:
        """The rest of a finished sequence, with its stop reason."""
        start = min(self._counts[index], len(sequence.token_numbers))
        self._counts[index] = start
        logprobs = None if sequence.logprobs is None else sequence.logprobs[start:]
        return self._tokens(index, sequence.tokens[start:], logprobs, sequence.stop_reason)

    def _tokens(
        self, index: int, tokens: list[int], logprobs: list[float] | None, reason: Any = None
    ) -> bytes:
        told = x.StreamedTokens(
            index=index,
            offset=self._counts[index],
            tokens=tokens,
            logprobs=logprobs,
            stop_reason=reason,
        )
        self._counts[index] += len(tokens)
        return _event("tokens", told, ".".join(map(str, self._counts)))


def _ending(result: Result, sent: _Sent) -> list[bytes]:
    """The last events of a stream."""
    if result.is_failed:
        return [_event("failed", read_failure(result.payload))]
    response: SampleResponse = read_result(KIND, result.payload)
    events = [sent.rest(index, sequence) for index, sequence in enumerate(response.sequences)]
    payload = sample_payload(result.payload)
    if len(payload) > x.STREAMED_RESULT_BYTES:
        told = x.StreamedResult(response_payload_uncompressed_size=len(payload))
    else:
        told = x.StreamedResult(payload=bytes(payload))
    return [*events, _event("result", told)]


def _queue_event(board: Board, command: Command) -> bytes:
    queue = board.queue_state(command.queue_id)
    told = x.StreamedQueueState(
        queue_state=queue.state,
        queue_state_reason=queue.reason,
        retry_after_ms=None if queue.retry_after_s is None else queue.retry_after_s * 1000,
    )
    return _event("queue", told)


def _position(last_event_id: str | None, sequences: int) -> list[int]:
    """How many tokens of each sequence a client has."""
    if not last_event_id:
        return [0] * sequences
    counts = last_event_id.split(".", sequences)
    if len(counts) != sequences or not all(c.isascii() and c.isdigit() for c in counts):
        raise BadRequestError(f"invalid Last-Event-ID {last_event_id[:80]!r} for this sample")
    return [int(count[:18]) for count in counts]


def _event(name: str, data: Any, event_id: str | None = None) -> bytes:
    return encode_event(
        ServerSentEvent(event=name, data=json_format.encode(data).decode(), id=event_id)
    )


HANDLERS: dict[str, Handler] = {
    "asample_stream": asample_stream,
}
