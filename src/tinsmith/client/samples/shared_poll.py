"""One long poll for all samples of a sampler: what its two forms have in common.

`session_poller.py` is that of plain Tinker, `result_feed.py` the one of our service. Either says
which samples ended, and takes note of which results have arrived, so that the service can drop
them. It rests while nobody waits and nothing is left to report.

A poll is begun at once and ends with a callback; a task goes on where one fails, or has to wait for
the next.

If the service stops offering it, or fails for longer than the retry budget allows, the samples fall
back to polls of their own.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from tinsmith.client.calls import BegunCall
from tinsmith.client.poller import LONGEST_PAUSE_S, SHORTEST_POLL_S, shared_poll_delay_s
from tinsmith.client.retry import Retrier
from tinsmith.client.samples.call import SampleCall
from tinsmith.client.samples.unclaimed import Unclaimed
from tinsmith.client.session import Session, death_of
from tinsmith.errors import ClosedError, TinkerError
from tinsmith.types.extensions import MOST_REPORTED
from tinsmith.types.requests import SamplingSessionFuturesTarget
from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.exchange import HttpRequest, json_request

C = TypeVar("C")

_log = logging.getLogger(__name__)


class Asked(msgspec.Struct):
    """A poll that is made."""

    sent: HttpRequest
    reported: Sequence[str]
    at: float
    is_held: bool
    """Whether somebody waits; else it is made to report alone."""


class SharedPoll(abc.ABC, Generic[C]):
    """That of one sampler and clone, which is told of ends of type `C`. For the background loop."""

    endpoint: ClassVar[Endpoint]
    """Where it asks."""

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
        self._quick_answers = 0
        self._failing_since: float | None = None
        self.is_broken = False
        """Whether samples have to be polled for one by one."""

    @abc.abstractmethod
    def _question(self, *, is_held: bool) -> dict[str, Any]:
        """What a poll asks, in the words of the endpoint, beside what every poll does.

        Args:
            is_held: Whether somebody waits; else it is made to report alone.
        """

    @abc.abstractmethod
    def _hear(self, answer: Any, asked: Asked) -> bool:
        """Hand on what a poll tells; whether it told of any end."""

    @abc.abstractmethod
    def _deliver(self, completions: Sequence[C]) -> None:
        """Hand on the ends of samples; those that nobody waits for are `Unclaimed`."""

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
            # Whatever else is told in this turn of the loop goes along.
            asyncio.get_running_loop().call_soon(self._ask)

    def _ask(self) -> None:
        if not self._waiting and not self._retrieved:  # those who waited have left
            self._is_polling = False
            return
        asked = self._asked()

        def answered(begun: BegunCall) -> None:
            answer = self._answer_of(begun)
            if answer is None:
                self._go_on_by_task(asked, begun)
                return
            try:
                pause_s = self._take(answer, asked)
            except Exception as error:  # noqa: BLE001 - there is no task that ends with it
                self._ended(error)
                return
            if pause_s:
                self._session.spawn(_sleep(pause_s), self._task_ended)
            else:
                self._ended(None)

        session, headers = self._session, {"x-stainless-retry-count": "0"}
        if session.begin(self.endpoint, asked.sent, headers=headers, on_over=answered) is None:
            self._go_on_by_task(asked)

    def _answer_of(self, begun: BegunCall) -> Any:
        """What came for a poll; None if it is not good, of which a task will see more."""
        reply = begun.whole_reply()
        try:
            return None if reply is None else self._session.decoded(self.endpoint, reply)
        except TinkerError:
            return None

    def _asked(self) -> Asked:
        is_held = bool(self._waiting)
        reported = list(self._retrieved)[:MOST_REPORTED]
        question = {
            "target": self._target,
            "prev_cursor": self._cursor,
            "retrieved_request_ids": reported,
            **self._question(is_held=is_held),
        }
        sent = json_request(self.endpoint, [msgspec.json.encode(question)])
        return Asked(sent, reported, time.monotonic(), is_held)

    def _go_on_by_task(self, asked: Asked, begun: BegunCall | None = None) -> None:
        self._session.spawn(self._ask_slowly(asked, begun), self._task_ended)

    async def _ask_slowly(self, asked: Asked, begun: BegunCall | None) -> None:
        try:
            answer = await self._session.call_with(self.endpoint, asked.sent, begun=begun)
        except TinkerError as error:
            if self._failing_since is None:
                self._failing_since = asked.at
            failing_s = asked.at - self._failing_since
            delay_s = shared_poll_delay_s(error, failing_s, self._retrier.budget)
            if delay_s is None:
                self._give_up_polling(error)
                return
            await asyncio.sleep(delay_s)
        else:
            await asyncio.sleep(self._take(answer, asked))

    def _take(self, answer: Any, asked: Asked) -> float:
        """Hand on what a poll told; gives how long to wait before the next."""
        self._failing_since = None
        for request_id in asked.reported:
            self._retrieved.pop(request_id, None)
        has_told = self._hear(answer, asked)
        if has_told or time.monotonic() - asked.at >= LONGEST_PAUSE_S:
            self._quick_answers = 0
        elif asked.is_held:  # a server that does not hold polls open is asked less and less often
            pause_s: float = min(SHORTEST_POLL_S * 2.0**self._quick_answers, LONGEST_PAUSE_S)
            self._quick_answers = min(self._quick_answers + 1, 16)
            return pause_s
        return 0.0

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._ended(death_of(task))

    def _ended(self, error: BaseException | None) -> None:
        """A poll is over; make the next, if it is needed."""
        self._is_polling = False
        if error is not None:
            for call in list(self._waiting.values()):
                call.fail(error)
            self._retrieved.clear()  # a closed client has nobody to report to
        self._ensure_polling()

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


async def _sleep(delay_s: float) -> None:
    await asyncio.sleep(delay_s)
