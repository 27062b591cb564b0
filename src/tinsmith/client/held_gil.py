"""Sockets and an event loop that keep the interpreter's lock, the GIL, for calls that never wait.

Python gives the lock up around every system call. A thread that gave it up beside a thread that
computes may have it back only after a whole switch interval, 5 ms; with a few system calls for each
exchange that soon is all the time there is. Here `HeldSocket` reads and writes what
can be read and written at once, `HeldSelector` looks for what is ready, and `HeldLoop` is woken by
other threads, all with the lock held; only a loop that has nothing to do gives it up. Nobody
starves: whoever wants the lock gets it after a switch interval, as from any Python code.

Only for Linux, and where there is `ctypes`: see `IS_AVAILABLE`.
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
"""How much is read at a time."""
MOST_HELD_BYTES = 288 * 1024
"""The most that is written with the lock held: what a connection writes as one piece, and a
head."""
MOST_EVENTS = 512
"""How many descriptors are told of at a time; the kernel tells of the others next."""


class _Calls:
    """Calls of the C library, during which the lock is held."""

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
        """The one call that gives the lock up, for it is there to wait."""
        self.epoll_wait_released.argtypes = self.epoll_wait.argtypes
        self.eventfd_write = library.eventfd_write
        self.eventfd_write.argtypes = [number, ctypes.c_uint64]
        self._errno = ctypes.get_errno
        self._address, self._byte = ctypes.addressof, ctypes.c_char

    def address_of(self, memory: Any) -> int:
        """Where writable memory begins; the caller keeps it."""
        return self._address(self._byte.from_buffer(memory))

    def last_error(self) -> OSError:
        """Why the last call of this thread failed, in the class that Python has for it."""
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
"""Whether this system and this Python allow it."""


def new_socket(family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
    """A socket for an event loop: one that keeps the lock where that is possible."""
    return (HeldSocket if IS_AVAILABLE else socket.socket)(family, kind, protocol)


class _Room:
    """Memory that C writes into.

    From the system, which has no pages for what is never written: most replies fill one of many.
    """

    def __init__(self, size_bytes: int) -> None:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(memory)
        self.address: int = _c.address_of(memory)


class _Rooms(threading.local):
    """A room for each thread: another one may run between the reading and the copying."""

    def __init__(self) -> None:
        self.room = _Room(ROOM_BYTES)


if IS_AVAILABLE:
    _rooms = _Rooms()
    # As plain numbers: Python's flags are joined by Python code, for every call.
    _NOW = int(getattr(socket, "MSG_DONTWAIT", 0))
    _NOW_AND_QUIETLY = _NOW | int(getattr(socket, "MSG_NOSIGNAL", 0))


class HeldSocket(socket.socket):
    """A socket that never waits, for an event loop of any kind.

    What is not here does what it does in any socket.
    """

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """As `socket.recv`, of at most `ROOM_BYTES`.

        Raises:
            BlockingIOError: Nothing has come yet.
        """
        room = _rooms.room
        count = _c.recv(self.fileno(), room.address, min(bufsize, ROOM_BYTES), flags | _NOW)
        if count < 0:
            raise _c.last_error()
        return room.view[:count].tobytes()

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As `socket.recv_into`.

        Raises:
            BlockingIOError: Nothing has come yet.
        """
        most = len(buffer) if not nbytes else min(nbytes, len(buffer))
        count: int = _c.recv(self.fileno(), _c.address_of(buffer), most, flags | _NOW)
        if count < 0:
            raise _c.last_error()
        return count

    def send(self, data: Any, flags: int = 0, /) -> int:
        """As `socket.send`.

        Raises:
            BlockingIOError: Nothing can be taken yet.
        """
        if len(data) > MOST_HELD_BYTES:
            return super().send(data, flags)  # a large copy: others may run meanwhile
        if type(data) is not bytes:
            data = bytes(data)  # a copy takes a hundredth of the time that the lock may be away
        count: int = _c.send(self.fileno(), data, len(data), flags | _NOW_AND_QUIETLY)
        if count < 0:
            raise _c.last_error()
        return count


if sys.platform == "linux":
    # The kernel's `struct epoll_event`: a mask, and 64 bits whose first half is the descriptor.
    _IS_PACKED = os.uname().machine in ("x86_64", "i386", "i486", "i586", "i686")
    _EVENT = struct.Struct("=Ii4x" if _IS_PACKED else "=I4xi4x")
    _IN, _OUT = 1, 4

    class HeldSelector(selectors.EpollSelector):
        """Looks for what is ready, and gives the lock up only to wait."""

        def __init__(self) -> None:
            super().__init__()
            self._fd = self.fileno()
            self._room = _Room(MOST_EVENTS * _EVENT.size)
            self._keys: dict[int, selectors.SelectorKey] = {}
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # Told of once for each time that it is rung, and so never to be read.
            at_once = select.EPOLLIN | select.EPOLLET
            self._selector.register(self._bell, at_once)  # type: ignore[attr-defined]
            # Nobody may ring while it is closed: the number may be another file's a moment later.
            # Reentrant, for a signal's handler may ring while its thread does.
            self._ringing = threading.RLock()

        def ring(self) -> None:
            """Have `select` return, now or the next time. From any thread; the lock is kept."""
            with self._ringing:
                if self._bell >= 0:
                    _c.eventfd_write(self._bell, 1)

        def close(self) -> None:
            """As `selectors.EpollSelector.close`."""
            with self._ringing:
                bell, self._bell = self._bell, -1
            if bell >= 0:
                os.close(bell)
            super().close()

        def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
            """As `selectors.EpollSelector.register`."""
            key = super().register(fileobj, events, data)
            self._keys[key.fd] = key
            return key

        def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
            """As `selectors.EpollSelector.modify`."""
            key = super().modify(fileobj, events, data)
            self._keys[key.fd] = key
            return key

        def unregister(self, fileobj: Any) -> selectors.SelectorKey:
            """As `selectors.EpollSelector.unregister`."""
            key = super().unregister(fileobj)
            self._keys.pop(key.fd, None)
            return key

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """As `selectors.EpollSelector.select`; nothing is ready where it was rung for."""
            count = _c.epoll_wait(self._fd, self._room.address, MOST_EVENTS, 0)
            if count == 0 and (timeout is None or timeout > 0):
                # Rounded up, as who comes back too early has to ask again. A day is the most that
                # asyncio waits.
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
                if key is not None:  # else it is the bell
                    # An error or a hang-up is for whoever waits for anything.
                    events = selectors.EVENT_READ if mask & ~_OUT else 0
                    events |= selectors.EVENT_WRITE if mask & ~_IN else 0
                    ready.append((key, events & key.events))
            return ready

    class HeldLoop(asyncio.SelectorEventLoop):
        """asyncio's own event loop, with the lock held while there is something to do."""

        time = staticmethod(time.monotonic)  # asyncio's own clock, asked twenty times for a sample

        def __init__(self) -> None:
            selector = HeldSelector()
            super().__init__(selector)
            # Wakes the loop. The name is asyncio's: without it, asyncio would use its own pipe.
            self._write_to_self = selector.ring


def new_event_loop() -> asyncio.AbstractEventLoop | None:
    """An event loop that keeps the lock while there is something to do; None where it cannot."""
    return HeldLoop() if sys.platform == "linux" and IS_AVAILABLE else None
