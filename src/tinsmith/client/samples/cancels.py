"""Samples whose results nobody wants any more, told to the service in the background.

They are told a batch at a time, so that a thousand cancelled at once do not take a thousand
connections. A cancel that fails is logged and forgotten: the service also ends what belongs to a
session that no longer beats.
"""

from __future__ import annotations

import asyncio
import collections
import logging

from tinsmith.client.session import Session
from tinsmith.errors import TinkerError
from tinsmith.types.requests import FutureCancelRequest

_log = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""How many cancels may wait; the oldest are forgotten beyond it."""


class SampleCancels:
    """The cancels of one sampler. For the background loop."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: collections.deque[str] = collections.deque(maxlen=MOST_WAITING)
        self._is_sending = False

    def add(self, request_id: str, *, is_offered: bool = False) -> None:
        """Have a sample cancelled.

        Args:
            request_id: Which.
            is_offered: The service is known to take it; else its flag decides.
        """
        if not (is_offered or self._session.dynamic_flags.sample_cancel_enabled):
            return
        self._waiting.append(request_id)
        if not self._is_sending:
            self._is_sending = True
            self._session.spawn(self._send())

    async def _send(self) -> None:
        try:
            while self._waiting:
                size = max(1, self._session.dynamic_flags.sample_cancel_max_batch_size)
                batch = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
                await asyncio.gather(*map(self._cancel, batch))
        finally:
            self._is_sending = False

    async def _cancel(self, request_id: str) -> None:
        try:
            await self._session.call("cancel_future", FutureCancelRequest(request_id=request_id))
        except TinkerError as error:
            _log.debug("%s could not be cancelled: %s", request_id, error)
