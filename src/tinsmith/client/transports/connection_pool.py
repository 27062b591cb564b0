"""The connections for one purpose: who gets one next, when more are made, and when they are let go.

Knows nothing of what travels over them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib

from tinsmith.client.transports.address import Address
from tinsmith.client.transports.base import KEEP_ALIVE_S, TransportSettings
from tinsmith.client.transports.connection import Connection
from tinsmith.client.transports.reply_protocol import ConnectionLostError

FIRST_CONNECTIONS = 8
ROUND_S = 0.005
"""While calls wait, as many connections are opened in each such time as there are already, and so
many at least."""


class ConnectionPool:
    """The connections for one purpose.

    Whoever finds none free waits for the next that is given back or made, whichever comes first.
    They are made in rounds, each as large as what is there, but not for those whom the exchanges of
    another such round would serve: a burst of short calls is served by a few of them, and a burst
    of long ones soon has as many as it needs.
    """

    def __init__(self, address: Address, settings: TransportSettings) -> None:
        self._address = address
        self._most = settings.most_connections
        self._most_bytes = settings.limits.memory_bytes
        self._free: list[Connection] = []
        self._all: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: collections.deque[asyncio.Future[Connection]] = collections.deque()
        self._round: asyncio.TimerHandle | None = None
        self._served = 0
        """How many were given a used connection in this round."""
        self._sweep: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def free(self) -> Connection | None:
        """A connection that nobody uses, for one exchange; to be given back after it."""
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                return connection
        return None

    async def next_free(self, deadline: float) -> Connection:
        """As `free`, for the first that is given back or made.

        Raises:
            TimeoutError: There was none before `deadline`.
            OSError: None could be made.
        """
        turn = self.turn()
        try:
            async with asyncio.timeout_at(deadline):
                return await turn
        except (asyncio.CancelledError, TimeoutError):
            self.leave(turn)
            raise

    def turn(self) -> asyncio.Future[Connection]:
        """As `next_free`, without waiting; whoever does not want it any more calls `leave`."""
        turn: asyncio.Future[Connection] = self._loop.create_future()
        self._waiting.append(turn)
        self._open_more()
        return turn

    def leave(self, turn: asyncio.Future[Connection]) -> None:
        """Wait no longer; a connection that has just been given is given back."""
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.give_back(turn.result())
        else:
            with contextlib.suppress(ValueError):
                self._waiting.remove(turn)

    def close_free(self) -> None:
        """Close those that nobody uses: what ended one of them may have ended all."""
        for connection in self._free:
            connection.close()
        self._free.clear()

    def give_back(self, connection: Connection) -> None:
        """Let the next one have it, or keep it for a while."""
        if not connection.is_open:
            connection.close()
            return
        if self._waiting:
            self._served += 1
        self._hand_out(connection)

    def _hand_out(self, connection: Connection) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(connection)
                return
        connection.idle_since = self._loop.time()
        self._free.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(KEEP_ALIVE_S, self._close_old)

    def _open_more(self, soon_served: int = 0) -> None:
        """Have more connections made, if those who wait need them and there may be more."""
        if self._round is not None:
            return  # another round is coming
        count = min(
            len(self._waiting) - len(self._opening) - soon_served,
            max(FIRST_CONNECTIONS, len(self._all)),
            self._most - len(self._all) - len(self._opening),
        )
        for _ in range(count):
            task = self._loop.create_task(self._open())
            self._opening.add(task)
            task.add_done_callback(self._opened)
        if count > 0 or (soon_served and self._waiting):
            self._served = 0
            self._round = self._loop.call_later(ROUND_S, self._next_round)

    def _next_round(self) -> None:
        self._round = None
        self._open_more(self._served)

    async def _open(self) -> None:
        connection = Connection(self._lost, self._most_bytes, self._loop)
        try:
            await self._address.connect(connection)
        except OSError as error:
            self._fail_next(error)
            return
        if not connection.is_open:  # ended as soon as it was made
            self._fail_next(connection.lost("the server closed the connection"))
            return
        self._all.add(connection)
        self._hand_out(connection)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled():
            if (error := task.exception()) is not None:
                self._fail_next(error)
            self._open_more()

    def _fail_next(self, error: BaseException) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)
                return

    def _lost(self, connection: Connection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._free.remove(connection)
        self._open_more()

    def _close_old(self) -> None:
        """Close what was idle for too long; the oldest come first."""
        oldest_kept = self._loop.time() - KEEP_ALIVE_S
        while self._free and self._free[0].idle_since <= oldest_kept:
            self._free.pop(0).close()
        self._sweep = None
        if self._free:
            delay_s = self._free[0].idle_since - oldest_kept
            self._sweep = self._loop.call_later(delay_s, self._close_old)

    async def close(self) -> None:
        """Close all connections; whoever waits or exchanges fails."""
        for timer in (self._round, self._sweep):
            if timer is not None:
                timer.cancel()
        # Before anything else ends: whoever still waited would have another connection made.
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(ConnectionLostError("the client was closed", is_untouched=False))
        self._waiting.clear()
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in list(self._all):
            connection.close()
        await asyncio.sleep(0)  # lets the event loop close the sockets
