"""Checks in the background whether the checkpoint store can be used.

A store at a URL may be unreachable, or refuse its credentials, while everything else works. It is
checked every `EVERY_S`, and at once when a save or a load found it unavailable. The result is put
on the board, so that `/readyz` answers at once, and is logged when it changes.
"""

from __future__ import annotations

import asyncio
import logging

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.errors import CheckpointUnavailableError
from tinsmith.service.ledger.board import Board

_log = logging.getLogger(__name__)

EVERY_S = 15.0
AGAIN_S = 2.0
"""The same while it is unavailable, and the least time between two checks."""
LONGEST_CHECK_S = 30.0
"""A check that takes longer counts as failed; its thread is waited for before the next one."""


class StoreHealth:
    """The health of one store. For one event loop."""

    def __init__(self, store: CheckpointStore, board: Board) -> None:
        self._store = store
        self._board = board
        self._check: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Check the store before anything relies on it.

        Raises:
            CheckpointUnavailableError: A setting is wrong, and waiting would not help. A store
                that is unavailable for now is logged instead.
        """
        error = await self._look(writes=True)
        if error is not None and error.is_lasting:
            raise error
        self._tell(error)

    async def run(self) -> None:
        """Check periodically until cancelled."""
        board = self._board
        while True:
            timeout_s = AGAIN_S if board.store_problem else EVERY_S
            is_doubted = await board.wait_store_doubt(timeout_s=timeout_s)
            # After an error reading is not enough: what failed may have been a write.
            writes = is_doubted or board.store_problem is not None
            self._tell(await self._look(writes=writes))
            if writes:
                await asyncio.sleep(AGAIN_S)

    async def _look(self, *, writes: bool) -> CheckpointUnavailableError | None:
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(asyncio.to_thread(self._store.check, writes=writes))
            self._check.add_done_callback(_see)
        try:
            async with asyncio.timeout(LONGEST_CHECK_S):
                await asyncio.shield(self._check)
        except CheckpointUnavailableError as exc:
            return exc
        except TimeoutError:
            return CheckpointUnavailableError(
                f"the store has not answered for {LONGEST_CHECK_S:g} s",
                reason="it does not answer",
                remedy="check that the service behind the URL of --checkpoints answers",
            )
        return None

    def _tell(self, error: CheckpointUnavailableError | None) -> None:
        before = self._board.store_problem
        if error is None:
            self._board.store_problem = None
            if before is not None:
                _log.info("the checkpoint store is available again")
            return
        reason = error.reason or "it does not answer"
        self._board.store_problem = f"the checkpoint store is unavailable: {reason}; {error.remedy}"
        if before != self._board.store_problem:
            _log.warning(
                "the checkpoint store is unavailable; saves and loads fail until it is back: %s",
                error,
            )


def _see(check: asyncio.Task[None]) -> None:
    """Retrieve the outcome of a check that took too long, or asyncio would log that nobody did."""
    if not check.cancelled():
        check.exception()
