"""Samples on their way to the service: gathered, numbered, sent in few requests.

Calls come from any thread into one inbox; all that came since the loop last looked leave together,
without waiting for more. Where the service takes many samples in one request they share requests,
else each has its own. They leave in the order in which they were made, at once where they may, and
else by one task: it goes on when the limiter gives leave, a slot and bytes are free, and no more
are in flight than may be. Nothing is held while it waits, so that a pause stops whatever has not
left.

A sample that is refused with 429 goes back to the front of the line, or behind some others if it
was refused before, and keeps its number; `samples/refusals.py` says how far, and for how long.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeAlias

from tinsmith.client.background import background
from tinsmith.client.queue_state import StateTeller
from tinsmith.client.retry import Retrier, may_pass
from tinsmith.client.samples.call import SampleCall
from tinsmith.client.samples.group import WRAP_BYTES, error_of
from tinsmith.client.samples.refusals import Refusals
from tinsmith.client.samples.request_texts import RequestTexts
from tinsmith.client.samples.submissions import Answer, Group, Submissions, fail_all
from tinsmith.client.session import Session, death_of
from tinsmith.client.waits import Wait
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    RateLimitError,
    TinkerError,
)
from tinsmith.types.futures import UntypedAPIFuture

_log = logging.getLogger(__name__)

BREATH_BYTES, LEAST_BREATH_BYTES = 512 * 1024, 32 * 1024
"""After writing so much the line lets it leave, and replies come in, before it writes more: bodies
that only wait to be sent take memory and connections. A request counts for no less than the
second."""
MOST_EARLY_BYTES = 32 * 1024 * 1024
"""About how much of the prompts that wait for their turn may be written before it comes."""
NOT_OFFERED = (404, 405)
UNKNOWN_FORM = 415

Wanted: TypeAlias = Callable[[], Awaitable[object]]
"""Begins what has to be waited for."""


class SampleSender:
    """The line of one sampler's samples. For the background loop, but for `put`."""

    def __init__(
        self,
        session: Session,
        *,
        retrier: Retrier,
        refusals: Refusals,
        queue: StateTeller | None = None,
        most_in_flight: int | None,
        stuck_after_s: float | None,
        next_seq_id: Callable[[], int],
        prepare: Callable[[], Wanted | None],
        on_accepted: Callable[[SampleCall], object],
        on_over: Callable[[SampleCall], object],
    ) -> None:
        """Make one.

        Args:
            session: What carries the requests.
            retrier: Tries them again.
            refusals: Says what a 429 means.
            queue: Knows the state of the queue on the server, for who waits long.
            most_in_flight: How many samples may be between submission and result; None for any.
            stuck_after_s: If for so long none of those in flight came back, they fail; None for
                never.
            next_seq_id: Gives numbers.
            prepare: Gives what must be done before the first number is given; None if it is done.
            on_accepted: Takes over a sample that the service has accepted.
            on_over: Is told of each sample's end.
        """
        self._session = session
        self._retrier = retrier
        self._refusals = refusals
        self._queue = queue
        self._most_in_flight = most_in_flight
        self._stuck_after_s = stuck_after_s
        self._progress_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._next_seq_id = next_seq_id
        self._prepare = prepare
        self._on_accepted = on_accepted
        self._on_over = on_over
        self._inbox: collections.deque[SampleCall] = collections.deque()
        self._is_woken = False
        self._line: collections.deque[SampleCall] = collections.deque()
        self._in_flight: set[SampleCall] = set()
        self._is_running = False
        self._changed: asyncio.Future[None] | None = None
        self._takes_many = True
        self._takes_packed = True
        self._texts = RequestTexts()
        self._submissions = Submissions(
            session,
            retrier,
            on_answer=self._take_answer,
            on_refusal=self._after_refusal,
            on_room=self._wake,
        )

    @property
    def in_flight(self) -> int:
        """How many samples have left and have no result yet."""
        return len(self._in_flight)

    def put(self, call: SampleCall) -> None:
        """Have a sample sent. From any thread; returns at once."""
        # As if all that wait were as long: to count them would take a lock.
        waiting_bytes = (len(self._inbox) + len(self._line)) * call.size
        if not self._packs and waiting_bytes <= MOST_EARLY_BYTES:
            call.write_early()
        # Append, then look at the flag; the loop clears the flag, then drains: nothing is missed.
        self._inbox.append(call)
        if not self._is_woken:
            self._is_woken = True
            background().call_soon(self._drain)

    def put_back(self, calls: Sequence[SampleCall]) -> None:
        """Send samples again: before all others, but for those that were refused more than once."""
        for call in reversed(calls):
            call.written = None
            self._in_flight.discard(call)
            if not call.is_over:
                self._line.insert(self._refusals.others_first(call.refusals), call)
        self._run()

    def _drain(self) -> None:
        self._is_woken = False
        loop = background().loop
        while self._inbox:
            call = self._inbox.popleft()
            if call.future.cancelled():
                continue
            call.begin(loop, self._ended)
            call.future.stop_work_with(call.ask_to_give_up)
            self._line.append(call)
        waits = background().waits
        waits.sources.add(self._waits)
        waits.look_on()
        self._run()

    def _ended(self, call: SampleCall) -> None:
        self._in_flight.discard(call)
        if call.is_drawn:
            self._progress_at = background().loop.time()
            if self._session.limiter.refusals:
                self._session.limiter.sample_drawn()
        self._wake()
        self._on_over(call)

    def _waits(self) -> list[Wait]:
        """What the samples of this sampler wait for, the oldest in the line and in flight."""
        waits: list[Wait] = []
        if self._line:
            pause = self._session.limiter.pause()
            reason = f"paused by the service: {pause.reason}" if pause.reason else "not sent yet"
            waits.append(_wait_of(self._line, reason, bool(pause.reason)))
        accepted = [call for call in self._in_flight if call.request_id is not None]
        if len(accepted) < len(self._in_flight):
            waits.append(_wait_of(self._in_flight.difference(accepted), "not accepted yet", True))
        if accepted:
            state = self._queue.latest if self._queue is not None else ""
            waits.append(_wait_of(accepted, state))
        if not waits:
            background().waits.sources.discard(self._waits)
        return waits

    # The line

    def _run(self) -> None:
        """Send what may leave now; a task sends the rest when it may."""
        if not self._line or self._is_running:
            return
        self._is_running = True
        try:
            self._send_line()
        except Exception as error:  # noqa: BLE001 - there is no task that ends with it
            self._fail_line(error)
        if self._line:
            self._session.spawn(self._send_rest(), self._rest_ended)
        else:
            self._is_running = False

    async def _send_rest(self) -> None:
        while (wait := self._send_line()) is not None:
            await wait()

    def _rest_ended(self, task: asyncio.Task[None]) -> None:
        self._is_running = False
        if (error := death_of(task)) is not None:
            self._fail_line(error)
        self._run()  # for what came after it had looked for the last time

    def _fail_line(self, error: BaseException) -> None:
        while self._line:
            self._line.popleft().fail(error)

    def _send_line(self) -> Wanted | None:
        """Send what may leave now; gives what the rest has to wait for."""
        self._session.check_open()
        preparing = self._prepare()
        if preparing is not None:
            return preparing
        limiter = self._session.limiter
        written_bytes = 0
        while self._line:
            if written_bytes > BREATH_BYTES:
                return functools.partial(asyncio.sleep, 0)
            room = self._room()
            if room <= 0:
                return self._wait_change
            late_s = self._refusals.late_s(self._line[0].refusals)
            leaving = limiter.leave(min(room, len(self._line)), late_s=late_s)
            if not leaving:
                return functools.partial(limiter.wait_leave, late_s=late_s)
            written_bytes += max(self._send_next(leaving), LEAST_BREATH_BYTES)
        return None

    def _room(self) -> int:
        """How many samples may be sent now."""
        if not self._submissions.has_room(self._line[0].size):
            return 0
        if self._most_in_flight is None:
            return len(self._line)
        return self._most_in_flight - len(self._in_flight)

    def _send_next(self, count: int) -> int:
        """Send a request with the next samples, at most so many; gives its size."""
        group = self._next_group(count)
        if len(group) < count:
            self._session.limiter.unused(count - len(group))
        if not group:
            return 0
        now = asyncio.get_running_loop().time()
        for call in group:
            call.sent_at = now
            self._in_flight.add(call)
        if self._stuck_after_s is not None and self._watch is None:
            self._progress_at = now
            self._look_later(self._stuck_after_s)
        return self._submissions.begin(group)

    def _next_group(self, count: int) -> Group:
        """The next samples that fit into one request, written; none if none can be sent."""
        flags = self._session.flags
        most_items = max(1, min(count, flags.tinsmith_batch_items if self._takes_many else 1))
        left_bytes = min(flags.tinsmith_batch_bytes - WRAP_BYTES, self._submissions.left_bytes)
        group: Group = []
        while self._line and len(group) < most_items:
            call = self._line[0]
            if call.is_over or not self._is_written(call):
                self._line.popleft()
                continue
            left_bytes -= call.size + 1  # and a comma
            if group and (call.goes_alone or left_bytes < 0):
                break  # it stays written: it is the next to leave
            group.append(self._line.popleft())
            if call.goes_alone:
                break
        return group

    def _is_written(self, call: SampleCall) -> bool:
        """Make a sample ready to leave; False if it cannot be sent at all."""
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

    # Answers

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
            self._on_over(call)  # it was given up before it had a name to be cancelled by
        else:
            self._on_accepted(call)

    # Progress

    def _look_later(self, delay_s: float) -> None:
        self._watch = asyncio.get_running_loop().call_later(delay_s, self._look_for_progress)

    def _look_for_progress(self) -> None:
        assert self._stuck_after_s is not None
        self._watch = None
        if not self._in_flight:
            return
        silent_s = asyncio.get_running_loop().time() - self._progress_at
        if silent_s < self._stuck_after_s:
            self._look_later(self._stuck_after_s - silent_s)
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
            self._give_up_hopeless(error)

    def _give_up_hopeless(self, error: APIStatusError) -> None:
        """Fail the samples that have waited for too long while all were refused.

        Also those that were not sent in that time: they would only be refused one after another.
        """
        now = asyncio.get_running_loop().time()
        hopeless = [c for c in self._line if self._refusals.is_hopeless(now - c.began)]
        if not hopeless:
            return
        waited_s = now - min(call.began for call in hopeless)
        self._refusals.tell_effort(error, max(call.refusals for call in hopeless), waited_s)
        fail_all(hopeless, error)
        kept = [call for call in self._line if not call.is_over]
        self._line.clear()
        self._line.extend(kept)

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
        # By themselves and as text they go through, or each is told its own fault.
        for call in group:
            call.goes_alone = True
        self.put_back(group)

    def _after_error(self, call: SampleCall, error: APIError) -> None:
        """A sample of many was refused: send it again after a while, if that may help."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if call.failing_since is None:
            call.failing_since = now
        failing_s = now - call.failing_since
        budget = self._retrier.budget
        delay_s = budget.next_delay_s(error, call.failures, failing_s) if may_pass(error) else None
        call.failures += 1
        if delay_s is None:
            error.add_note(f"sample: given up after {call.failures} attempt(s), {failing_s:.1f} s")
            call.fail(error)
            return

        def ended(task: asyncio.Task[None]) -> None:
            if (error := death_of(task)) is not None:
                call.fail(error)
            else:
                self.put_back([call])

        self._session.spawn(_sleep(delay_s), ended)


def _wait_of(calls: Collection[SampleCall], reason: str, is_stalled: bool = False) -> Wait:
    oldest = min(calls, key=lambda call: call.began)
    others = f"the oldest of {len(calls)}" if len(calls) > 1 else ""
    reasons = ", ".join(text for text in (others, reason) if text)
    return Wait(oldest.future.what, oldest.began, reasons, is_stalled)


async def _sleep(delay_s: float) -> None:
    await asyncio.sleep(delay_s)
