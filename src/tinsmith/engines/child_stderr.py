"""What an engine's process writes to stderr: passed on as it comes, and its last lines kept.

There stands what no log can tell: the trace of a crash in a library, or why a runtime gave up. It
is for the operator alone, because what one user's command makes a library print is not for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from typing import IO

MOST_LINES = 100
"""As many as the trace of a crash has, which begins with what matters."""
MOST_LINE_CHARACTERS = 300
CHUNK_BYTES = 1 << 16
END_S = 1.0
"""How long the rest may take once the process has ended; a process that it has left may go on."""


class Stderr:
    """Reads one end of a pipe. For one event loop.

    Args:
        pipe: Where the process writes to; it is closed with this.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._lines: deque[bytes] = deque(maxlen=MOST_LINES)
        self._begun = b""
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
                _pass_on(chunk)
                *whole, rest = (self._begun + chunk).split(b"\n")
                self._lines.extend(line for line in whole if line.strip())
                self._begun = rest[:CHUNK_BYTES]  # a line without an end must not fill the memory

    async def last_lines(self) -> str:
        """The last lines, when the process has ended; empty if it wrote none."""
        await asyncio.wait([self._reading], timeout=END_S)
        lines = [*self._lines, self._begun] if self._begun.strip() else list(self._lines)
        return "\n".join(
            line.decode("utf-8", "replace")[:MOST_LINE_CHARACTERS] for line in lines[-MOST_LINES:]
        )

    async def close(self) -> None:
        """Pass on what is there, and let go of the pipe."""
        await asyncio.wait([self._reading], timeout=END_S)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._pipe.close()  # which is open still if reading never began


def _pass_on(chunk: bytes) -> None:
    ours = sys.__stderr__
    if ours is None:
        return  # this process was started without: its number may be that of any file by now
    with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it was closed
        os.write(ours.fileno(), chunk)
