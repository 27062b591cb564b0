"""Sockets and an event loop that hold the GIL during system calls that do not block.

Python releases the GIL around every system call. If another thread is computing, the caller gets it
back only after a switch interval (5 ms), so a few system calls per exchange soon dominate its
latency. Here `HeldSocket` reads and writes without blocking, `HeldSelector` polls for ready
descriptors, and other threads wake `HeldLoop`, all with the GIL held; the loop releases it only
when it has nothing to do. No thread starves: others still get the GIL after a switch interval, as
with any Python code.

Available only on Linux with `ctypes`; `IS_AVAILABLE` says so.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import select
import selectors
import socket
import struct
import sys
import threading
import time
from typing import Any

ROOM_BYTES = 256 * 1024
"""Maximum bytes per read."""
MOST_HELD_BYTES = 288 * 1024
"""Maximum bytes written with the GIL held: the largest piece that a connection writes, and the
headers."""
MOST_EVENTS = 512
"""Maximum events per `epoll_wait`; the kernel reports the others in the next call."""


class _Calls:
    """Functions of the C library, called with the GIL held."""

    def __init__(self) -> None:
        import ctypes

        library = ctypes.PyDLL(None, use_errno=True)
        number, size, address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
        self.recv = library.recv
        self.recv.argtypes, self.recv.restype = [number, address, size, number], ctypes.c_ssize_t
        self.send = library.send
        self.send.argtypes = [number, ctypes.c_char_p, size, number]
        self.send.restype = ctypes.c_ssize_t
        self.epoll_wait = library.epoll_wait
        self.epoll_wait.argtypes = [number, address, number, number]
        self.epoll_wait_released = ctypes.CDLL(None, use_errno=True).epoll_wait
        """The only call that releases the GIL, since it blocks."""
        self.epoll_wait_released.argtypes = self.epoll_wait.argtypes
        self.eventfd_write = library.eventfd_write
        self.eventfd_write.argtypes = [number, ctypes.c_uint64]
        self._errno = ctypes.get_errno
        self._address, self._byte = ctypes.addressof, ctypes.c_char

    def address_of(self, memory: Any) -> int:
        """The address of a writable buffer, which the caller must keep alive."""
        return self._address(self._byte.from_buffer(memory))

    def last_error(self) -> OSError:
        """The `errno` of this thread's last failed call, as the matching `OSError` subclass."""
        number = self._errno()
        return OSError(number, os.strerror(number))


def _calls() -> Any:
    if sys.platform != "linux":
        return None
    try:
        return _Calls()
    except (ImportError, OSError, AttributeError):
        return None


_c = _calls()
IS_AVAILABLE = _c is not None
"""Whether this platform and this Python support it."""


