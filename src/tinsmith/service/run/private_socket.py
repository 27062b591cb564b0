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

from tinsmith.service.http.server import AsgiApp, HttpServer

NAME = "embedded.sock"
LONGEST_PATH = 100
"""In bytes. The address of a Unix socket allows little more."""
BACKLOG = 512
ANSWER_S = 5.0
"""How long a stop waits for responses that are being written."""


class PrivateSocket:
    """A listening socket, made by `listening`.

    Attributes:
        path: The path of the socket.
    """

    def __init__(self, listener: socket.socket, path: str, server: HttpServer) -> None:
        self.path = path
        self._listener = listener
        self._server = server

    def forget(self) -> None:
        """In a forked child: close the parent's descriptors, so that they end with the parent.

        By number, because the objects belong to an event loop that does not run here.
        """
        numbers = [self._listener.fileno()]
        for connection in self._server.state.connections:
            its_socket = connection.transport.get_extra_info("socket")
            numbers.append(-1 if its_socket is None else its_socket.fileno())
        for number in numbers:
            with contextlib.suppress(OSError):
                os.close(number)


@contextlib.contextmanager
def socket_path(folder: Path) -> Iterator[str]:
    """A path for a folder's socket: in the folder, unless that is too long for an address.

    Whatever is at the path is removed, before the block and after it.
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
    """The base URL of a service at a socket."""
    return f"http+unix://{quote(path, safe='')}"


@contextlib.asynccontextmanager
async def listening(app: AsgiApp, path: str) -> AsyncIterator[PrivateSocket]:
    """Answer requests at a new socket while the block runs."""
    with _bound(path) as listener:
        server = HttpServer(app)
        await server.open(listener)
        try:
            yield PrivateSocket(listener, path, server)
        finally:
            await server.close(ANSWER_S)


def _bound(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.callback(listener.close)
        listener.setblocking(False)
        listener.bind(path)
        Path(path).chmod(0o600)  # before it listens: nobody else can have connected
        listener.listen(BACKLOG)
        undo.pop_all()
    return listener
