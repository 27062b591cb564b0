"""An answer as one write: its head waits for the body, which nearly always follows at once.

Uvicorn writes the two one after the other. That is a system call more for each answer, and the
client wakes up twice.
"""

from __future__ import annotations

import asyncio
from typing import Any

LARGE_BYTES = 64 * 1024
"""A larger body is not copied for this."""


class OneWrite:
    """A transport for one answer. What is not written at once is at the loop's next turn."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        self._is_begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, piece: bytes) -> None:
        """Write a piece, and what was held before it."""
        if not self._is_begun:
            self._is_begun = True
            self._head = piece
            self._loop.call_soon(self._flush)
        elif self._head is not None and len(piece) <= LARGE_BYTES:
            piece, self._head = self._head + piece, None
            self._transport.write(piece)
        else:
            self._flush()
            self._transport.write(piece)

    def close(self) -> None:
        """Write what is held, and close the connection."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self._transport.is_closing():
            self._transport.write(head)
