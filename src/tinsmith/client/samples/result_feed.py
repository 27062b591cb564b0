"""The results of one sampler's samples, by one long poll for all of them.

A poll says which samples have ended. Our service also puts small results into its answer
(`retrieve_results`, see `docs/extensions.md`), so that a sample needs no further request; plain
Tinker names the ended samples alone (`retrieve_futures`), and each result is then fetched. Results
that have been read are reported with the next poll; until then the service keeps them, and a poll
whose answer was lost brings them again.

One task polls while samples wait. If the service stops offering `retrieve_results`, or it fails for
longer than the retry budget allows, the feed continues with `retrieve_futures` where that is
offered; if that fails too, each sample is polled for by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from tinsmith.client.poller import LONGEST_PAUSE_S, SHORTEST_POLL_S
from tinsmith.client.retry import Retrier, may_pass
from tinsmith.client.samples.sample_call import SampleCall, fail_all
from tinsmith.client.session import Session, death_of
from tinsmith.client.waits import StateTeller
from tinsmith.errors import APIError, BillingError, ClosedError, ResultExpiredError, TinkerError
from tinsmith.types import extensions as x
from tinsmith.types.futures import FutureCompletion, FutureFinished, FuturesRetrieveResponse
from tinsmith.types.requests import SamplingSessionFuturesTarget
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpRequest, json_request
from tinsmith.wire.failures import error_from_failed

_log = logging.getLogger(__name__)

INLINE_BYTES = 256 * 1024
"""A larger result is not wanted in the answer of a poll."""
MOST_UNCLAIMED = 10_000
"""How many ended samples that no call waits for are remembered."""
MOST_UNCLAIMED_RESULTS = 1000
"""How many of them are kept with their results."""
REPORT_AFTER_S = 1.0
"""How long reports wait for a poll that is made anyway."""
LINGER_MS = 5.0
LINGERS_FROM = 16
"""While so many samples wait, the service may wait a moment for a second result to answer with."""

Completion: TypeAlias = x.ResultCompletion | FutureCompletion


def is_offered(flags: x.ServiceFlags) -> bool:
    """Whether the service answers one poll for many samples."""
    return flags.tinsmith_inline_bytes > 0 or flags.sample_use_retrieve_futures


class _Poll(msgspec.Struct):
    """A poll that was sent."""

    sent: HttpRequest
    reported: Sequence[str]
    at: float
    is_held: bool
    """Whether samples wait for it; else it only reports what has been read."""


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
        """Create a feed; the first sample starts its polls.

        Args:
            session: Sends the polls.
            sampling_session_id: Whose samples.
            clone_id: Under which clone's numbers.
            observer: Receives the state of the queue.
            retrier: Its budget says how long failing polls are repeated.
            fetch: Takes over a sample whose result needs a poll of its own, with the result's size.
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
        self._has_results = session.flags.tinsmith_inline_bytes > 0
        self._cursor = 0
        self._waiting: dict[str, SampleCall] = {}
        self._unclaimed: dict[str, Completion] = {}
        """Samples that ended before the answer to their submission came."""
        self._cancelled: dict[str, None] = {}
        """Samples that may yet end, though no call waits for them any more."""
        self._retrieved: dict[str, None] = {}  # in order
        self._is_polling = False
        self._report_timer: asyncio.TimerHandle | None = None
        self._quick_answers = 0
        self._failing_since: float | None = None
        self.is_broken = False
        """Whether samples have to be polled for one by one."""

    # Samples

    def wait(self, call: SampleCall) -> None:
        """Settle a sample when it has ended."""
        assert call.request_id is not None
        if self.is_broken:
            self._fetch(call, None)
            return
        known = self._unclaimed.pop(call.request_id, None)
        self._waiting[call.request_id] = call
        if known is not None:
            self._deliver([known])
        self._ensure_polling()

    def forget(self, request_id: str) -> None:
        """Stop waiting for a sample that is settled."""
        self._waiting.pop(request_id, None)

    def cancel(self, request_id: str) -> None:
        """Stop waiting for a sample that may yet end; its result is then reported as read."""
        self._waiting.pop(request_id, None)
        if self._unclaimed.pop(request_id, None) is not None:
            self.report_retrieved(request_id)
        else:
            _remember(self._cancelled, request_id, None)

    def report_retrieved(self, request_id: str) -> None:
        """Report, with the next poll, that a result has arrived."""
        if not self.is_broken:
            self._retrieved[request_id] = None
            self._ensure_polling()

    # Polls

    def _ensure_polling(self) -> None:
        """Poll for samples that wait; reports alone may wait for the next sample's poll.

        The timer keeps running when that comes: to set and cancel one per sample costs more.
        """
        if self._waiting:
            self._start_polling()
        elif self._retrieved and self._report_timer is None:
            loop = asyncio.get_running_loop()
            self._report_timer = loop.call_later(REPORT_AFTER_S, self._report)

    def _report(self) -> None:
        self._report_timer = None
        if self._retrieved and not self._session.is_closing:
            self._start_polling()

    def _start_polling(self) -> None:
        if not self._is_polling and not self.is_broken:
            self._is_polling = True
            self._session.spawn(self._poll_while_needed(), self._polling_ended)

    async def _poll_while_needed(self) -> None:
        poll = self._next_poll()
        while poll is not None:
            try:
                answer = await self._session.call_with(self._endpoint, poll.sent)
            except TinkerError as error:
                await self._after_error(error, poll)
            else:
                # Even a pause of 0 lets other samples of this loop iteration join the next poll.
                await asyncio.sleep(self._take(answer, poll))
            poll = self._next_poll() if self._waiting and not self.is_broken else None

    def _polling_ended(self, task: asyncio.Task[None]) -> None:
        self._is_polling = False
        if (error := death_of(task)) is not None:
            fail_all(list(self._waiting.values()), error)
            self._retrieved.clear()  # a closed client has nobody to report to
        self._ensure_polling()

    @property
    def _endpoint(self) -> Any:
        return ENDPOINTS["retrieve_results" if self._has_results else "retrieve_futures"]

    def _next_poll(self) -> _Poll | None:
        is_held = bool(self._waiting)
        reported = list(self._retrieved)[: x.MOST_REPORTED]
        if not is_held and not reported:
            return None
        question: dict[str, Any] = {
            "target": self._target,
            "prev_cursor": self._cursor,
            "retrieved_request_ids": reported,
        }
        if self._has_results:
            question["inline_bytes"] = INLINE_BYTES
            question["answer_bytes"] = x.DEFAULT_ANSWER_BYTES
            question["linger_ms"] = LINGER_MS if len(self._waiting) >= LINGERS_FROM else 0.0
            if not is_held:
                question["timeout"] = 0.0
        sent = json_request(self._endpoint, [msgspec.json.encode(question)])
        return _Poll(sent, reported, time.monotonic(), is_held)

    def _take(
        self, answer: x.ResultsRetrieveResponse | FuturesRetrieveResponse, poll: _Poll
    ) -> float:
        """Deliver what a poll brought; returns how long to wait before the next."""
        self._failing_since = None
        for request_id in poll.reported:
            self._retrieved.pop(request_id, None)
        self._cursor = answer.cursor
        if isinstance(answer, x.ResultsRetrieveResponse):
            self._take_queue_state(answer, poll.at)
        self._deliver(answer.completions)
        if answer.completions or time.monotonic() - poll.at >= LONGEST_PAUSE_S:
            self._quick_answers = 0
        elif poll.is_held:  # a server that does not hold polls open is asked less and less often
            pause_s: float = min(SHORTEST_POLL_S * 2.0**self._quick_answers, LONGEST_PAUSE_S)
            self._quick_answers = min(self._quick_answers + 1, 16)
            return pause_s
        return 0.0

    async def _after_error(self, error: TinkerError, poll: _Poll) -> None:
        if self._failing_since is None:
            self._failing_since = poll.at
        delay_s = self._delay_after(error, poll.at - self._failing_since)
        if delay_s is not None:
            await asyncio.sleep(delay_s)
        elif isinstance(error, ClosedError):
            raise error
        else:
            self._fall_back(error)

    def _delay_after(self, error: TinkerError, failing_s: float) -> float | None:
        """The delay before the next poll; None if there should be none."""
        budget = self._retrier.budget
        if not isinstance(error, APIError) or not may_pass(error):
            return None
        if isinstance(error, BillingError):
            return budget.next_delay_s(error, 0, failing_s)
        return LONGEST_PAUSE_S if failing_s + LONGEST_PAUSE_S <= budget.total_s else None

    def _fall_back(self, error: TinkerError) -> None:
        """Continue with plain Tinker's poll, or without one."""
        self._failing_since = None
        self._retrieved.clear()
        if self._has_results and self._session.flags.sample_use_retrieve_futures:
            _log.warning("results are fetched one by one from now on: %s", error)
            self._has_results, self._cursor = False, 0
            return
        _log.warning("samples are polled for one by one from now on: %s", error)
        self.is_broken = True
        waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            self._fetch(call, None)

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

    # Completions

    def _deliver(self, completions: Sequence[Completion]) -> None:
        large: list[tuple[SampleCall, int]] = []
        for completion in completions:
            request_id = completion.request_id
            call = self._waiting.pop(request_id, None)
            if call is None:
                self._keep(completion)
            elif isinstance(completion, x.ResultFinished) and completion.payload is not None:
                self._retrieved[request_id] = None
                call.settle_with(completion.payload)
            elif isinstance(completion, x.ResultFailed) and completion.error is not None:
                self._retrieved[request_id] = None
                self._fail(call, _failure(completion))
            else:
                size = _size_of(completion)
                if self._has_results and size is not None and size <= x.DEFAULT_ANSWER_BYTES:
                    large.append((call, size))
                else:
                    self._fetch(call, size)
        if len(large) == 1:
            self._fetch(*large[0])
        elif large:
            self._fetch_together(large)

    def _keep(self, completion: Completion) -> None:
        """Keep it for a call whose submission is not answered yet, unless that was cancelled."""
        request_id = completion.request_id
        if request_id in self._cancelled:
            del self._cancelled[request_id]
            self._retrieved[request_id] = None
            return
        if len(self._unclaimed) >= MOST_UNCLAIMED_RESULTS and isinstance(
            completion, x.ResultFinished
        ):
            completion = completion.model_copy(update={"payload": None})  # can be fetched again
        _remember(self._unclaimed, request_id, completion)

    # Results that were too large for the answer of a poll

    def _fetch_together(self, large: Sequence[tuple[SampleCall, int]]) -> None:
        """Fetch them in groups that fit into one answer each."""
        group: list[SampleCall] = []
        left_bytes = x.DEFAULT_ANSWER_BYTES
        for call, size in large:
            if size > left_bytes:
                self._start_fetching(group)
                group, left_bytes = [], x.DEFAULT_ANSWER_BYTES
            group.append(call)
            left_bytes -= size
        self._start_fetching(group)

    def _start_fetching(self, group: Sequence[SampleCall]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if (error := death_of(task)) is not None:
                fail_all(group, error)

        self._session.spawn(self._fetch_group(group), ended)

    async def _fetch_group(self, group: Sequence[SampleCall]) -> None:
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


def _size_of(completion: Completion) -> int | None:
    if isinstance(completion, x.ResultFinished | FutureFinished):
        return completion.response_payload_uncompressed_size
    return None


def _remember(known: dict[str, Any], request_id: str, value: Any) -> None:
    """Add to a bounded memory, from which the oldest is dropped."""
    if len(known) >= MOST_UNCLAIMED:
        known.pop(next(iter(known)))
    known[request_id] = value


def _gone(request_id: str) -> ResultExpiredError:
    return ResultExpiredError(f"the result of {request_id} has been deleted", request_id=request_id)


def _failure(failed: x.ResultFailed) -> TinkerError:
    plain = {"error": failed.error, "category": failed.category}
    return error_from_failed(plain, failed.request_id)
