"""The stderr of an engine's process: forwarded as it comes, with the last lines kept.

It has what logs cannot: the stack of a crash in a library, or why a runtime gave up. It is for the
operator only, since output caused by one user's request must not reach others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from typing import IO

MOST_LINES = 100
"""Enough for the stack of a crash, which starts with what matters."""
MOST_LINE_CHARACTERS = 300
CHUNK_BYTES = 1 << 16
DRAIN_TIMEOUT_S = 1.0
"""How long to wait for the rest after the exit; a grandchild may hold the pipe open."""


class Stderr:
    """Reads and forwards a pipe. For one event loop.

    Args:
        pipe: The read end of the child's stderr; closed with this object.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._lines: deque[bytes] = deque(maxlen=MOST_LINES)
        self._partial = b""
        self._pipe = pipe
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._pipe
        )
        with contextlib.closing(transport):
            while chunk := await reader.read(CHUNK_BYTES):
                _forward(chunk)
                *whole, rest = (self._partial + chunk).split(b"\n")
                self._lines.extend(line for line in whole if line.strip())
                self._partial = rest[:CHUNK_BYTES]  # bounds the memory of an endless line

    async def last_lines(self) -> str:
        """The last lines, after the process has exited; empty if there are none."""
        await asyncio.wait([self._reading], timeout=DRAIN_TIMEOUT_S)
        lines = [*self._lines, self._partial] if self._partial.strip() else list(self._lines)
        return "\n".join(
            line.decode("utf-8", "replace")[:MOST_LINE_CHARACTERS] for line in lines[-MOST_LINES:]
        )

    async def close(self) -> None:
        """Forward what is left, and close the pipe."""
        await asyncio.wait([self._reading], timeout=DRAIN_TIMEOUT_S)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._pipe.close()  # still open if reading never started


def _forward(chunk: bytes) -> None:
    ours = sys.__stderr__
    if ours is None:
        return  # started without stderr; the descriptor may be another file
    with contextlib.suppress(OSError, ValueError):  # no reader, or closed
        os.write(ours.fileno(), chunk)
