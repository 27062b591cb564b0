"""Sends the samples of one sampler: queued, numbered, and grouped into few requests.

Calls arrive from any thread in one inbox. One task sends what is queued, in the order in which the
calls were made, as soon as the limiter, the request and byte budgets and the bound on samples in
flight allow it. Nothing is reserved while it waits, so that a pause stops everything that has not
been sent. Where the service takes many samples in one request they share requests; else each sample
has its own. Each request is sent by a task of its own, which also retries it.

A sample that is refused with 429 returns to the front of the queue, or behind some others if it was
refused before, and keeps its number; `samples/refusals.py` says how far back, and for how long.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import TypeAlias

from tinsmith.client.background import background
from tinsmith.client.retry import Retrier, may_pass
from tinsmith.client.samples.refusals import Refusals
from tinsmith.client.samples.request_texts import RequestTexts
from tinsmith.client.samples.sample_call import SampleCall, fail_all
from tinsmith.client.session import Session, death_of
from tinsmith.client.waits import StateTeller, Wait
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    RateLimitError,
    TinkerError,
)
from tinsmith.types.extensions import SampleManyItem, SampleManyResponse
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpRequest, packed_request
from tinsmith.wire.failures import status_class
from tinsmith.wire.packed_format import PackedText
from tinsmith.wire.protobuf import Parts

_log = logging.getLogger(__name__)

MOST_REQUESTS = 400
"""How many may await their reply at once; waiting for results is free."""
BURST_BYTES, LEAST_REQUEST_BYTES = 512 * 1024, 32 * 1024
"""After so much the sender lets the requests leave and replies come in before it writes more:
bodies that only wait to be sent take memory and connections. A request counts for no less than the
second."""
MOST_EARLY_BYTES = 32 * 1024 * 1024
"""About how much of the queued prompts may be encoded before they are sent."""
WRAPPER_BYTES = 64
"""More than a body takes beside its samples and the commas between them."""
NOT_OFFERED = (404, 405)
UNKNOWN_FORM = 415

Group: TypeAlias = list[SampleCall]
"""The samples of one request."""
Answer: TypeAlias = UntypedAPIFuture | SampleManyResponse


class SampleSender:
    """The send queue of one sampler. For the background loop, except `put`."""

    def __init__(
        self,
        session: Session,
        *,
        retrier: Retrier,
        refusals: Refusals,
        queue_state: StateTeller | None = None,
        most_in_flight: int | None,
        stuck_after_s: float | None,
        prepare: Callable[[], Awaitable[object]],
        next_seq_id: Callable[[], int],
        on_accepted: Callable[[SampleCall], object],
        on_over: Callable[[SampleCall], object],
    ) -> None:
        """Create a sender.

        Args:
            session: Sends the requests.
            retrier: Retries them.
            refusals: Says what a 429 means.
            queue_state: Knows the state of the queue on the server, for log lines about long waits.
            most_in_flight: How many samples may be between submission and result; None for any.
            stuck_after_s: Fail all samples in flight if none has returned for so long; None for
                never.
            prepare: Awaited before the first number is given.
            next_seq_id: Gives each sample its number.
            on_accepted: Takes over a sample that the service has accepted.
            on_over: Called at the end of each sample.
        """
        self._session = session
        self._retrier = retrier
        self._refusals = refusals
        self._queue_state = queue_state
        self._most_in_flight = most_in_flight
        self._stuck_after_s = stuck_after_s
        self._progress_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._prepare = prepare
        self._next_seq_id = next_seq_id
        self._on_accepted = on_accepted
        self._on_over = on_over
        self._inbox: collections.deque[SampleCall] = collections.deque()
        self._is_woken = False
        self._queue: collections.deque[SampleCall] = collections.deque()
        self._in_flight: set[SampleCall] = set()
        self._requests = 0
        self._request_bytes = 0
        self._is_sending = False
        self._changed: asyncio.Future[None] | None = None
        self._takes_many = True
        self._takes_packed = True
        self._texts = RequestTexts()

    def put(self, call: SampleCall) -> None:
        """Queue a sample. From any thread; returns immediately."""
        # As if all that are queued were as long: to count them would take a lock.
        queued_bytes = (len(self._inbox) + len(self._queue)) * call.size
        if not self._packs and queued_bytes <= MOST_EARLY_BYTES:
            call.write_early()
        # Append, then look at the flag; the loop clears the flag, then drains: nothing is missed.
        self._inbox.append(call)
        if not self._is_woken:
            self._is_woken = True
            background().call_soon(self._drain)

    def put_back(self, calls: Sequence[SampleCall]) -> None:
        """Send samples again: before all others, except those refused more than once."""
        for call in reversed(calls):
            call.written = None
            self._in_flight.discard(call)
            if not call.is_over:
                self._queue.insert(self._refusals.others_first(call.refusals), call)
        self._ensure_sending()

    def _drain(self) -> None:
        self._is_woken = False
        loop = background().loop
        while self._inbox:
            call = self._inbox.popleft()
            if call.future.cancelled():
                continue
            call.begin(loop, self._ended)
            call.future.stop_work_with(call.ask_to_give_up)
            self._queue.append(call)
        waits = background().waits
        waits.sources.add(self._waits)
        waits.look_on()
        self._ensure_sending()

    def _ended(self, call: SampleCall) -> None:
        self._in_flight.discard(call)
        if call.is_drawn:
            self._progress_at = background().loop.time()
            if self._session.limiter.refusals:
                self._session.limiter.sample_drawn()
        self._wake()
        self._on_over(call)

    def _waits(self) -> list[Wait]:
        """What the samples of this sampler wait for: the oldest queued and in flight."""
        waits: list[Wait] = []
        if self._queue:
            pause = self._session.limiter.pause()
            reason = f"paused by the service: {pause.reason}" if pause.reason else "not sent yet"
            waits.append(_wait_of(self._queue, reason, bool(pause.reason)))
        accepted = [call for call in self._in_flight if call.request_id is not None]
        if len(accepted) < len(self._in_flight):
            waits.append(_wait_of(self._in_flight.difference(accepted), "not accepted yet", True))
        if accepted:
            state = self._queue_state.latest if self._queue_state is not None else ""
            waits.append(_wait_of(accepted, state))
        if not waits:
            background().waits.sources.discard(self._waits)
        return waits

    # The queue

    def _ensure_sending(self) -> None:
        if self._queue and not self._is_sending:
            self._is_sending = True
            self._session.spawn(self._send_queue(), self._sending_ended)

    def _sending_ended(self, task: asyncio.Task[None]) -> None:
        self._is_sending = False
        if (error := death_of(task)) is not None:
            while self._queue:
                self._queue.popleft().fail(error)
        self._ensure_sending()  # for what came after it had looked for the last time

    async def _send_queue(self) -> None:
        self._session.check_open()
        await self._prepare()
        limiter = self._session.limiter
        written_bytes = 0
        while self._queue:
            self._session.check_open()
            if written_bytes > BURST_BYTES:
                written_bytes = 0
                await asyncio.sleep(0)
                continue
            room = self._room()
            if room <= 0:
                await self._wait_change()
                continue
            late_s = self._refusals.late_s(self._queue[0].refusals)
            leaving = limiter.leave(min(room, len(self._queue)), late_s=late_s)
            if not leaving:
                await limiter.wait_leave(late_s=late_s)
                continue
            group = self._next_group(leaving)
            if len(group) < leaving:
                limiter.unused(leaving - len(group))
            if group:
                written_bytes += max(self._send(group), LEAST_REQUEST_BYTES)

    def _room(self) -> int:
        """How many samples may be sent now."""
        # A body that is larger than the whole budget is sent alone.
        is_fitting = not self._request_bytes or self._queue[0].size <= self._left_bytes
        if self._requests >= MOST_REQUESTS or not is_fitting:
            return 0
        if self._most_in_flight is None:
            return len(self._queue)
        return self._most_in_flight - len(self._in_flight)

    @property
    def _left_bytes(self) -> int:
        return self._session.flags.sample_dispatch_bytes_semaphore_size - self._request_bytes

    def _next_group(self, count: int) -> Group:
        """The next samples that fit into one request, written; none if none can be sent."""
        flags = self._session.flags
        most_items = max(1, min(count, flags.tinsmith_batch_items if self._takes_many else 1))
        left_bytes = min(flags.tinsmith_batch_bytes - WRAPPER_BYTES, self._left_bytes)
        group: Group = []
        while self._queue and len(group) < most_items:
            call = self._queue[0]
            if call.is_over or not self._is_written(call):
                self._queue.popleft()
                continue
            left_bytes -= call.size + 1  # and a comma
            if group and (call.goes_alone or left_bytes < 0):
                break  # it stays written: it is the next to leave
            group.append(self._queue.popleft())
            if call.goes_alone:
                break
        return group

    def _is_written(self, call: SampleCall) -> bool:
        """Encode a sample for sending; False if it cannot be sent at all."""
        if call.written is not None:
            return True
        if call.seq_id is None:
            call.seq_id = self._next_seq_id()
        try:
            call.write(self._texts, packs=self._packs and not call.goes_alone)
        except TinkerError as error:
            call.fail(error)
            return False
        return True

    @property
    def _packs(self) -> bool:
        """Whether token ids are sent as memory."""
        return self._session.flags.tinsmith_packed_prompts and self._takes_packed

    async def _wait_change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await self._changed

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    # Requests

    def _send(self, group: Group) -> int:
        """Send a group that is written; returns its size."""
        now = asyncio.get_running_loop().time()
        for call in group:
            call.sent_at = now
            self._in_flight.add(call)
        if self._stuck_after_s is not None and self._watch is None:
            self._progress_at = now
            self._watch_progress(self._stuck_after_s)
        size = sum(call.size for call in group)
        self._hold(1, size)

        def ended(task: asyncio.Task[None]) -> None:
            if (error := death_of(task)) is not None:
                fail_all(group, error)

        endpoint = ENDPOINTS["asample" if len(group) == 1 else "asample_many"]
        sent = packed_request(endpoint, _body(group))
        self._session.spawn(self._submit(group, endpoint, sent, size), ended)
        return size

    async def _submit(self, group: Group, endpoint: Endpoint, sent: HttpRequest, size: int) -> None:
        try:
            try:
                answer: Answer = await self._session.call_with(
                    endpoint,
                    sent,
                    retrier=self._retrier,
                    asleep=functools.partial(self._released, size),
                )
            finally:
                self._hold(-1, -size)
            self._take_answer(group, answer)
        except TinkerError as error:
            self._after_refusal(group, error)

    @contextlib.contextmanager
    def _released(self, size: int) -> Iterator[None]:
        """Give a request's slot and bytes back while it waits for its next attempt."""
        self._hold(-1, -size)
        try:
            yield
        finally:
            self._hold(1, size)

    def _hold(self, requests: int, size: int) -> None:
        """Take a slot and bytes, or give them back."""
        self._requests += requests
        self._request_bytes += size
        if requests < 0:
            self._wake()

    def _take_answer(self, group: Group, answer: Answer) -> None:
        if isinstance(answer, UntypedAPIFuture):
            self._accept(group[0], answer.request_id, answer.sample_sequence_ids)
            return
        if len(answer.items) != len(group):
            raise APIResponseValidationError(
                message=f"{len(group)} samples were answered with {len(answer.items)} items"
            )
        refused: Group = []
        refusal: APIStatusError | None = None
        for call, item in zip(group, answer.items, strict=True):
            if item.status is None and item.request_id is not None:
                self._accept(call, item.request_id, item.sample_sequence_ids)
            elif item.status == RateLimitError.default_status:
                refusal = error_of(item)
                self._refusals.pause(refusal, call.request.prompt, call.sent_at)
                refused.append(call)
            else:
                self._after_error(call, error_of(item))
        if refusal is not None:
            self._send_after_pause(refused, refusal)

    def _accept(self, call: SampleCall, request_id: str, sequence_ids: list[str] | None) -> None:
        call.written = None
        call.request_id = request_id
        call.sequence_ids = sequence_ids or ()
        call.failures, call.failing_since = 0, None
        if self._session.limiter.refusals:
            self._session.limiter.sample_taken()
        call.submit_s = asyncio.get_running_loop().time() - call.sent_at
        if call.is_over:
            self._on_over(call)  # it was cancelled before it had an id to be cancelled by
        else:
            self._on_accepted(call)

    # Progress

    def _watch_progress(self, delay_s: float) -> None:
        self._watch = asyncio.get_running_loop().call_later(delay_s, self._check_progress)

    def _check_progress(self) -> None:
        assert self._stuck_after_s is not None
        self._watch = None
        if not self._in_flight:
            return
        silent_s = asyncio.get_running_loop().time() - self._progress_at
        if silent_s < self._stuck_after_s:
            self._watch_progress(self._stuck_after_s - silent_s)
            return
        error = APIConnectionError(
            f"no progress: none of {len(self._in_flight)} samples in flight came back within "
            f"{self._stuck_after_s:g} s"
        )
        for call in list(self._in_flight):
            call.is_given_up = True
            call.fail(error)

    # Refusals

    def _send_after_pause(self, refused: Group, error: APIStatusError) -> None:
        for call in refused:
            call.refusals += 1
        self.put_back(refused)
        if self._refusals.is_hopeless():
            self._fail_hopeless(error)

    def _fail_hopeless(self, error: APIStatusError) -> None:
        """Fail the samples that have waited for too long while all were refused.

        Also those that were not sent in that time: they would only be refused one after another.
        """
        now = asyncio.get_running_loop().time()
        hopeless = [c for c in self._queue if self._refusals.is_hopeless(now - c.began)]
        if not hopeless:
            return
        waited_s = now - min(call.began for call in hopeless)
        self._refusals.tell_effort(error, max(call.refusals for call in hopeless), waited_s)
        fail_all(hopeless, error)
        kept = [call for call in self._queue if not call.is_over]
        self._queue.clear()
        self._queue.extend(kept)

    def _after_refusal(self, group: Group, error: TinkerError) -> None:
        """A whole request was refused: until the pause is over, or for good."""
        if isinstance(error, RateLimitError):
            self._refusals.pause(error, group[0].request.prompt, group[0].sent_at)
            self._send_after_pause(group, error)
            return
        status = error.status_code if isinstance(error, APIStatusError) else None
        is_packed = any(call.is_packed for call in group)
        if status == UNKNOWN_FORM and is_packed:
            _log.warning("prompts are sent as text from now on: %s", error)
            self._takes_packed = False
            self.put_back(group)
            return
        if status in NOT_OFFERED and len(group) > 1:
            _log.warning("samples are sent one by one from now on: %s", error)
            self._takes_many = False
        elif status not in (400, 413, 422) or (len(group) == 1 and not is_packed):
            fail_all(group, error)
            return
        # Alone and as text each is accepted, or refused with its own error.
        for call in group:
            call.goes_alone = True
        self.put_back(group)

    def _after_error(self, call: SampleCall, error: APIError) -> None:
        """One sample of a group was refused: send it again after a delay, if that may help."""
        now = asyncio.get_running_loop().time()
        if call.failing_since is None:
            call.failing_since = now
        failing_s = now - call.failing_since
        budget = self._retrier.budget
        delay_s = budget.next_delay_s(error, call.failures, failing_s) if may_pass(error) else None
        call.failures += 1
        if delay_s is None:
            error.add_note(f"sample: gave up after {call.failures} attempt(s), {failing_s:.1f} s")
            call.fail(error)
            return

        def ended(task: asyncio.Task[None]) -> None:
            if (error := death_of(task)) is not None:
                call.fail(error)

        self._session.spawn(self._put_back_after(delay_s, call), ended)

    async def _put_back_after(self, delay_s: float, call: SampleCall) -> None:
        await asyncio.sleep(delay_s)
        self.put_back([call])


def _wait_of(calls: Collection[SampleCall], reason: str, is_stalled: bool = False) -> Wait:
    oldest = min(calls, key=lambda call: call.began)
    others = f"the oldest of {len(calls)}" if len(calls) > 1 else ""
    reasons = ", ".join(text for text in (others, reason) if text)
    return Wait(oldest.future.what, oldest.began, reasons, is_stalled)


def _body(group: Group) -> PackedText:
    """A single sample as it is, several as the body of `asample_many`."""
    text: Parts = [b'{"samples":[']
    arrays: Parts = []
    for call in group:
        assert call.written is not None
        if len(group) == 1:
            return call.written
        text += [*call.written.text, b","]
        arrays += call.written.arrays
    text[-1] = b"]}"
    return PackedText(text, arrays)


def error_of(item: SampleManyItem) -> APIStatusError:
    """The error for a refused item of a group."""
    status = item.status if item.status is not None else 500
    asked_ms = item.retry_after_ms
    return status_class(status)(
        f"Error code: {status} - {item.detail or 'refused'}",
        status_code=status,
        retry_after_s=None if asked_ms is None else max(0.0, asked_ms / 1000),
    )
