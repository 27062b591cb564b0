"""Uvicorn's HTTP, with bounds on what comes before a request: its head, and the time for it.

Uvicorn holds a head however long it is, and waits for one however long it takes: a few clients that
never finish theirs could use up the memory or the connections of a service, without any key.
Answers leave in one write where they can (`one_write.py`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinsmith.serve.one_write import OneWrite

MOST_HEAD_BYTES = 128 * 1024
"""Of what is read without a request or a part of a body coming of it: heads, trailers, and what may
stand beside the sizes of chunks."""
HEAD_S = 30.0
"""How long a head may take, from the opening of the connection or from its first byte."""

KEEP_ALIVE_S = 90.0
"""Longer than our clients and the official ones keep an idle connection, so that they close it."""

_DETAIL = b'{"detail":"the request\'s headers are larger than 131072 bytes"}'


def http_options() -> dict[str, Any]:
    """What uvicorn is told wherever it serves us."""
    return {
        "http": BoundedHttp,
        "ws": "none",
        "lifespan": "off",
        "loop": "none",
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "proxy_headers": False,  # whoever connects could claim anything
        "timeout_keep_alive": int(KEEP_ALIVE_S),
    }


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    head_s = HEAD_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_in_head = True
        self._head_bytes = 0
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, and refuse a head that has become too large."""
        if self.transport.is_closing():
            return
        if self._is_in_head and self._patience is None:
            self._wait_for_head()  # between two requests uvicorn's own limit holds
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        """A head has ended."""
        self._is_in_head = False
        self._head_bytes = 0
        self._stop_waiting()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.transport = OneWrite(self.transport, self.loop)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """A part of the body has come, which the app bounds."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes next is another head."""
        super().on_message_complete()
        self._is_in_head = True
        self._head_bytes = 0

    def _wait_for_head(self) -> None:
        self._patience = self.loop.call_later(self.head_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self._is_in_head and not self.transport.is_closing():
            self.transport.close()

    def _refuse(self) -> None:
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
            b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: " + str(len(_DETAIL)).encode() + b"\r\n\r\n" + _DETAIL
        )
        self.transport.close()