def new_socket(family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
    """A socket for an event loop; it holds the GIL where that is supported."""
    return (HeldSocket if IS_AVAILABLE else socket.socket)(family, kind, protocol)


class _Room:
    """A buffer that C functions write into.

    It is an anonymous mapping, whose unused pages take no memory: most replies fill only the first.
    """

    def __init__(self, size_bytes: int) -> None:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(memory)
        self.address: int = _c.address_of(memory)


class _Rooms(threading.local):
    """One buffer per thread: another thread may run between the read and the copy."""

    def __init__(self) -> None:
        self.room = _Room(ROOM_BYTES)


if IS_AVAILABLE:
    _rooms = _Rooms()
    # As plain integers: combining Python's enum flags is slow, and would happen on every call.
    _NOW = int(getattr(socket, "MSG_DONTWAIT", 0))
    _NOW_AND_QUIETLY = _NOW | int(getattr(socket, "MSG_NOSIGNAL", 0))


class HeldSocket(socket.socket):
    """A non-blocking socket that holds the GIL, for any kind of event loop.

    Other methods are those of `socket.socket`.
    """

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """As `socket.recv`, but returns at most `ROOM_BYTES`.

        Raises:
            BlockingIOError: No data is available yet.
        """
        room = _rooms.room
        count = _c.recv(self.fileno(), room.address, min(bufsize, ROOM_BYTES), flags | _NOW)
        if count < 0:
            raise _c.last_error()
        return room.view[:count].tobytes()

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As `socket.recv_into`.

        Raises:
            BlockingIOError: No data is available yet.
        """
        most = len(buffer) if not nbytes else min(nbytes, len(buffer))
        count: int = _c.recv(self.fileno(), _c.address_of(buffer), most, flags | _NOW)
        if count < 0:
            raise _c.last_error()
        return count

    def send(self, data: Any, flags: int = 0, /) -> int:
        """As `socket.send`.

        Raises:
            BlockingIOError: The send buffer is full.
        """
        if len(data) > MOST_HELD_BYTES:
            return super().send(data, flags)  # a large copy: release the GIL
        if type(data) is not bytes:
            data = bytes(data)  # the copy costs far less than waiting for the GIL
        count: int = _c.send(self.fileno(), data, len(data), flags | _NOW_AND_QUIETLY)
        if count < 0:
            raise _c.last_error()
        return count


if sys.platform == "linux":
    # The kernel's `struct epoll_event`: a mask, and 64 bits of data, which start with the fd.
    _IS_PACKED = os.uname().machine in ("x86_64", "i386", "i486", "i586", "i686")
    _EVENT = struct.Struct("=Ii4x" if _IS_PACKED else "=I4xi4x")
    _IN, _OUT = 1, 4

    class HeldSelector(selectors.EpollSelector):
        """A selector that releases the GIL only to block."""

        def __init__(self) -> None:
            super().__init__()
            self._fd = self.fileno()
            self._room = _Room(MOST_EVENTS * _EVENT.size)
            self._keys: dict[int, selectors.SelectorKey] = {}
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # Edge-triggered: reported once per write, so it never needs to be read.
            at_once = select.EPOLLIN | select.EPOLLET
            self._selector.register(self._bell, at_once)  # type: ignore[attr-defined]
            # Prevents a write after the close, when the descriptor may belong to another file.
            # Reentrant, since a signal handler may interrupt `ring` and call it.
            self._ringing = threading.RLock()

        def ring(self) -> None:
            """Make the current or next `select` return; may be called from any thread."""
            with self._ringing:
                if self._bell >= 0:
                    _c.eventfd_write(self._bell, 1)

        def close(self) -> None:
            """Close the selector; a later `ring` has no effect."""
            with self._ringing:
                bell, self._bell = self._bell, -1
            if bell >= 0:
                os.close(bell)
            super().close()

        def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
            """Register a file object for events."""
            key = super().register(fileobj, events, data)
            self._keys[key.fd] = key
            return key

        def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
            """Change the events or data of a registered file object."""
            key = super().modify(fileobj, events, data)
            self._keys[key.fd] = key
            return key

        def unregister(self, fileobj: Any) -> selectors.SelectorKey:
            """Unregister a file object."""
            key = super().unregister(fileobj)
            self._keys.pop(key.fd, None)
            return key

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """Wait for ready file objects; the list may be empty if `ring` ended the wait."""
            count = _c.epoll_wait(self._fd, self._room.address, MOST_EVENTS, 0)
            if count == 0 and (timeout is None or timeout > 0):
                # Rounded up: returning too early would need another call. asyncio limits the
                # timeout to a day.
                wait_ms = -1 if timeout is None else math.ceil(timeout * 1e3)
                count = _c.epoll_wait_released(self._fd, self._room.address, MOST_EVENTS, wait_ms)
            if count < 0:
                error = _c.last_error()
                if isinstance(error, InterruptedError):
                    return []
                raise error
            ready = []
            for mask, fd in _EVENT.iter_unpack(self._room.view[: count * _EVENT.size]):
                key = self._keys.get(fd)
                if key is not None:  # None for the eventfd of `ring`
                    # An error or hang-up makes the file object ready for both events.
                    events = selectors.EVENT_READ if mask & ~_OUT else 0
                    events |= selectors.EVENT_WRITE if mask & ~_IN else 0
                    ready.append((key, events & key.events))
            return ready

    class HeldLoop(asyncio.SelectorEventLoop):
        """asyncio's event loop, which holds the GIL while there is something to do."""

        time = staticmethod(time.monotonic)  # asyncio's own clock, called 20 times per sample

        def __init__(self) -> None:
            selector = HeldSelector()
            super().__init__(selector)
            # Replaces asyncio's own wake-up, which writes to a socket pair.
            self._write_to_self = selector.ring


def new_event_loop() -> asyncio.AbstractEventLoop | None:
    """An event loop that holds the GIL while it is busy; None if this is not supported."""
    return HeldLoop() if sys.platform == "linux" and IS_AVAILABLE else None
