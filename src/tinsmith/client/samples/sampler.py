"""One sampler on the background loop: it numbers, submits, awaits and cancels samples.

`SamplingClient` is the public class over it. `start` creates a `SampleCall`, which
`samples/sender.py` submits. Its result comes through `samples/result_feed.py` where the service
offers a poll for many samples, else through a poll of its own. If the server lost it meanwhile, it
is submitted again under a new number.

Each sample in flight holds a lease of the session, so that dropping a client does not end its
samples; the sampler itself holds none.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
from typing import TYPE_CHECKING

from tinsmith.client.futures import APIFuture, seconds
from tinsmith.client.lease import SessionLease
from tinsmith.client.limits import Budget
from tinsmith.client.poller import Poll, room_for
from tinsmith.client.retry import Retrier
from tinsmith.client.samples.refusals import Refusals
from tinsmith.client.samples.result_feed import ResultFeed, is_offered
from tinsmith.client.samples.sample_call import SampleCall
from tinsmith.client.samples.sender import SampleSender
from tinsmith.client.session import Session, death_of
from tinsmith.client.waits import StateTeller
from tinsmith.errors import APIStatusError, RequestFailedError, TinkerError
from tinsmith.types import requests as r
from tinsmith.types.sampling import JoinSamplingSessionResponse, SampleResponse

if TYPE_CHECKING:
    from tinsmith.client.samples.retry_config import RetryConfig

_log = logging.getLogger(__name__)

GONE = 410
MOST_CANCELS = 10_000
"""How many cancels may be queued; beyond it the oldest are forgotten."""
MOST_RESUBMISSIONS = 3
NUMBERS_PER_CLONE = 1_000_000_000


class Sampler:
    """Samples from one sampling session under one clone's numbers.

    For the background loop, except `start`.
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
        self._redrawn_errors: tuple[type[Exception], ...] = ()
        self._most_resubmissions = 0 if session.flags.sample_no_retries else MOST_RESUBMISSIONS
        if retry_config is not None:
            self.retrier = session.retrier.with_budget(retry_config.budget(session.retrier.budget))
            self._redrawn_errors = retry_config.retryable_exceptions
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
        self._feed: ResultFeed | None = None
        self._cancels: collections.deque[str] = collections.deque(maxlen=MOST_CANCELS)
        self._is_cancelling = False
        self._sender = SampleSender(
            session,
            retrier=self.retrier,
            refusals=self.refusals,
            queue_state=observer,
            most_in_flight=_most_in_flight(session, retry_config),
            stuck_after_s=_stuck_after_s(session, retry_config),
            prepare=self._joined,
            next_seq_id=self._next_seq_id,
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
        """Start a sample. From any thread; returns immediately.

        Raises:
            ClosedError: The client belongs to the process that this one was forked from.
            ValidationError: `timeout_s` is not a number of seconds.
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
        await self._joined()
        return self._next_seq_id()

    def _next_seq_id(self) -> int:
        assert self._clone_id is not None
        count = self.session.next_number(f"{self.sampling_session_id} {self._clone_id}")
        return self._clone_id * NUMBERS_PER_CLONE + count

    async def _joined(self) -> None:
        """Make sure that the clone has a number: 0 for the original, else its own."""
        if self._clone_id is not None:
            return
        joining = self._joining
        if joining is None or (joining.done() and (joining.cancelled() or joining.exception())):
            joining = self._joining = asyncio.create_task(self._join())
        self._clone_id = await asyncio.shield(joining)

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
        """Have an accepted sample settled: by the feed, or by a poll of its own."""
        if self._feed is None and is_offered(self.session.flags):
            self._feed = ResultFeed(
                self.session,
                self.sampling_session_id,
                self._clone_id or 0,
                observer=self._observer,
                retrier=self.retrier,
                fetch=self._fetch,
                fail=self._fail_or_resubmit,
            )
        if self._feed is not None:
            self._feed.wait(call)
        else:
            self._fetch(call, None)

    def _fetch(self, call: SampleCall, size: int | None) -> None:
        """Fetch a sample's result, whose size may be known, by a poll of its own."""

        def ended(task: asyncio.Task[None]) -> None:
            if (error := death_of(task)) is not None:
                call.fail(error)

        self.session.spawn(self._fetch_result(call, size), ended)

    async def _fetch_result(self, call: SampleCall, size: int | None) -> None:
        assert call.request_id is not None
        call.task = asyncio.current_task()
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
        if is_last or not (is_gone or isinstance(error, self._redrawn_errors)):
            call.fail(error)
            return
        call.resubmissions += 1
        call.request_id, call.seq_id, call.task = None, None, None
        self._sender.put_back([call])

    def report_retrieved(self, request_id: str) -> None:
        """Report to the service that a result has arrived, where it wants to know."""
        if self._feed is not None:
            self._feed.report_retrieved(request_id)

    # The end

    def _over(self, call: SampleCall) -> None:
        """A sample is over; if it was cancelled, the server is told."""
        request_id = call.request_id
        if request_id is None:
            return
        if call.is_given_up:
            if call.task is not None:
                call.task.cancel()
            self.dismiss(request_id)
            self.cancel_on_server(request_id)
        elif self._feed is not None:
            self._feed.forget(request_id)

    def dismiss(self, request_id: str) -> None:
        """Ignore what polls may yet bring for a sample: it was cancelled, or streamed."""
        if self._feed is not None:
            self._feed.cancel(request_id)

    def cancel_on_server(self, request_id: str, *, is_offered: bool = False) -> None:
        """Have the service cancel a sample, in the background.

        A cancel that fails is logged and forgotten: the service also ends the samples of a session
        without heartbeats.

        Args:
            request_id: Which sample.
            is_offered: The service is known to take cancels; else its flag decides.
        """
        if not (is_offered or self.session.dynamic_flags.sample_cancel_enabled):
            return
        self._cancels.append(request_id)
        if not self._is_cancelling:
            self._is_cancelling = True
            self.session.spawn(self._send_cancels())

    async def _send_cancels(self) -> None:
        """Send them a batch at a time: a thousand at once must not take a thousand connections."""
        try:
            while self._cancels:
                size = max(1, self.session.dynamic_flags.sample_cancel_max_batch_size)
                batch = [self._cancels.popleft() for _ in range(min(size, len(self._cancels)))]
                await asyncio.gather(*map(self._send_cancel, batch))
        finally:
            self._is_cancelling = False

    async def _send_cancel(self, request_id: str) -> None:
        try:
            await self.session.call("cancel_future", r.FutureCancelRequest(request_id=request_id))
        except TinkerError as error:
            _log.debug("%s could not be cancelled: %s", request_id, error)


def _most_in_flight(session: Session, config: RetryConfig | None) -> int | None:
    """How many samples may be between submission and result."""
    if config is not None:
        return config.max_connections
    if is_offered(session.flags):
        return None  # waiting for results takes no connection
    return max(1, session.flags.sample_max_concurrent_requests)


def _patience_s(retrier: Retrier, config: RetryConfig | None) -> float:
    """How long a sample is retried while all are refused with 429."""
    return retrier.budget.total_s if config is None else config.progress_timeout


def _stuck_after_s(session: Session, config: RetryConfig | None) -> float | None:
    """After how long without a result all samples in flight fail."""
    if config is None or not config.enable_stuck_detection:
        return None
    return config.progress_timeout if session.flags.sample_enable_stuck_detection else None


def _random_clone_id() -> int:
    """A number for a clone where the service assigns none; the original is 0."""
    return 1 + int.from_bytes(os.urandom(8), "big") % NUMBERS_PER_CLONE
