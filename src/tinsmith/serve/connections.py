"""Connections that are held to bounds before there is a request to refuse.

Uvicorn gathers the head of a request for as long as it comes, however slowly and however large. A
client without a key could fill the memory with one endless header, or keep every connection that
the system allows by sending nothing. Here the head has a size and a time.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 128 * 1024
"""Of what is read without a request or a part of a body coming of it: heads, trailers, and what may
stand beside the sizes of chunks."""
HEAD_S = 30.0
"""How long the head of a request may take, from the connection or from its first byte."""

_REFUSAL = b'{"detail":"the head of the request is larger than %d bytes"}' % MOST_HEAD_BYTES
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_REFUSAL), _REFUSAL)
)


class BoundedConnection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._is_in_head = True
        self._head_alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, and refuse a head that does not end."""
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._head_bytes or self.transport.is_closing():
            return  # nearly always: all of the head came at once
        if self._head_bytes > MOST_HEAD_BYTES:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._is_in_head and self._head_alarm is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        """The head has come."""
        self._head_bytes = 0
        self._is_in_head = False
        self._head_came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body has come, which the app bounds."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next thing to come is another head, if anything is."""
        self._head_bytes = 0
        self._is_in_head = True
        super().on_message_complete()

    def _wait_for_head(self) -> None:
        self._head_alarm = self.loop.call_later(HEAD_S, self.transport.close)

    def _head_came(self) -> None:
        if self._head_alarm is not None:
            self._head_alarm.cancel()
            self._head_alarm = None
