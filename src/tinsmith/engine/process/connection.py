"""How an engine elsewhere is started and spoken to: the seam between engines and processes.

A connection carries bodies of bytes in order, both ways, and says how the other end came to its
end. `ChildConnection` starts a child process on this machine and speaks to it over an inherited
socket that nobody else has. Another kind of connection only has to start `program.py`'s
`EngineProgram` somewhere and carry the same bodies.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

import msgspec

from tinsmith.engine.process.encoding import LARGEST_BODY_BYTES
from tinsmith.engine.process.stderr import Stderr
from tinsmith.errors import DecodeError

PROGRAM = "tinsmith.engine.process.program"
LENGTH_BYTES = 8
EXIT_TIMEOUT_S = 5.0
"""How long the child may take to exit after its socket is closed, before it is killed."""


class ProcessEnd(msgspec.Struct, frozen=True):
    """How the other end came to its end."""

    reason: str
    is_killed: bool = False
    """Whether it was killed from outside, probably for its memory."""
    last_output: str = ""
    """For the operator only: output caused by one user's request must not reach others."""


class EngineConnection(abc.ABC):
    """An engine's program elsewhere. For one event loop."""

    pid: int | None = None
    """Its process id, if it is on this machine."""

    @abc.abstractmethod
    def send(self, body: bytes) -> None:
        """Send a body; returns at once."""

    @abc.abstractmethod
    async def receive(self) -> bytes | None:
        """The next body; None when the other end has ended.

        Raises:
            DecodeError: What arrives is no body.
        """

    @abc.abstractmethod
    def kill(self) -> None:
        """End the other end at once, without its help; `receive` then returns None."""

    @abc.abstractmethod
    async def wait_end(self) -> ProcessEnd:
        """Wait for the end of the other end, and return how it came."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Disconnect, upon which the other end exits, and wait for that."""


class ChildConnection(EngineConnection):
    """A child process, made by `start`.

    It is started as `python -m` with an inherited socket and shares nothing else, so it can be
    started from threads, asyncio and notebooks, and needs no `__main__` guard. It has its own
    session, so that Ctrl-C reaches only this process, and it exits with this process, however that
    ends. Its stderr is forwarded (`stderr.py`).
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        assert process.stderr is not None
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer
        self._stderr = Stderr(process.stderr)

    @classmethod
    async def start(cls) -> Self:
        """Start a child process."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = _start_process(theirs)
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    def send(self, body: bytes) -> None:
        """Write a body to the socket; if that is closed, `receive` tells so."""
        with contextlib.suppress(RuntimeError, OSError):  # uvloop raises for a closed socket
            write_body(self._writer, body)

    async def receive(self) -> bytes | None:
        """Read a body from the socket."""
        return await read_body(self._reader)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self._process.kill()

    async def wait_end(self) -> ProcessEnd:
        """Wait for its exit; one that does not exit is killed."""
        code = await asyncio.to_thread(_wait_for_exit, self._process)
        last_output = await self._stderr.last_lines()
        return ProcessEnd(_reason(code), code == -signal.SIGKILL, last_output)

    async def close(self) -> None:
        """Close the socket, and wait for the exit."""
        self._writer.close()
        await asyncio.to_thread(_wait_for_exit, self._process)
        await self._stderr.close()


def write_body(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Write a body, after its length."""
    writer.write(len(body).to_bytes(LENGTH_BYTES, "little"))
    writer.write(body)


async def read_body(
    reader: asyncio.StreamReader, most_bytes: int = LARGEST_BODY_BYTES
) -> bytes | None:
    """Read a body; None when the other end is gone.

    Raises:
        DecodeError: The body has more than `most_bytes`.
    """
    try:
        size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
        if size > most_bytes:
            raise DecodeError(f"a message of {size} bytes; the limit is {most_bytes}")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _start_process(connection: socket.socket) -> subprocess.Popen[bytes]:
    """Start the child with its end of the socket."""
    # The same import path in the same order, without the current folder in front.
    path = [str(Path(place).absolute()) for place in sys.path]
    descriptor = connection.fileno()
    return subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-P", "-m", PROGRAM, str(descriptor), str(os.getpid())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # stdout belongs to the command
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process to exit, and kill it after a timeout; returns its exit code."""
    try:
        return process.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _reason(code: int) -> str:
    if code == -signal.SIGKILL:
        return "it was killed (SIGKILL), probably because the machine ran out of memory"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(-code).name}"
    return f"it exited with status {code}"
