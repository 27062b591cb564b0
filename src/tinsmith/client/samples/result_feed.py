"""Results of one sampler's samples, many in one answer.

Where the service offers it, one long poll for the sampler says which samples ended and brings
their results along if they are small, so that a sample needs no request of its own after it was
submitted. What was too large for the answer is fetched a group at a time. Results that have been
read are reported with the next poll; until then the service keeps them, and a poll whose answer was
lost brings them again. `docs/extensions.md` says what travels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tinsmith.client.queue_state import StateTeller
from tinsmith.client.retry import Retrier
from tinsmith.client.samples.call import SampleCall
from tinsmith.client.samples.shared_poll import Asked, SharedPoll
from tinsmith.client.session import Session, death_of
from tinsmith.errors import APIStatusError, ResultExpiredError, TinkerError
from tinsmith.types import extensions as x
from tinsmith.wire.endpoints import ENDPOINTS
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


class ResultFeed(SharedPoll[x.ResultCompletion]):
    """Settles the samples of one sampler and clone."""

    endpoint = ENDPOINTS["retrieve_results"]

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
        super().__init__(session, sampling_session_id, clone_id, retrier=retrier, fetch=fetch)
        self._observer = observer
        self._fail = fail
        self._report_timer: asyncio.TimerHandle | None = None

    # Polls

    def _ensure_polling(self) -> None:
        """Poll for those who wait; reports alone may wait for a sample whose poll they ride on.

        The timer is left when that comes: to set and cancel one for each sample costs more.
        """
        if self._waiting:
            super()._ensure_polling()
        elif self._retrieved and self._report_timer is None:
            loop = asyncio.get_running_loop()
            self._report_timer = loop.call_later(REPORT_AFTER_S, self._report)

    def _report(self) -> None:
        self._report_timer = None
        if not self._session.is_closing:  # else there is nobody to report to
            super()._ensure_polling()

    def _question(self, *, is_held: bool) -> dict[str, Any]:
        question = {
            "inline_bytes": INLINE_BYTES,
            "answer_bytes": x.DEFAULT_ANSWER_BYTES,
            "linger_ms": LINGER_MS if len(self._waiting) >= LINGERS_FROM else 0.0,
        }
        return question if is_held else {**question, "timeout": 0.0}

    def _hear(self, answer: x.ResultsRetrieveResponse, asked: Asked) -> bool:
        self._cursor = answer.cursor
        self._take_queue_state(answer, asked.at)
        self._deliver(answer.completions)
        return bool(answer.completions)

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

    def _deliver(self, completions: Sequence[x.ResultCompletion]) -> None:
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
