"""Whether the store of checkpoints can be used, looked at in the background.

A store at a URL may be away, or refuse its credentials, while everything else works. It is asked
every `EVERY_S`, and at once when a save or a load found it unavailable. What is found stands on the
board, so that `/readyz` answers at once, and is logged when it changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.errors import CheckpointUnavailableError
from tinsmith.ledger.board import Board

_log = logging.getLogger(__name__)

EVERY_S = 15.0
AGAIN_S = 2.0
"""While it is unavailable, and between two looks that others asked for."""
LONGEST_CHECK_S = 30.0
"""A check that takes longer counts as failed; its thread is waited for before the next one."""


class StoreHealth:
    """That of one store. For one event loop."""

    def __init__(self, store: CheckpointStore, board: Board) -> None:
        self._store = store
        self._board = board
        self._check: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look for the first time, before anybody relies on it.

        Raises:
            CheckpointUnavailableError: A setting is wrong: waiting would not help. A store that
                is away is logged instead.
        """
        error = await self._look(writes=True)
        if error is not None and error.is_lasting:
            raise error
        self._tell(error)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        board = self._board
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if board.store_problem else EVERY_S):
                    await board.store_doubted.wait()
            # After trouble reading is not enough: what failed may have been a write.
            writes = board.store_doubted.is_set() or board.store_problem is not None
            board.store_doubted.clear()
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
                remedy="see that the service behind the URL of --checkpoints answers",
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
                "the checkpoint store is unavailable, saves fail until it is back: %s", error
            )


def _see(check: asyncio.Task[None]) -> None:
    """Look how a check ended: nobody else does if it took too long, and asyncio would log that."""
    if not check.cancelled():
        check.exception()
