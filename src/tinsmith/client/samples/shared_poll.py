"""One long poll for all samples of a sampler: what its two forms have in common.

`session_poller.py` is that of plain Tinker, `result_feed.py` the one of our service. Either says
which samples ended, and takes note of which results have arrived, so that the service can drop
them. It rests while nobody waits and nothing is left to report.

If the service stops offering it, or fails for longer than the retry budget allows, the samples fall
back to polls of their own.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tinsmith.client.poller import LONGEST_PAUSE_S, SHORTEST_POLL_S, shared_poll_delay_s
from tinsmith.client.retry import Retrier
from tinsmith.client.samples.call import SampleCall
from tinsmith.client.samples.unclaimed import Unclaimed
from tinsmith.client.session import Session, death_of
from tinsmith.errors import ClosedError, TinkerError
from tinsmith.types.requests import SamplingSessionFuturesTarget

C = TypeVar("C")

_log = logging.getLogger(__name__)


class SharedPoll(abc.ABC, Generic[C]):
    """That of one sampler and clone, which is told of ends of type `C`. For the background loop."""

    def __init__(
        self,
        session: Session,
        sampling_session_id: str,
        clone_id: int,
        *,
        retrier: Retrier,
        fetch: Callable[[SampleCall, int | None], object],
    ) -> None:
        """Make one.

        Args:
            session: What carries the polls.
            sampling_session_id: Whose samples.
            clone_id: Under which clone's numbers.
            retrier: Its budget says for how long failing polls are made.
            fetch: Takes over a sample that has ended, with its result's size, or one that needs a
                poll of its own.
        """
        self._session = session
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=clone_id
        )
        self._retrier = retrier
        self._fetch = fetch
        self._cursor = 0
        self._waiting: dict[str, SampleCall] = {}
        self._unclaimed: Unclaimed[C] = Unclaimed()
        self._retrieved: dict[str, None] = {}  # in order
        self._is_polling = False
        self.is_broken = False
        """Whether samples have to be polled for one by one."""

    @abc.abstractmethod
    async def _ask(self, *, is_held: bool) -> bool:
        """Make a poll, and hand on what it tells; whether it told of any end.

        Args:
            is_held: Whether somebody waits; else it is made to report alone.
        """

    @abc.abstractmethod
    def _deliver(self, completions: Sequence[C]) -> None:
        """Hand on the ends of samples; those that nobody waits for are `Unclaimed`."""

    async def _before_report(self) -> None:
        """Nobody waits: reports may do so for a moment."""

    # Samples

    def wait(self, call: SampleCall) -> None:
        """Hand a sample on when it has ended."""
        assert call.request_id is not None
        if self.is_broken:
            self._fetch(call, None)
            return
        known = self._unclaimed.take(call.request_id)
        self._waiting[call.request_id] = call
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
                await self._before_report()
            is_held = bool(self._waiting)
            asked_at = time.monotonic()
            try:
                has_told = await self._ask(is_held=is_held)
            except TinkerError as error:
                failing_since = asked_at if failing_since is None else failing_since
                budget = self._retrier.budget
                delay_s = shared_poll_delay_s(error, asked_at - failing_since, budget)
                if delay_s is None:
                    self._give_up_polling(error)
                    return
                await asyncio.sleep(delay_s)
                continue
            failing_since = None
            if has_told or time.monotonic() - asked_at >= LONGEST_PAUSE_S:
                quick_answers = 0
            elif is_held:  # a server that does not hold polls open is asked less and less often
                await asyncio.sleep(min(SHORTEST_POLL_S * 2.0**quick_answers, LONGEST_PAUSE_S))
                quick_answers = min(quick_answers + 1, 16)

    def _reported(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._retrieved.pop(request_id, None)

    def _give_up_polling(self, error: TinkerError) -> None:
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
