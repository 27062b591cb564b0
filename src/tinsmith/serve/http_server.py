"""Listens for connections, and closes them in order; `http_connection.py` is one of them."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Coroutine
from email.utils import formatdate
from typing import Any

from tinsmith.serve.accepting import Acceptor
from tinsmith.serve.http_connection import App, HttpConnection
from tinsmith.server.connections import ConnectionGate

_log = logging.getLogger(__name__)

BACKLOG = 2048


class HttpServer:
    """Hands the requests of all connections to an app. For one event loop."""

    def __init__(
        self,
        app: App,
        connection: type[HttpConnection] = HttpConnection,
        gate: ConnectionGate | None = None,
    ) -> None:
        self._gate = gate or ConnectionGate()
        self.app = self._gate.around(app)
        self.is_closing = False
        self.connections: set[HttpConnection] = set()
        self._connection = connection
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_empty = asyncio.Event()
        self._dated_at = 0
        self._date_line = ""

    async def open(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Take connections from now on, from a socket that listens; it is closed by `close`."""
        listener.listen(BACKLOG)
        self._acceptor = Acceptor(listener, self._gate, lambda: self._connection(self), tls)

    async def close(self, answer_s: float) -> None:
        """Take no more, and give what is being answered so many seconds."""
        self.is_closing = True
        self._acceptor.close()
        for connection in list(self.connections):
            connection.stop()
        try:
            async with asyncio.timeout(answer_s):
                while self.connections or self._tasks:
                    self._is_empty.clear()
                    await self._is_empty.wait()
        except TimeoutError:
            _log.warning("%d requests are given up unanswered", len(self._tasks))
        for connection in list(self.connections):
            connection.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # For connections

    def start(self, answering: Coroutine[Any, Any, None]) -> None:
        """Answer a request in a task of its own."""
        task = asyncio.get_running_loop().create_task(answering)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._is_empty.set()

    def forget(self, connection: HttpConnection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        if not self.connections:
            self._is_empty.set()

    def date_line(self) -> str:
        """The header that says what time it is, made once a second."""
        now = int(time.time())
        if now != self._dated_at:
            self._dated_at = now
            self._date_line = f"Date: {formatdate(now, usegmt=True)}\r\n"
        return self._date_line
