"""Results of one sampler's samples, many in one answer.

Where the service offers it, one long poll for the sampler says which samples ended and brings
their results along if they are small, so that a sample needs no request of its own after it was
submitted. What was too large for the answer is fetched a group at a time. Results that have been
read are reported with the next poll; until then the service keeps them, and a poll whose answer was
lost brings them again.

If the service stops offering it, or fails for longer than the retry budget allows, the samples fall
back to polls of their own. `docs/extensions.md` says what travels.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from tinsmith.client.poller import LONGEST_PAUSE_S, SHORTEST_POLL_S, shared_poll_delay_s
from tinsmith.client.queue_state import StateTeller
from tinsmith.client.retry import Retrier
from tinsmith.client.samples.call import SampleCall
from tinsmith.client.samples.unclaimed import Unclaimed
from tinsmith.client.session import Session, death_of
from tinsmith.errors import APIStatusError, ClosedError, ResultExpiredError, TinkerError
from tinsmith.types import extensions as x
from tinsmith.types.requests import SamplingSessionFuturesTarget
from tinsmith.wire.failures import error_from_failed

_log = logging.getLogger(__name__)

INLINE_BYTES = 256 * 1024
"""A larger result is not wanted in the answer of a poll."""
MOST_UNCLAIMED_RESULTS = 1000
"""How many completions are kept with their results until their samples ask for them."""
REPORT_AFTER_S = 1.0
"""How long reports wait for a poll that is made anyway."""
LINGER_MS = 5.0
LINGERS_FROM = 16
"""While so many samples wait, the service may wait a moment for a second result to answer with."""


class ResultFeed:
    """Settles the samples of one sampler and clone. For the background loop."""

    def __init__(
        self,
        session: Session,
        sampling_session_id: str,
        clone_id: int,
        *,
        observer: StateTeller | None = None,
        retrier: Retrier,
        fetch: Callable[[SampleCall, int | None], object],
        fail: Callable[[SampleCall, Exception], object],
    ) -> None:
        """Make one.

        Args:
            session: What carries the polls.
            sampling_session_id: Whose samples.
            clone_id: Under which clone's numbers.
            observer: Is told the state of the queue.
            retrier: Its budget says for how long failing polls are made.
            fetch: Takes over a sample that needs a poll of its own, with its result's size.
            fail: Takes over a sample that failed, or that the service has lost.
        """
        self._session = session
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=clone_id
        )
        self._observer = observer
        self._retrier = retrier
        self._fetch = fetch
        self._fail = fail
        self._cursor = 0
        self._waiting: dict[str, SampleCall] = {}
        self._unclaimed: Unclaimed[x.ResultCompletion] = Unclaimed()
        self._retrieved: dict[str, None] = {}  # in order
        self._is_polling = False
        self._is_wanted = asyncio.Event()
        self.is_broken = False
        """Whether samples have to be polled for one by one."""

    def wait(self, call: SampleCall) -> None:
        """Settle a sample when it has ended."""
        assert call.request_id is not None
        if self.is_broken:
            self._fetch(call, None)
            return
        known = self._unclaimed.take(call.request_id)
        self._waiting[call.request_id] = call
        self._is_wanted.set()
        if known is not None:
            self._deliver([known])
        self._ensure_polling()

    def forget(self, request_id: str) -> None:
        """A sample is over."""
        self._waiting.pop(request_id, None)

    def give_up(self, request_id: str) -> None:
        """Nobody wants a sample any more, though it may yet end."""
        self._waiting.pop(request_id, None)
        if self._unclaimed.give_up(request_id):
            self.report_retrieved(request_id)

    def report_retrieved(self, request_id: str) -> None:
        """Tell the service, with the next poll, that a result has arrived."""
        if not self.is_broken:
            self._retrieved[request_id] = None
            self._ensure_polling()

    # Polls

    def _ensure_polling(self) -> None:
        if not self._is_polling and not self.is_broken and (self._waiting or self._retrieved):
            self._is_polling = True
            self._session.spawn(self._poll(), self._poll_ended)

    def _poll_ended(self, task: asyncio.Task[None]) -> None:
        self._is_polling = False
        if (error := death_of(task)) is not None:
            for call in list(self._waiting.values()):
                call.fail(error)
            self._retrieved.clear()  # a closed client has nobody to report to
        self._ensure_polling()  # for what came after it had looked for the last time

    async def _poll(self) -> None:
        quick_answers = 0
        failing_since: float | None = None
        while self._waiting or self._retrieved:
            if not self._waiting:
                await self._wait_wanted()
            is_held = bool(self._waiting)  # else it is made to report alone
            asked_at = time.monotonic()
            try:
                answer = await self._ask(is_held=is_held)
            except TinkerError as error:
                failing_since = asked_at if failing_since is None else failing_since
                budget = self._retrier.budget
                delay_s = shared_poll_delay_s(error, asked_at - failing_since, budget)
                if delay_s is None:
                    self._give_up(error)
                    return
                await asyncio.sleep(delay_s)
                continue
            failing_since = None
            self._take_queue_state(answer, asked_at)
            self._deliver(answer.completions)
            if answer.completions or time.monotonic() - asked_at >= LONGEST_PAUSE_S:
                quick_answers = 0
            elif is_held:  # a server that does not hold polls open is asked less often
                await asyncio.sleep(min(SHORTEST_POLL_S * 2.0**quick_answers, LONGEST_PAUSE_S))
                quick_answers = min(quick_answers + 1, 16)

    async def _wait_wanted(self) -> None:
        """Let reports wait a moment for a sample whose poll they can ride on."""
        self._is_wanted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_AFTER_S):
                await self._is_wanted.wait()

    async def _ask(self, *, is_held: bool) -> x.ResultsRetrieveResponse:
        reported = list(self._retrieved)[: x.MOST_REPORTED]
        answer: x.ResultsRetrieveResponse = await self._session.call(
            "retrieve_results",
            x.ResultsRetrieveRequest(
                target=self._target,
                prev_cursor=self._cursor,
                retrieved_request_ids=reported,
                inline_bytes=INLINE_BYTES,
                timeout=None if is_held else 0.0,
                linger_ms=LINGER_MS if len(self._waiting) >= LINGERS_FROM else 0.0,
            ),
        )
        for request_id in reported:
            self._retrieved.pop(request_id, None)
        self._cursor = answer.cursor
        return answer

    def _take_queue_state(self, answer: x.ResultsRetrieveResponse, asked_at: float) -> None:
        limiter = self._session.limiter
        if answer.queue_state in ("paused_capacity", "paused_rate_limit"):
            asked_s = self._retrier.budget.asked_s(answer.retry_after_ms)
            limiter.queue_paused(asked_s, answer.queue_state_reason or "")
        elif answer.queue_state == "active" or answer.completions:
            limiter.queue_active(asked_at)
            if self._observer is not None:
                self._observer.queue_moves()
        if self._observer is not None and answer.queue_state not in (None, "active"):
            self._observer.tell(answer.queue_state or "", answer.queue_state_reason or "")

    def _give_up(self, error: TinkerError) -> None:
        self.is_broken = True
        self._retrieved.clear()
        waiting, self._waiting = list(self._waiting.values()), {}
        if isinstance(error, ClosedError):
            for call in waiting:
                call.fail(error)
            return
        _log.warning("samples are polled for one by one from now on: %s", error)
        for call in waiting:
            self._fetch(call, None)

    # Completions

    def _deliver(self, completions: list[x.ResultCompletion]) -> None:
        large: list[tuple[SampleCall, int | None]] = []
        for completion in completions:
            request_id = completion.request_id
            call = self._waiting.pop(request_id, None)
            if call is None:
                self._keep(completion)
            elif isinstance(completion, x.ResultFinished):
                if completion.payload is not None:
                    self._retrieved[request_id] = None
                    call.settle_with(completion.payload)
                else:
                    large.append((call, completion.response_payload_uncompressed_size))
            elif completion.error is not None:
                self._retrieved[request_id] = None
                self._fail(call, _failure(completion))
            else:
                self._fetch(call, None)
        if len(large) == 1:
            self._fetch(*large[0])
        elif large:
            self._fetch_together(large)

    def _keep(self, completion: x.ResultCompletion) -> None:
        """Nobody waits for it: it was given up, or its submission is still on its way back."""
        if len(self._unclaimed) >= MOST_UNCLAIMED_RESULTS and isinstance(
            completion, x.ResultFinished
        ):
            completion = completion.model_copy(update={"payload": None})  # can be fetched again
        if not self._unclaimed.keep(completion.request_id, completion):
            self._retrieved[completion.request_id] = None

    # Results that were too large for the poll

    def _fetch_together(self, large: list[tuple[SampleCall, int | None]]) -> None:
        """Fetch them in groups that fit into one answer each."""
        group: list[SampleCall] = []
        left_bytes = x.DEFAULT_ANSWER_BYTES
        for call, size in large:
            if size is None or size > x.DEFAULT_ANSWER_BYTES:
                self._fetch(call, size)
                continue
            if size > left_bytes:
                self._start_fetching(group)
                group, left_bytes = [], x.DEFAULT_ANSWER_BYTES
            group.append(call)
            left_bytes -= size
        self._start_fetching(group)

    def _start_fetching(self, group: list[SampleCall]) -> None:
        if not group:
            return

        def ended(task: asyncio.Task[None]) -> None:
            if (error := death_of(task)) is not None:
                for call in group:
                    call.fail(error)

        self._session.spawn(self._fetch_group(group), ended)

    async def _fetch_group(self, group: list[SampleCall]) -> None:
        by_id = {call.request_id or "": call for call in group}
        try:
            answer: x.ResultsFetchResponse = await self._session.call(
                "fetch_results", x.ResultsFetchRequest(request_ids=list(by_id))
            )
        except TinkerError as error:
            _log.debug("%d results are fetched one by one: %s", len(group), error)
            answer = x.ResultsFetchResponse(results=[])
        for result in answer.results:
            call = by_id.pop(result.request_id, None)
            if call is None:
                continue
            if isinstance(result, x.ResultFinished) and result.payload is not None:
                self.report_retrieved(result.request_id)
                call.settle_with(result.payload)
            elif isinstance(result, x.ResultFailed) and result.error is not None:
                self.report_retrieved(result.request_id)
                self._fail(call, _failure(result))
            elif isinstance(result, x.ResultGone):
                self._fail(call, _gone(result.request_id))
            else:
                by_id[result.request_id] = call
        for call in by_id.values():
            self._fetch(call, None)


def _gone(request_id: str) -> APIStatusError:
    return ResultExpiredError(
        f"the result of {request_id} is no longer kept", request_id=request_id
    )


def _failure(failed: x.ResultFailed) -> TinkerError:
    plain = {"error": failed.error, "category": failed.category}
    return error_from_failed(plain, failed.request_id)
