"""One poll for all samples of a sampler, where the service offers it.

Instead of a long poll for each sample there is one for the sampler: it says which samples ended,
and takes note of which results have arrived, so that the service can drop them. Whoever waits is
woken, and fetches its own result. The poll rests while nobody waits and nothing is left to report.

If the service stops offering it, or fails for longer than the retry budget allows, the samples fall
back to polls of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tinsmith.client.poller import LONGEST_PAUSE_S, SHORTEST_POLL_S
from tinsmith.client.retry import may_pass
from tinsmith.client.session import Session
from tinsmith.errors import APIError, ClosedError, TinkerError
from tinsmith.types.futures import FutureCompletion, FuturesRetrieveResponse
from tinsmith.types.requests import FuturesRetrieveRequest, SamplingSessionFuturesTarget

_log = logging.getLogger(__name__)

MOST_UNCLAIMED = 10_000
"""How many completions are kept whose samples have not asked for them yet."""


class SessionPoller:
    """Says when the samples of one sampler and clone have ended. For the background loop."""

    def __init__(
        self,
        session: Session,
        sampling_session_id: str,
        clone_id: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._session = session
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=clone_id
        )
        self._clock = clock
        self._sleep = sleep
        self._cursor = 0
        self._waiting: dict[str, asyncio.Future[FutureCompletion | None]] = {}
        self._unclaimed: dict[str, FutureCompletion] = {}
        self._retrieved: set[str] = set()
        self._is_polling = False
        self._is_broken = False

    async def wait(self, request_id: str) -> FutureCompletion | None:
        """Return when a sample has ended; None if a poll of its own has to find out."""
        if self._is_broken:
            return None
        if request_id in self._unclaimed:
            return self._unclaimed.pop(request_id)
        ended: asyncio.Future[FutureCompletion | None] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = ended
        self._ensure_polling()
        try:
            return await ended
        finally:
            self._waiting.pop(request_id, None)

    def report_retrieved(self, request_id: str) -> None:
        """Tell the service, with the next poll, that a result has arrived."""
        if not self._is_broken:
            self._retrieved.add(request_id)
            self._ensure_polling()

    def _ensure_polling(self) -> None:
        if not self._is_polling:
            self._is_polling = True
            self._session.spawn(self._poll())

    async def _poll(self) -> None:
        try:
            await self._poll_while_wanted()
        finally:
            self._is_polling = False

    async def _poll_while_wanted(self) -> None:
        quick_answers = 0
        failing_since: float | None = None
        while self._waiting or self._retrieved:
            asked_at = self._clock()
            try:
                answer = await self._ask()
            except TinkerError as error:
                failing_since = asked_at if failing_since is None else failing_since
                if not self._is_worth_waiting(error, asked_at - failing_since):
                    self._give_up(error)
                    return
                await self._sleep(LONGEST_PAUSE_S)
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
        ended = self._waiting.pop(completion.request_id, None)
        if ended is None:
            # Its submission may still be on its way back to us.
            if len(self._unclaimed) >= MOST_UNCLAIMED:
                self._unclaimed.pop(next(iter(self._unclaimed)))
            self._unclaimed[completion.request_id] = completion
        elif not ended.done():
            ended.set_result(completion)

    def _is_worth_waiting(self, error: TinkerError, failing_s: float) -> bool:
        is_passing = isinstance(error, APIError) and may_pass(error)
        return is_passing and failing_s <= self._session.retrier.budget.total_s

    def _give_up(self, error: TinkerError) -> None:
        if not isinstance(error, ClosedError):
            _log.warning("samples are polled for one by one from now on: %s", error)
        self._is_broken = True
        for ended in self._waiting.values():
            if not ended.done():
                ended.set_result(None)
