"""Requests with samples in them: sent at once where they can be, and else by a task.

Each holds a slot and bytes until it is answered, but for the time that it waits for its next try.
What an answer means for the samples is for who sends them (`samples/sender.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from tinsmith.client.calls import BegunCall
from tinsmith.client.retry import Retrier
from tinsmith.client.samples.call import SampleCall
from tinsmith.client.samples.group import joined
from tinsmith.client.session import Session, death_of
from tinsmith.errors import TinkerError
from tinsmith.types.extensions import SampleManyResponse
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpRequest, packed_request

MOST_REQUESTS = 400
"""How many may be on their way at once; waiting for results is free."""

Group: TypeAlias = list[SampleCall]
"""The samples of one request."""
Answer: TypeAlias = UntypedAPIFuture | SampleManyResponse


class Submissions:
    """Those of one sampler. For the background loop."""

    def __init__(
        self,
        session: Session,
        retrier: Retrier,
        *,
        on_answer: Callable[[Group, Answer], object],
        on_refusal: Callable[[Group, TinkerError], object],
        on_room: Callable[[], object],
    ) -> None:
        """Make them.

        Args:
            session: What carries the requests.
            retrier: Tries them again.
            on_answer: Is told what came for a group, and may raise what is wrong with it.
            on_refusal: Is told why a group was not taken, or its answer not.
            on_room: Is told that a slot and bytes are free again.
        """
        self._session = session
        self._retrier = retrier
        self._on_answer = on_answer
        self._on_refusal = on_refusal
        self._on_room = on_room
        self._requests = 0
        self._bytes = 0

    @property
    def left_bytes(self) -> int:
        """How much more may be on its way."""
        return self._session.flags.sample_dispatch_bytes_semaphore_size - self._bytes

    def has_room(self, size: int) -> bool:
        """Whether a request with a sample of that size may leave now."""
        # What is larger than all that may be goes alone.
        is_fitting = not self._bytes or size <= self.left_bytes
        return self._requests < MOST_REQUESTS and is_fitting

    def begin(self, group: Group) -> int:
        """Send a group that is written; gives its size."""
        size = sum(call.size for call in group)
        self._hold(1, size)
        endpoint = ENDPOINTS["asample" if len(group) == 1 else "asample_many"]
        assert group[0].written is not None
        sent = packed_request(endpoint, group[0].written if len(group) == 1 else joined(group))

        def answered(begun: BegunCall) -> None:
            """Take the first answer without a task, if it is a good one."""
            reply = begun.whole_reply()
            if reply is None:
                self._send_by_task(group, size, endpoint, sent, begun)
                return
            self._retrier.reached()
            self._hold(-1, -size)
            try:
                self._on_answer(group, self._session.decoded(endpoint, reply))
            except TinkerError as error:
                self._on_refusal(group, error)
            except Exception as error:  # noqa: BLE001 - there is no task that ends with it
                fail_all(group, error)

        headers = {"x-stainless-retry-count": "0"}
        if self._session.begin(endpoint, sent, headers=headers, on_over=answered) is None:
            self._send_by_task(group, size, endpoint, sent)
        return size

    def _send_by_task(
        self,
        group: Group,
        size: int,
        endpoint: Endpoint,
        sent: HttpRequest,
        begun: BegunCall | None = None,
    ) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._hold(-1, -size)
            if (error := death_of(task)) is not None:
                fail_all(group, error)

        self._session.spawn(self._send(group, size, endpoint, sent, begun), ended)

    async def _send(
        self,
        group: Group,
        size: int,
        endpoint: Endpoint,
        sent: HttpRequest,
        begun: BegunCall | None,
    ) -> None:
        asleep = functools.partial(self._given_back, size)
        try:
            answer = await self._session.call_with(
                endpoint, sent, begun=begun, retrier=self._retrier, asleep=asleep
            )
            self._on_answer(group, answer)
        except TinkerError as error:
            self._on_refusal(group, error)

    @contextlib.contextmanager
    def _given_back(self, size: int) -> Iterator[None]:
        """Let others have a request's slot and bytes while it waits for its next try."""
        self._hold(-1, -size)
        try:
            yield
        finally:
            self._hold(1, size)

    def _hold(self, requests: int, size: int) -> None:
        """Take a slot and bytes, or give them back."""
        self._requests += requests
        self._bytes += size
        if requests < 0:
            self._on_room()


def fail_all(calls: Sequence[SampleCall], error: BaseException) -> None:
    """End samples that nothing more can be done for."""
    for call in calls:
        call.fail(error)
