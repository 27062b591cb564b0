"""The service at a Unix socket that only its owner can connect to."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import quote

from tinsmith.serve.http_connection import App
from tinsmith.serve.http_server import HttpServer

NAME = "embedded.sock"
LONGEST_PATH = 100
"""In bytes. A Unix socket's address has room for little more."""
BACKLOG = 512
ANSWER_S = 5.0
"""How long a stop waits for the answers that are being written."""


class PrivateSocket:
    """Made by `listening`.

    Attributes:
        path: Where it is.
    """

    def __init__(self, listener: socket.socket, path: str, server: HttpServer) -> None:
        self.path = path
        self._listener = listener
        self._server = server

    def forget(self) -> None:
        """In a forked child: close what is the parent's, so that it ends with the parent.

        By number: the objects are in use by an event loop that nobody runs here.
        """
        numbers = [self._listener.fileno()]
        for connection in self._server.connections:
            its_socket = connection.transport.get_extra_info("socket")
            numbers.append(-1 if its_socket is None else its_socket.fileno())
        for number in numbers:
            with contextlib.suppress(OSError):
                os.close(number)


@contextlib.contextmanager
def socket_path(folder: Path) -> Iterator[str]:
    """Where a socket of a folder may be: in it, unless its path is too long for an address.

    What is there is removed, before the block and after it.
    """
    path = folder / NAME
    with contextlib.ExitStack() as left_behind:
        if len(os.fsencode(path)) > LONGEST_PATH:
            path = Path(tempfile.mkdtemp(prefix="tinsmith-")) / NAME
            left_behind.callback(shutil.rmtree, path.parent, ignore_errors=True)
        path.unlink(missing_ok=True)  # of a process that was killed
        left_behind.callback(path.unlink, missing_ok=True)
        yield str(path)


def socket_url(path: str) -> str:
    """What stands before paths in the addresses of a service at a socket."""
    return f"http+unix://{quote(path, safe='')}"


@contextlib.asynccontextmanager
async def listening(app: App, path: str) -> AsyncIterator[PrivateSocket]:
    """Answer requests at a socket, where there is nothing yet, while the block lasts."""
    with _bound(path) as listener:
        server = HttpServer(app)
        await server.open(listener)
        try:
            yield PrivateSocket(listener, path, server)
        finally:
            await server.close(ANSWER_S)


def _bound(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(path)
        Path(path).chmod(0o600)  # before it listens: nobody else can have connected
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
