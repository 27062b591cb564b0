"""Sending a model's calls in their order, and leaving no number that the server would wait for.

`Submitter` stands between a `TrainingClient` and the session: it waits for a call's turn, gives it
its numbers, sends it, and returns what the server acknowledged. Where a number may not have
reached the server (a chunk that was refused or lost, a call that was cancelled while sending) a
forward pass over one token takes its place, which changes nothing and lets the server go on (S17).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tinsmith.client.background import background
from tinsmith.client.budgets import Budget
from tinsmith.client.dispatch import Line, Place
from tinsmith.client.futures import APIFuture
from tinsmith.client.poller import Poll
from tinsmith.client.queue_state import StateTeller
from tinsmith.client.session import Session
from tinsmith.errors import TinkerError, ValidationError, without_frames
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.inputs import Datum, ModelInput
from tinsmith.types.record import Frozen, Record
from tinsmith.types.requests import ForwardBackwardRequest
from tinsmith.types.training import ForwardBackwardInput
from tinsmith.wire import content, proto_format
from tinsmith.wire.endpoint_types import Format
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpRequest
from tinsmith.wire.generated import tags
from tinsmith.wire.protobuf import Parts, put_int32

_log = logging.getLogger(__name__)


class Acknowledged(msgspec.Struct, frozen=True):
    """What the server said to a submission, and how long it took to say it."""

    future: UntypedAPIFuture
    submit_s: float


class Submitter:
    """Sends the calls of one model."""

    def __init__(self, session: Session, model_id: str) -> None:
        self.session = session
        self.model_id = model_id
        self.line = Line()
        self._sending = Budget(session.flags.fwdbwd_dispatch_bytes_semaphore_size)
        self.room = Budget(session.flags.inflight_response_bytes_semaphore_size)
        self.observer: StateTeller | None = None
        """Who is told that the model's queue is paused."""

    def start(
        self, work: Any, places: Sequence[Place], what: str, timeout: float | None = None
    ) -> APIFuture[Any]:
        """Run a call in the background. However it ends, its places are left.

        Raises:
            ClosedError: The client belongs to the process that this one was forked from.
            ValidationError: `timeout` is no number of seconds.
        """
        if self.session.is_inherited():
            work.close()
            self.session.check_open()
        try:
            future = background().start(work, what, timeout)
        except ValidationError:
            _leave(places)
            raise
        future.when_settled(lambda _: _leave(places))
        return future

    # One request

    async def submit(
        self, place: Place, name: str, make: Callable[[int], Record | Frozen]
    ) -> Acknowledged:
        """Send a call of one request in its turn; `make` makes it with its number."""
        with self.session.work.under_way():
            return await self._submit(place, name, make)

    async def _submit(
        self, place: Place, name: str, make: Callable[[int], Record | Frozen]
    ) -> Acknowledged:
        async with place.turn() as line:
            number = line.take_numbers(1)[0]
            try:
                began = time.monotonic()
                future = await self.session.call(name, make(number))
                return Acknowledged(future, time.monotonic() - began)
            except BaseException:
                self._fill([number])
                raise

    async def result(self, acknowledged: Acknowledged, kind: str) -> Any:
        """Wait for what an acknowledged call gives."""
        poll = Poll(
            self.session,
            acknowledged.future.request_id,
            kind,
            submit_s=acknowledged.submit_s,
            room=self.room,
            observer=self.observer,
        )
        with self.session.work.under_way():
            return await poll.result()

    # A call of several chunks

    async def submit_chunks(self, place: Place, bodies: Sequence[Parts]) -> list[Acknowledged]:
        """Send the chunks of one training call in its turn, under numbers next to each other.

        In parallel, unless settings or the server ask for one after another: the first goes last,
        so that the server begins when it has them all.

        Raises:
            APIError: A chunk failed; the error says which ones the server has.
        """
        flags = self.session.flags
        is_offered = flags.parallel_fwdbwd_chunks or flags.tinsmith_parallel_chunks
        parallel = is_offered and self.session.settings.parallel_chunks
        with self.session.work.under_way():
            outcomes = await self._submit_chunks(place, bodies, parallel=parallel)
        return _all_landed(outcomes)

    async def _submit_chunks(
        self, place: Place, bodies: Sequence[Parts], *, parallel: bool
    ) -> list[Any]:
        async with place.turn() as line:
            numbers = line.take_numbers(len(bodies))
            outcomes: list[Any] = [None] * len(bodies)
            try:
                if parallel:
                    await self._send_parallel(bodies, numbers, outcomes)
                else:
                    await self._send_serially(bodies, numbers, outcomes, line)
            finally:
                unsettled = [
                    number
                    for number, outcome in zip(numbers, outcomes, strict=True)
                    if not isinstance(outcome, Acknowledged | _NotSent)
                ]
                self._fill(unsettled)
        return outcomes

    async def _send_parallel(
        self, bodies: Sequence[Parts], numbers: range, outcomes: list[Any]
    ) -> None:
        async def send(index: int) -> None:
            try:
                outcomes[index] = await self._send_chunk(bodies[index], numbers[index])
            except TinkerError as error:
                outcomes[index] = without_frames(error)

        await asyncio.gather(*(send(index) for index in range(1, len(bodies))))
        await send(0)  # also after a failure: the server waits for every number of the block

    async def _send_serially(
        self, bodies: Sequence[Parts], numbers: range, outcomes: list[Any], line: Line
    ) -> None:
        for index, body in enumerate(bodies):
            try:
                outcomes[index] = await self._send_chunk(body, numbers[index])
            except TinkerError as error:
                outcomes[index] = without_frames(error)
                rest = range(index + 1, len(bodies))
                for unsent in rest:
                    outcomes[unsent] = _NotSent()
                if rest:
                    line.give_back_numbers(numbers[rest[0]])
                return

    async def _send_chunk(self, body: Parts, number: int) -> Acknowledged:
        endpoint = ENDPOINTS["forward_backward"]
        parts = [*_numbered(number), *body]
        headers = {"Accept": Format.JSON.value, "Content-Type": Format.PROTOBUF.value}
        async with self._sending.taken(max(1, sum(map(len, parts)))):
            if self.session.flags.proto_compress_fwdbwd:
                parts = [await asyncio.to_thread(content.compress, parts)]
                headers["Content-Encoding"] = "zstd"
            sent = HttpRequest(endpoint.method, endpoint.path, {}, headers, parts)
            began = time.monotonic()
            future = await self.session.call_with(endpoint, sent)
            return Acknowledged(future, time.monotonic() - began)

    # Numbers that may not have arrived

    def _fill(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.session.spawn(self._fill_one(number))

    async def _fill_one(self, number: int) -> None:
        """Make sure that the server does not wait for a number.

        If the call itself did arrive, the server answers with it or refuses; either will do.
        """
        datum = Datum(ModelInput.from_ints([0]), {"target_tokens": [0], "weights": [0.0]})
        request = ForwardBackwardRequest(
            ForwardBackwardInput([datum], "cross_entropy"),
            self.model_id,
            number,
            forward_only=True,
        )
        try:
            await self.session.call("forward_backward", request)
        except TinkerError as error:
            _log.debug("number %d of %s could not be filled: %s", number, self.model_id, error)


class _NotSent:
    """A chunk that was not sent, and whose number goes to the next call."""


def _leave(places: Sequence[Place]) -> None:
    for place in places:
        background().call_soon(place.leave)


def frozen_body(request: ForwardBackwardRequest) -> Parts:
    """The request's bytes as they are now, however the caller's arrays change later."""
    parts = proto_format.encode_forward_backward_request(request)
    return [
        bytes(part) if isinstance(part, memoryview) and not part.readonly else part
        for part in parts
    ]


def _numbered(number: int) -> Parts:
    """The field that numbers a request; in protobuf fields may come in any order."""
    parts: Parts = []
    put_int32(parts, tags.FORWARD_BACKWARD_REQUEST__SEQ_ID, number, "seq_id")
    return parts


def _all_landed(outcomes: list[Any]) -> list[Acknowledged]:
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not errors:
        return outcomes
    landed = [str(i) for i, outcome in enumerate(outcomes) if isinstance(outcome, Acknowledged)]
    total = len(outcomes)
    if total > 1:
        errors[0].add_note(
            f"of {total} chunks the server has {', '.join(landed) or 'none'} (counted from 0); "
            "their gradients count until the next optim_step"
        )
    raise errors[0]
