"""Sends a model's calls in their order and awaits their results.

A `Submitter` belongs to one model. `start_call` sends a call of one request; `start_pass` sends a
forward or backward pass, which may be split into chunks. Bodies are encoded on the caller's thread,
so that later changes to its arrays are not sent; everything else runs on the background loop. A
call waits in the model's queue (`dispatch.py`), takes its sequence ids, is sent, and leaves the
queue when the server has acknowledged it; then its result is polled for.

The server runs a model's calls without a gap in their ids. Where an id may not have reached the
server (a chunk that was refused or lost, a call that was cancelled while sending) a forward pass
over one token is sent in its place, which changes nothing and lets the server continue (S17).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tinsmith.client import dispatch
from tinsmith.client.background import background
from tinsmith.client.dispatch import DispatchQueue, Ticket
from tinsmith.client.futures import APIFuture
from tinsmith.client.limits import Budget
from tinsmith.client.poller import Poll
from tinsmith.client.session import Session
from tinsmith.client.waits import StateTeller
from tinsmith.errors import DecodeError, TinkerError, ValidationError, without_frames
from tinsmith.types.buffers import Numbers
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.inputs import Datum, ModelInput
from tinsmith.types.record import Frozen, Record
from tinsmith.types.requests import ForwardBackwardRequest
from tinsmith.types.training import ForwardBackwardInput, ForwardBackwardOutput, LossFnType
from tinsmith.wire import content, proto_format
from tinsmith.wire.endpoint_types import Format
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpRequest
from tinsmith.wire.generated import tags
from tinsmith.wire.protobuf import Parts, put_int32

T = TypeVar("T")

_COMPRESS_ON_THREAD_BYTES = 64 * 1024
"""Larger bodies are compressed on a thread, so that the event loop stays free."""

_log = logging.getLogger(__name__)


class Acknowledged(msgspec.Struct, frozen=True):
    """What the server answered to a submission, and how long that took."""

    future: UntypedAPIFuture
    submit_s: float


class Submitter:
    """Sends the calls of one model."""

    def __init__(self, session: Session, model_id: str) -> None:
        self.session = session
        self.model_id = model_id
        self.queue = DispatchQueue()
        self._sending = Budget(session.flags.fwdbwd_dispatch_bytes_semaphore_size)
        self._room = Budget(session.flags.inflight_response_bytes_semaphore_size)
        self.observer: StateTeller | None = None
        """Receives the state of the model's queue on the server."""

    def start(
        self,
        work: Coroutine[Any, Any, T],
        tickets: Sequence[Ticket],
        name: str,
        timeout: float | None = None,
    ) -> APIFuture[T]:
        """Run a call in the background. However it ends, its tickets leave the queue.

        Raises:
            ClosedError: The client belongs to the process that this one was forked from.
            ValidationError: `timeout` is not a number of seconds.
        """
        if self.session.is_inherited():
            work.close()
            self.session.check_open()
        try:
            future = background().start(work, f"{name} of {self.model_id}", timeout)
        except ValidationError:
            _leave(tickets)
            raise
        future.when_settled(lambda _: _leave(tickets))
        return future

    # Calls of one request

    def start_call(
        self,
        name: str,
        kind: str,
        make: Callable[[int], Record | Frozen],
        finish: Callable[[Any], Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[Any]:
        """Queue a call now, and send it when it is first.

        Args:
            name: The endpoint.
            kind: The kind of its result.
            make: Makes the request from its sequence id.
            finish: Makes the call's value from the result.
            timeout: Seconds for the whole call.
        """
        make(1)  # a mistake in the arguments is raised here, not from the future
        ticket = self.queue.take_ticket()

        async def work() -> Any:
            acknowledged = await self._submit(ticket, name, make)
            result = await self._result(acknowledged, kind)
            return result if finish is None else finish(result)

        return self.start(work(), [ticket], name, timeout)

    async def _submit(
        self, ticket: Ticket, name: str, make: Callable[[int], Record | Frozen]
    ) -> Acknowledged:
        with self.session.work.under_way():
            async with ticket.first() as queue:
                seq_id = queue.take_seq_ids(1)[0]
                try:
                    began = time.monotonic()
                    future = await self.session.call(name, make(seq_id))
                    return Acknowledged(future, time.monotonic() - began)
                except BaseException:
                    self._fill([seq_id])
                    raise

    async def _result(self, acknowledged: Acknowledged, kind: str) -> Any:
        poll = Poll(
            self.session,
            acknowledged.future.request_id,
            kind,
            submit_s=acknowledged.submit_s,
            room=self._room,
            observer=self.observer,
        )
        return await poll.result()

    # Passes, which may be split into chunks

    def start_pass(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
        timeout: float | None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Encode and queue a pass now, and send it when it is first.

        Raises:
            TypeError: The data are not datums, or the loss is not a name.
            ValidationError: There is no data, or an input differs in length from the targets.
        """
        data = checked_data(data, loss_fn)
        bodies = self.encode_pass(data, loss_fn, loss_fn_config, forward_only=forward_only)
        count_tokens = _token_counter(data)
        ticket = self.queue.take_ticket()
        kind = "Forward" if forward_only else "ForwardBackward"

        async def work() -> ForwardBackwardOutput:
            output = await self.run_pass(ticket, bodies, kind)
            return output._with_tokens(count_tokens)

        name = "forward" if forward_only else "forward_backward"
        return self.start(work(), [ticket], name, timeout)

    def encode_pass(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        forward_only: bool = False,
    ) -> list[Parts]:
        """The bodies of a pass over checked data, one per chunk, without their sequence ids.

        Raises:
            ValidationError: There is no data.
        """
        flags = self.session.flags
        chunks = dispatch.split(
            data,
            max_datums=flags.fwdbwd_max_chunk_len,
            max_bytes=flags.fwdbwd_max_chunk_bytes_count,
        )
        if not chunks:
            raise ValidationError("data is empty", remedy="pass at least one Datum")
        return [
            _frozen_body(
                ForwardBackwardRequest(
                    ForwardBackwardInput(chunk, loss_fn, loss_fn_config),
                    self.model_id,
                    forward_only=forward_only,
                )
            )
            for chunk in chunks
        ]

    async def run_pass(
        self, ticket: Ticket, bodies: Sequence[Parts], kind: str
    ) -> ForwardBackwardOutput:
        """Send the chunks of a pass when it is first, and join their results.

        The chunks have consecutive ids. They are sent in parallel, the first one last so that the
        server starts when it has them all, unless settings or the server ask for one after another.

        Raises:
            APIError: A chunk failed; the error says which ones the server has.
        """
        flags = self.session.flags
        is_offered = flags.parallel_fwdbwd_chunks or flags.tinsmith_parallel_chunks
        parallel = is_offered and self.session.settings.parallel_chunks
        with self.session.work.under_way():
            outcomes = await self._submit_chunks(ticket, bodies, parallel=parallel)
        acknowledged = _all_acknowledged(outcomes)
        outputs = await asyncio.gather(*(self._result(one, kind) for one in acknowledged))
        return dispatch.join(outputs)

    async def _submit_chunks(
        self, ticket: Ticket, bodies: Sequence[Parts], *, parallel: bool
    ) -> list[Any]:
        async with ticket.first() as queue:
            seq_ids = queue.take_seq_ids(len(bodies))
            outcomes: list[Any] = [None] * len(bodies)
            try:
                if parallel:
                    await self._send_parallel(bodies, seq_ids, outcomes)
                else:
                    await self._send_serially(bodies, seq_ids, outcomes, queue)
            finally:
                self._fill(
                    [
                        seq_id
                        for seq_id, outcome in zip(seq_ids, outcomes, strict=True)
                        if not isinstance(outcome, Acknowledged | _NotSent)
                    ]
                )
        return outcomes

    async def _send_parallel(
        self, bodies: Sequence[Parts], seq_ids: range, outcomes: list[Any]
    ) -> None:
        async def send(index: int) -> None:
            try:
                outcomes[index] = await self._send_chunk(bodies[index], seq_ids[index])
            except TinkerError as error:
                outcomes[index] = without_frames(error)

        await asyncio.gather(*(send(index) for index in range(1, len(bodies))))
        await send(0)  # also after a failure: the server waits for every id of the block

    async def _send_serially(
        self, bodies: Sequence[Parts], seq_ids: range, outcomes: list[Any], queue: DispatchQueue
    ) -> None:
        for index, body in enumerate(bodies):
            try:
                outcomes[index] = await self._send_chunk(body, seq_ids[index])
            except TinkerError as error:
                outcomes[index] = without_frames(error)
                rest = range(index + 1, len(bodies))
                for unsent in rest:
                    outcomes[unsent] = _NotSent()
                if rest:
                    queue.return_seq_ids(seq_ids[rest[0]])
                return

    async def _send_chunk(self, body: Parts, seq_id: int) -> Acknowledged:
        endpoint = ENDPOINTS["forward_backward"]
        parts = [*_seq_id_field(seq_id), *body]
        headers = {"Accept": Format.JSON.value, "Content-Type": Format.PROTOBUF.value}
        size_bytes = sum(map(len, parts))
        async with self._sending.taken(max(1, size_bytes)):
            if self.session.flags.proto_compress_fwdbwd:
                if size_bytes > _COMPRESS_ON_THREAD_BYTES:
                    parts = [await asyncio.to_thread(content.compress, parts)]
                else:
                    parts = [content.compress(parts)]
                headers["Content-Encoding"] = "zstd"
            sent = HttpRequest(endpoint.method, endpoint.path, {}, headers, parts)
            began = time.monotonic()
            future = await self.session.call_with(endpoint, sent)
            return Acknowledged(future, time.monotonic() - began)

    # Ids that may not have reached the server

    def _fill(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.session.spawn(self._fill_one(seq_id))

    async def _fill_one(self, seq_id: int) -> None:
        """Send a call that changes nothing under an id that the server may be waiting for.

        If the call itself did arrive, the server answers with it or refuses; either will do.
        """
        datum = Datum(ModelInput.from_ints([0]), {"target_tokens": [0], "weights": [0.0]})
        request = ForwardBackwardRequest(
            ForwardBackwardInput([datum], "cross_entropy"),
            self.model_id,
            seq_id,
            forward_only=True,
        )
        try:
            await self.session.call("forward_backward", request)
        except TinkerError as error:
            _log.debug("seq_id %d of %s could not be filled: %s", seq_id, self.model_id, error)


class _NotSent:
    """A chunk that was not sent, and whose id goes to the next call."""


def _leave(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        background().call_soon(ticket.leave)


def _frozen_body(request: ForwardBackwardRequest) -> Parts:
    """The request's bytes as they are now, however the caller's arrays change later."""
    parts = proto_format.encode_forward_backward_request(request)
    return [
        bytes(part) if isinstance(part, memoryview) and not part.readonly else part
        for part in parts
    ]


def _seq_id_field(seq_id: int) -> Parts:
    """The field with a request's id; in protobuf fields may come in any order."""
    parts: Parts = []
    put_int32(parts, tags.FORWARD_BACKWARD_REQUEST__SEQ_ID, seq_id, "seq_id")
    return parts


def _all_acknowledged(outcomes: list[Any]) -> list[Acknowledged]:
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


def present(value: T | None, what: str) -> T:
    """A field that the service's answer must have."""
    if value is None:
        raise DecodeError(f"the service's answer has no {what}")
    return value


# The data of a pass


def checked_data(data: Sequence[Datum], loss_fn: LossFnType) -> list[Datum]:
    """The data as a list.

    Raises:
        TypeError: The data are not datums, or the loss is not a name.
        ValidationError: An input of a named loss differs in length from the targets.
    """
    if not isinstance(loss_fn, str):
        raise TypeError(
            f"loss_fn must be the name of a loss, such as 'cross_entropy', not "
            f"{type(loss_fn).__name__}; pass a function of your own to forward_backward_custom"
        )
    if not isinstance(data, Iterable):
        raise TypeError(f"data must be a list of Datum, not {type(data).__name__}")
    datums = list(data)
    for index, datum in enumerate(datums):
        if not hasattr(datum, "model_input"):
            raise TypeError(f"data[{index}] must be a Datum, not {type(datum).__name__}")
        if loss_fn != "custom":
            try:
                datum.check_rows()
            except ValidationError as exc:
                raise ValidationError(f"data[{index}]: {exc.args[0]}", remedy=exc.remedy) from None
    return datums


def _token_counter(data: Sequence[Datum]) -> Callable[[], float]:
    """Counts the tokens that the loss is a sum over, for `loss_per_token`.

    Copies the few numbers that it needs, so that it neither keeps the data alive nor sees later
    changes, and adds them up when it is called.
    """
    weights: list[Numbers] = []
    advantages: list[Numbers] = []
    others = 0
    for datum in data:
        inputs = datum.loss_fn_inputs
        if "weights" in inputs:
            weights.append(_copied(inputs["weights"].numbers))
        elif "advantages" in inputs:
            advantages.append(_copied(inputs["advantages"].numbers))
        elif "target_tokens" in inputs:
            others += len(inputs["target_tokens"].numbers)

    def count() -> float:
        total = math.fsum(abs(weight) for numbers in weights for weight in numbers.view())
        counted = sum(bool(number) for numbers in advantages for number in numbers.view())
        return total + counted + others

    return count


def _copied(numbers: Numbers) -> Numbers:
    return Numbers(bytes(numbers.memory), numbers.kind)  # of bytes it is no copy
