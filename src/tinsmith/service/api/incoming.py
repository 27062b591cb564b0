"""What the API needs of an HTTP request: to read it, to answer it, and to notice its client leave.

`http/exchange.py` implements this on a socket and in the process; `run/` puts the two together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from tinsmith.types.buffers import Memory
from tinsmith.wire.exchange import HttpReply


class ClientLeftError(Exception):
    """The client closed the connection; there is nobody to answer."""


class IncomingRequest(Protocol):
    """One request. It is answered once: by `answer`, or by `start`, `write` and `end`."""

    @property
    def method(self) -> str:
        """In capitals."""
        ...

    @property
    def path(self) -> str:
        """Still percent-encoded, without the query."""
        ...

    @property
    def query(self) -> str:
        """What follows the `?`."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Names in lower case; of a repeated one, the last."""
        ...

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        ...

    def authenticate(self, tenant_id: str) -> None:
        """Charge the body and the connection to this tenant; raises where it has too many."""
        ...

    async def read_body(self) -> Memory | None:
        """The whole body, still compressed; None if the client left before it was complete.

        Raises:
            APIStatusError: It is too large, too slow, or there is no room for it.
        """
        ...

    def read_pieces(self, most_bytes: int) -> AsyncIterator[Memory | None]:
        """The body as it arrives, in place of `read_body`; None if the client left before its end.

        Args:
            most_bytes: The largest body; `BodyTooLargeError` is raised for what is larger.

        Raises:
            APIStatusError: From the iterator: it is too large or too slow.
        """
        ...

    def hold_body(self, size: int) -> None:
        """Charge the body with its decompressed size; raises `RateLimitError` without room."""
        ...

    def release_body(self) -> None:
        """The body is not needed any more."""
        ...

    def left(self) -> asyncio.Future[None]:
        """A future that completes when the client has left; the caller cancels it."""
        ...

    async def answer(self, reply: HttpReply) -> HttpReply:
        """Send a whole answer; returns what was sent, which may be compressed or a refusal."""
        ...

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin an answer that is sent in pieces."""
        ...

    async def write(self, piece: Memory) -> None:
        """Send a piece; returns when there is room for the next."""
        ...

    async def end(self) -> None:
        """End the answer."""
        ...
