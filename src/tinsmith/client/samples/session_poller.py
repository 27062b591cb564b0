"""One poll for all samples of a sampler, where the service offers it.

Instead of a long poll for each sample there is one for the sampler: it says which samples ended,
and takes note of which results have arrived, so that the service can drop them. A sample that has
ended is handed on, for its result to be fetched. The poll rests while nobody waits and nothing is
left to report.

If the service stops offering it, or fails for longer than the retry budget allows, the samples fall
back to polls of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tinsmith.client.poller import LONGEST_PAUSE_S, SHORTEST_POLL_S, shared_poll_delay_s
from tinsmith.client.retry import Retrier
from tinsmith.client.samples.call import SampleCall
from tinsmith.client.samples.unclaimed import Unclaimed
from tinsmith.client.session import Session, death_of
from tinsmith.errors import ClosedError, TinkerError
from tinsmith.types.futures import FutureCompletion, FutureFinished, FuturesRetrieveResponse
from tinsmith.types.requests import FuturesRetrieveRequest, SamplingSessionFuturesTarget

_log = logging.getLogger(__name__)


class SessionPoller:
    """Says when the samples of one sampler and clone have ended. For the background loop."""

    def __init__(
        self,
        session: Session,
        sampling_session_id: str,
        clone_id: int,
        *,
        retrier: Retrier,
        fetch: Callable[[SampleCall, int | None], object],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Make one.

        Args:
            session: What carries the polls.
            sampling_session_id: Whose samples.
            clone_id: Under which clone's numbers.
            retrier: Its budget says for how long failing polls are made.
            fetch: Takes over a sample that has ended, with its result's size, or one that needs a
                poll of its own.
            clock: A monotonic one.
            sleep: Waits between polls.
        """
        self._session = session
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=clone_id
        )
        self._retrier = retrier
        self._fetch = fetch
        self._clock = clock
        self._sleep = sleep
        self._cursor = 0
        self._waiting: dict[str, SampleCall] = {}
        self._unclaimed: Unclaimed[FutureCompletion] = Unclaimed()
        self._retrieved: set[str] = set()
        self._is_polling = False
        self.is_broken = False
        """Whether samples have to be polled for one by one."""

    def wait(self, call: SampleCall) -> None:
        """Hand a sample on when it has ended."""
        assert call.request_id is not None
        if self.is_broken:
            self._fetch(call, None)
            return
        known = self._unclaimed.take(call.request_id)
        if known is not None:
            self._fetch(call, _size_of(known))
            return
        self._waiting[call.request_id] = call
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
            self._retrieved.add(request_id)
            self._ensure_polling()

    def _ensure_polling(self) -> None:
        if not self._is_polling:
            self._is_polling = True
            self._session.spawn(self._poll(), self._poll_ended)

    def _poll_ended(self, task: asyncio.Task[None]) -> None:
        self._is_polling = False
        if (error := death_of(task)) is not None:
            for call in list(self._waiting.values()):
                call.fail(error)
            self._retrieved.clear()  # a closed client has nobody to report to
        if self._waiting or self._retrieved:
            self._ensure_polling()  # for what came after it had looked for the last time

    async def _poll(self) -> None:
        quick_answers = 0
        failing_since: float | None = None
        while self._waiting or self._retrieved:
            asked_at = self._clock()
            try:
                answer = await self._ask()
            except TinkerError as error:
                failing_since = asked_at if failing_since is None else failing_since
                budget = self._retrier.budget
                delay_s = shared_poll_delay_s(error, asked_at - failing_since, budget)
                if delay_s is None:
                    self._give_up(error)
                    return
                await self._sleep(delay_s)
                continue
            failing_since = None
            if answer.completions or self._clock() - asked_at >= LONGEST_PAUSE_S:
                quick_answers = 0
            else:  # a server that does not hold polls open is asked less and less often
                await self._sleep(min(SHORTEST_POLL_S * 2.0**quick_answers, LONGEST_PAUSE_S))
                quick_answers = min(quick_answers + 1, 16)

    async def _ask(self) -> FuturesRetrieveResponse:
        reported = sorted(self._retrieved)
        answer: FuturesRetrieveResponse = await self._session.call(
            "retrieve_futures",
            FuturesRetrieveRequest(
                target=self._target, prev_cursor=self._cursor, retrieved_request_ids=reported
            ),
        )
        self._retrieved.difference_update(reported)
        self._cursor = answer.cursor
        for completion in answer.completions:
            self._deliver(completion)
        return answer

    def _deliver(self, completion: FutureCompletion) -> None:
        call = self._waiting.pop(completion.request_id, None)
        if call is None:
            if not self._unclaimed.keep(completion.request_id, completion):
                self._retrieved.add(completion.request_id)
        else:
            self._fetch(call, _size_of(completion))

    def _give_up(self, error: TinkerError) -> None:
        if not isinstance(error, ClosedError):
            _log.warning("samples are polled for one by one from now on: %s", error)
        self.is_broken = True
        waiting, self._waiting = list(self._waiting.values()), {}
        for call in waiting:
            self._fetch(call, None)


def _size_of(completion: FutureCompletion) -> int | None:
    if isinstance(completion, FutureFinished):
        return completion.response_payload_uncompressed_size
    return None
