"""One sampler as the background loop sees it: who numbers, submits, fetches and gives up samples.

`SamplingClient` is its face. A sample is a `SampleCall`, which `start` makes; `samples/sender.py`
submits it; its result comes by `samples/result_feed.py` where the service offers that, else by a
poll of its own, which may first wait for the session's poll. If the server lost it meanwhile it is
submitted anew, under a new number.

Each sample under way holds a lease of the session, so that a client that is dropped does not end
its samples; the sampler itself holds none.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from tinsmith.client.budgets import Budget
from tinsmith.client.futures import APIFuture, seconds
from tinsmith.client.lease import SessionLease
from tinsmith.client.poller import Poll, room_for
from tinsmith.client.queue_state import StateTeller
from tinsmith.client.retry import Retrier
from tinsmith.client.samples.call import SampleCall
from tinsmith.client.samples.cancels import SampleCancels
from tinsmith.client.samples.refusals import Refusals
from tinsmith.client.samples.sender import SampleSender, Wanted
from tinsmith.client.session import Session, death_of
from tinsmith.errors import APIStatusError, RequestFailedError, TinkerError
from tinsmith.types import requests as r
from tinsmith.types.sampling import JoinSamplingSessionResponse, SampleResponse

if TYPE_CHECKING:
    from tinsmith.client.samples.result_feed import ResultFeed
    from tinsmith.client.samples.retry_config import RetryConfig
    from tinsmith.client.samples.session_poller import SessionPoller

GONE = 410
MOST_RESUBMISSIONS = 3
NUMBERS_PER_CLONE = 1_000_000_000


class Sampler:
    """Samples from one sampling session under one clone's numbers.

    For the background loop, but for `start`.
    """

    def __init__(
        self,
        session: Session,
        sampling_session_id: str,
        clone_id: int | None = 0,
        *,
        observer: StateTeller | None = None,
        retry_config: RetryConfig | None = None,
    ) -> None:
        self.session = session
        self.sampling_session_id = sampling_session_id
        self.retrier = session.retrier
        self._drawn_anew: tuple[type[Exception], ...] = ()
        self._most_resubmissions = 0 if session.flags.sample_no_retries else MOST_RESUBMISSIONS
        if retry_config is not None:
            self.retrier = session.retrier.with_budget(retry_config.budget(session.retrier.budget))
            self._drawn_anew = retry_config.retryable_exceptions
            if not retry_config.enable_retry_logic:
                self._most_resubmissions = 0
        self.refusals = Refusals(
            session.limiter,
            self.retrier,
            patience_s=_patience_s(self.retrier, retry_config),
        )
        self._clone_id = clone_id
        self._observer = observer
        self._joining: asyncio.Task[int] | None = None
        self._poller: SessionPoller | None = None
        self._feed: ResultFeed | None = None
        self._cancels = SampleCancels(session)
        self._sender = SampleSender(
            session,
            retrier=self.retrier,
            refusals=self.refusals,
            queue=observer,
            most_in_flight=_most_in_flight(session, retry_config),
            stuck_after_s=_stuck_after_s(session, retry_config),
            next_seq_id=self._next_seq_id,
            prepare=self._prepare,
            on_accepted=self._await_result,
            on_over=self._over,
        )
        self._room = Budget(session.flags.inflight_response_bytes_semaphore_size)

    def start(
        self,
        request: r.SampleRequest,
        lease: SessionLease,
        what: str = "sample",
        timeout_s: float | None = None,
    ) -> APIFuture[SampleResponse]:
        """Have a sample drawn. From any thread; returns at once.

        Raises:
            ClosedError: The client belongs to the process that this one was forked from.
            ValidationError: `timeout_s` is no number of seconds.
        """
        if self.session.is_inherited():
            self.session.check_open()
        limit_s = seconds(timeout_s, what)
        future: APIFuture[SampleResponse] = APIFuture(what)
        seq_id = request.seq_id
        if seq_id is not None:
            request = request.model_copy(update={"seq_id": None})
        self._sender.put(SampleCall(lease, request, future, limit_s, seq_id))
        return future

    # Numbers

    async def next_seq_id(self) -> int:
        """A number that no other sample of this sampler has."""
        if self._clone_id is None:
            await self._joined()
        return self._next_seq_id()

    def _next_seq_id(self) -> int:
        assert self._clone_id is not None
        count = self.session.next_number(f"{self.sampling_session_id} {self._clone_id}")
        return self._clone_id * NUMBERS_PER_CLONE + count

    def _prepare(self) -> Wanted | None:
        return self._joined if self._clone_id is None else None

    async def _joined(self) -> int:
        """Our clone's number: 0 for the original, else one that no other process has."""
        joining = self._joining
        if joining is None or (joining.done() and (joining.cancelled() or joining.exception())):
            joining = self._joining = asyncio.create_task(self._join())
        clone_id = await asyncio.shield(joining)
        self._clone_id = clone_id
        return clone_id

    async def _join(self) -> int:
        session = self.session
        await session.session_id()
        if not session.flags.sample_join_sampling_session:
            return _random_clone_id()
        joined: JoinSamplingSessionResponse = await session.call(
            "join_sampling_session",
            r.JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id),
        )
        return joined.client_counter

    # Results

    def _await_result(self, call: SampleCall) -> None:
        """See that an accepted sample gets its result."""
        feed = self._result_feed()
        if feed is not None:
            feed.wait(call)
        else:
            self._fetch_ended(call, None)

    def _result_feed(self) -> ResultFeed | None:
        if self._feed is None and self.session.flags.tinsmith_inline_bytes > 0:
            from tinsmith.client.samples.result_feed import ResultFeed

            self._feed = ResultFeed(
                self.session,
                self.sampling_session_id,
                self._clone_id or 0,
                observer=self._observer,
                retrier=self.retrier,
                fetch=self._fetch_ended,
                fail=self._fail_or_resubmit,
            )
        return self._feed

    def _fetch_ended(self, call: SampleCall, size: int | None) -> None:
        """Have a sample's result fetched: now if its size is known, else when it has ended."""
        poller = None if size is not None else self._session_poller()
        if poller is not None:
            poller.wait(call)
        else:
            self._fetch(call, size)

    def _fetch(self, call: SampleCall, size: int | None) -> None:
        """Fetch a sample's result by a poll of its own.

        A result that is there is asked for at once; by a task if something is to be waited for.
        """
        assert call.request_id is not None
        poll = Poll(
            self.session,
            call.request_id,
            "Sample",
            submit_s=call.submit_s,
            room=self._room,
            is_size_known=size is not None,
            observer=self._observer,
            retrier=self.retrier,
        )
        if size is None or not self._room.take_nowait(size):
            self._start_fetching(call, poll, size)
            return

        def answered(_: object) -> None:
            self._room.give_back(size)
            if call.is_over:
                return
            try:
                response = poll.found()
                if response is None:
                    self._start_fetching(call, poll, size)
                else:
                    self._take_result(call, response)
            except (TinkerError, ValueError) as error:
                self._fail_or_resubmit(call, error)
            except Exception as error:  # noqa: BLE001 - there is no task that ends with it
                call.fail(error)

        if not poll.begin(answered):
            self._room.give_back(size)
            self._start_fetching(call, poll, size)

    def _start_fetching(self, call: SampleCall, poll: Poll, size: int | None) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if (error := death_of(task)) is not None:
                call.fail(error)

        self.session.spawn(self._fetch_slowly(call, poll, size), ended)

    async def _fetch_slowly(self, call: SampleCall, poll: Poll, size: int | None) -> None:
        call.task = asyncio.current_task()
        try:
            async with room_for(self._room if size else None, size or 0):
                response: SampleResponse = await poll.result()
            self._take_result(call, response)
        except (TinkerError, ValueError) as error:
            self._fail_or_resubmit(call, error)

    def _take_result(self, call: SampleCall, response: SampleResponse) -> None:
        assert call.request_id is not None
        self.report_retrieved(call.request_id)
        if self._observer is not None:
            self._observer.queue_moves()
        call.settle(call.named(response))

    def _fail_or_resubmit(self, call: SampleCall, error: Exception) -> None:
        """A sample failed: draw another in its place if the server lost it, or as configured."""
        if isinstance(error, RequestFailedError) and call.request_id is not None:
            self.report_retrieved(call.request_id)  # the failure is its result
        is_gone = isinstance(error, APIStatusError) and error.status_code == GONE
        is_last = call.is_over or call.resubmissions >= self._most_resubmissions
        if is_last or not (is_gone or isinstance(error, self._drawn_anew)):
            call.fail(error)
            return
        call.resubmissions += 1
        call.request_id, call.seq_id, call.task = None, None, None
        self._sender.put_back([call])

    def _session_poller(self) -> SessionPoller | None:
        session = self.session
        if self._poller is None and session.flags.sample_use_retrieve_futures:
            from tinsmith.client.samples.session_poller import SessionPoller

            self._poller = SessionPoller(
                session,
                self.sampling_session_id,
                self._clone_id or 0,
                retrier=self.retrier,
                fetch=self._fetch,
            )
        return self._poller

    def report_retrieved(self, request_id: str) -> None:
        """Tell the service that a result has arrived, where it wants to know."""
        if self._feed is not None and not self._feed.is_broken:
            self._feed.report_retrieved(request_id)
        elif self._poller is not None:
            self._poller.report_retrieved(request_id)

    # The end

    def _over(self, call: SampleCall) -> None:
        """A sample is over; if that is because nobody wants it, the server is told."""
        request_id = call.request_id
        if request_id is None:
            return
        if call.is_given_up:
            if call.task is not None:
                call.task.cancel()
            self.dismiss(request_id)
            self.cancel_on_server(request_id)
            return
        for told in (self._feed, self._poller):
            if told is not None:
                told.forget(request_id)

    def dismiss(self, request_id: str) -> None:
        """Nobody waits for what polls may yet tell of a sample: it is given up, or was streamed."""
        for told in (self._feed, self._poller):
            if told is not None:
                told.give_up(request_id)

    def cancel_on_server(self, request_id: str, *, is_offered: bool = False) -> None:
        """Tell the service that a sample is not wanted any more; see `SampleCancels.add`."""
        self._cancels.add(request_id, is_offered=is_offered)


def _most_in_flight(session: Session, config: RetryConfig | None) -> int | None:
    """How many samples may be between submission and result."""
    if config is not None:
        return config.max_connections
    flags = session.flags
    if flags.sample_use_retrieve_futures or flags.tinsmith_inline_bytes > 0:
        return None  # waiting for results takes no connection
    return max(1, flags.sample_max_concurrent_requests)


def _patience_s(retrier: Retrier, config: RetryConfig | None) -> float:
    """How long a sample is sent again while all are refused with 429."""
    return retrier.budget.total_s if config is None else config.progress_timeout


def _stuck_after_s(session: Session, config: RetryConfig | None) -> float | None:
    """After how long without a result all samples in flight are given up."""
    if config is None or not config.enable_stuck_detection:
        return None
    return config.progress_timeout if session.flags.sample_enable_stuck_detection else None


def _random_clone_id() -> int:
    """A number for a clone where the service gives none out; the original is 0."""
    return 1 + int.from_bytes(os.urandom(8), "big") % NUMBERS_PER_CLONE
