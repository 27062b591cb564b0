"""Files from an embedded service, which has no port: HTTP over the Unix socket of its data folder.

Such an address is `http+unix://<the socket's path, quoted>/<the file's>`. Only sockets of embedded
services that are the user's own are asked: an address comes from a service, and must not make us
talk to whatever else listens on this machine.
"""

from __future__ import annotations

import http.client
import os
import pathlib
import socket
import urllib.error
from urllib.parse import unquote, urlsplit

SCHEME = "http+unix"
SOCKET = "embedded.sock"


class _Connection(http.client.HTTPConnection):
    """One connection to a socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """As of the class above."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def opened(url: str, headers: dict[str, str], timeout_s: float) -> http.client.HTTPResponse:
    """The reply to a GET.

    Raises:
        HTTPError: It is a refusal, as `urllib` has it.
        OSError: There was none, or the socket is not one of ours.
    """
    parts = urlsplit(url)
    path = unquote(parts.netloc)
    _check(pathlib.Path(path))
    connection = _Connection(path, timeout_s)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    # The reply holds the socket, and closes it.
    connection.request("GET", target, headers={"Connection": "close", **headers})
    reply = connection.getresponse()
    if reply.status >= 400 and reply.status != 416:
        reply.close()
        raise urllib.error.HTTPError(url, reply.status, reply.reason, reply.headers, None)
    return reply


def _check(path: pathlib.Path) -> None:
    if path.name != SOCKET or path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} is not the socket of an embedded service of yours")
