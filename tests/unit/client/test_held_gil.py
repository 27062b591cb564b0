"""Sockets, a selector and an event loop that keep the interpreter's lock while they have work."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tinsmith.client import held_gil

pytestmark = pytest.mark.skipif(not held_gil.IS_AVAILABLE, reason="needs Linux and ctypes")

if sys.platform == "linux":
    from tinsmith.client.held_gil import HeldLoop, HeldSelector, HeldSocket

WAIT_S = 60.0


@contextlib.contextmanager
def pairs(count: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Connected sockets that keep the lock, both ends."""
    made = [socket.socketpair() for _ in range(count)]
    held = [
        tuple(HeldSocket(end.family, end.type, end.proto, end.detach()) for end in ends)
        for ends in made
    ]
    try:
        for ends in held:
            for end in ends:
                end.setblocking(False)
        yield [(ours, theirs) for ours, theirs in held]
    finally:
        for ends in held:
            for end in ends:
                end.close()


@contextlib.contextmanager
def hand_overs() -> Iterator[Callable[[], int]]:
    """How often another thread got the lock, which nobody takes by force meanwhile."""
    count = 0
    is_over = False

    def take_it_whenever_it_is_free() -> None:
        nonlocal count
        while not is_over:
            count += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=take_it_whenever_it_is_free)
    sys.setswitchinterval(1000)
    try:
        thread.start()
        yield lambda: count
    finally:
        is_over = True
        sys.setswitchinterval(interval)
        thread.join(WAIT_S)


# The lock


def test_reading_and_writing_do_not_release_the_gil() -> None:
    room = bytearray(100)
    with pairs(1) as [(ours, theirs)], hand_overs() as handed_over:
        before = handed_over()
        for _ in range(2000):
            theirs.send(b"request")
            ours.recv(100)
            theirs.send(b"request")
            ours.recv_into(memoryview(room))
            with contextlib.suppress(BlockingIOError):
                ours.recv(100)
        after = handed_over()

    assert after == before


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_the_pieces_of_a_large_body_are_written_with_the_gil_held(
    kind: Callable[[bytes], bytes | bytearray | memoryview],
) -> None:
    piece = kind(bytes(128 * 1024))
    with pairs(1) as [(ours, theirs)], hand_overs() as handed_over:
        before = handed_over()
        for _ in range(200):
            theirs.send(piece)
            with contextlib.suppress(BlockingIOError):
                while True:
                    ours.recv(len(piece))
        after = handed_over()

    assert after == before


def test_a_plain_socket_releases_the_gil() -> None:
    """Else the other tests would prove nothing."""
    ours, theirs = socket.socketpair()
    with ours, theirs, hand_overs() as handed_over:
        before, deadline = handed_over(), time.monotonic() + WAIT_S
        while handed_over() == before and time.monotonic() < deadline:
            theirs.send(b"request")
            ours.recv(100)
        after = handed_over()

    assert after > before


def test_many_exchanges_on_the_loop_do_not_release_the_gil() -> None:
    """However many connections have something to read, and whoever wakes the loop."""
    count = 60

    async def exchange_all(handed_over: Callable[[], int]) -> tuple[int, list[bytes]]:
        loop = asyncio.get_running_loop()
        with pairs(count) as sockets:
            replies = [_Reply() for _ in sockets]
            for (ours, theirs), reply in zip(sockets, replies, strict=True):
                await loop.create_unix_connection(lambda reply=reply: reply, sock=ours)  # type: ignore[misc]
                loop.add_reader(theirs, _echo, theirs)
            before = handed_over()
            for number in range(20):
                for reply in replies:
                    reply.ask(b"%d" % number)
                loop.call_soon_threadsafe(int)
                await asyncio.gather(*(reply.come for reply in replies))
            handed = handed_over() - before
            for (_, theirs), reply in zip(sockets, replies, strict=True):
                loop.remove_reader(theirs)
                reply.transport.abort()
            await asyncio.sleep(0)
        return handed, [reply.come.result() for reply in replies]

    with hand_overs() as handed_over, asyncio.Runner(loop_factory=HeldLoop) as runner:
        handed, results = runner.run(exchange_all(handed_over))

    assert handed == 0
    assert results == [b"19"] * count


class _Reply(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, question: bytes) -> None:
        self.come: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.transport.write(question)

    def data_received(self, data: bytes) -> None:
        self.come.set_result(data)


def _echo(theirs: socket.socket) -> None:
    theirs.send(theirs.recv(1000))


def _fill(end: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            end.send(bytes(1000))


# Sockets


def test_received_bytes_do_not_change_when_more_are_read() -> None:
    with pairs(2) as [(ours, theirs), (others, far)]:
        theirs.send(b"first")
        first = ours.recv(100)
        far.send(b"other")
        other = others.recv(100)

    assert (first, other) == (b"first", b"other")


def test_threads_that_read_concurrently_do_not_mix_their_bytes() -> None:
    wrong: list[bytes] = []

    def read(letter: bytes) -> None:
        with pairs(1) as [(ours, theirs)]:
            for _ in range(3000):
                theirs.send(letter * 500)
                if (came := ours.recv(500)) != letter * 500:
                    wrong.append(came)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=read, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    sys.setswitchinterval(interval)

    assert not wrong


def test_empty_full_and_closed_sockets_behave_like_plain_ones() -> None:
    with pairs(1) as [(ours, theirs)]:
        with pytest.raises(BlockingIOError):
            ours.recv(10)
        with pytest.raises(BlockingIOError):
            ours.recv_into(bytearray(10))
        _fill(theirs)
        with pytest.raises(BlockingIOError):
            theirs.send(b"abc")
        theirs.close()
        while ours.recv(held_gil.ROOM_BYTES):
            pass

        assert ours.recv(10) == b""
        assert ours.recv_into(bytearray(10)) == 0


def test_a_partial_write_returns_how_much_was_written() -> None:
    whole = bytes(range(256)) * (held_gil.ROOM_BYTES // 256)
    sent = 0
    with pairs(1) as [(ours, theirs)]:
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += ours.send(whole[sent % 256 :])
        came = 0
        with contextlib.suppress(BlockingIOError):
            while piece := theirs.recv(1000):
                assert piece == (whole * 2)[came % 256 :][: len(piece)]
                came += len(piece)

    assert came == sent


@pytest.mark.parametrize(
    "data",
    [b"abc", bytearray(b"abc"), memoryview(b"abc"), bytes(held_gil.ROOM_BYTES + 1)],
    ids=["bytes", "bytearray", "memoryview", "large"],
)
def test_any_bytes_like_object_can_be_sent(data: bytes | bytearray | memoryview) -> None:
    with pairs(1) as [(ours, theirs)]:
        count = ours.send(data)

        assert theirs.recv(3) == bytes(data)[:3]
        assert 3 <= count <= len(data)


def test_no_more_is_read_than_requested() -> None:
    room = bytearray(10)
    with pairs(1) as [(ours, theirs)]:
        theirs.send(b"abcdefgh")

        assert ours.recv(2) == b"ab"
        assert ours.recv_into(room, 3) == 3
        assert ours.recv(1, socket.MSG_PEEK) == b"f"
        assert ours.recv_into(memoryview(room)[:1]) == 1
    assert bytes(room) == b"fde" + bytes(7)


def test_writing_to_a_closed_peer_is_an_error_not_a_signal() -> None:
    with pairs(1) as [(ours, theirs)]:
        theirs.close()

        with pytest.raises(BrokenPipeError):
            ours.send(b"abc")


def test_a_connection_that_was_reset_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = held_gil.new_socket(socket.AF_INET)
        with ours:
            ours.connect(listener.getsockname())
            theirs, _ = listener.accept()
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()
            with selectors.DefaultSelector() as selector:
                selector.register(ours, selectors.EVENT_READ)
                assert selector.select(WAIT_S)

            with pytest.raises(ConnectionResetError):
                ours.recv(10)


def test_a_closed_socket_does_not_affect_a_new_one_with_the_same_descriptor() -> None:
    with pairs(1) as [(ours, _)]:
        number = ours.fileno()
        ours.close()
        with pairs(1) as [(next_ours, next_theirs)]:
            assert number in (next_ours.fileno(), next_theirs.fileno())
            for use in (lambda: ours.send(b"abc"), lambda: ours.recv(10)):
                with pytest.raises(OSError, match="Bad file") as error:
                    use()
                assert error.value.errno == errno.EBADF
            for end in (next_ours, next_theirs):
                with pytest.raises(BlockingIOError):
                    end.recv(10)


# The selector


def test_the_selector_reports_the_same_events_as_epoll() -> None:
    """For what can be read, written, both or neither, and for ends that are gone."""
    with pairs(6) as sockets, HeldSelector() as held, selectors.EpollSelector() as plain:
        (quiet, _), (readable, writer), (ended, end), (full, _), (both, other), (dead, gone) = (
            sockets
        )
        writer.send(b"abc")
        other.send(b"abc")
        end.shutdown(socket.SHUT_WR)
        gone.close()
        _fill(full)
        read, write = selectors.EVENT_READ, selectors.EVENT_WRITE
        for selector in (held, plain):
            selector.register(quiet, read, "quiet")
            selector.register(readable, read, "readable")
            selector.register(ended, read | write, "ended")
            selector.register(full, read | write, "full")
            selector.register(both, read | write, "both")
            selector.register(dead, read, "dead")

        def found(selector: selectors.BaseSelector) -> set[tuple[str, int]]:
            return {(key.data, events) for key, events in selector.select(0)}

        assert found(held) == found(plain)
        assert ("both", read | write) in found(held)
        for selector in (held, plain):
            selector.modify(both, write, "both")
            selector.unregister(readable)
        assert found(held) == found(plain)
        assert ("both", write) in found(held)


def test_select_waits_up_to_its_timeout_or_until_an_event() -> None:
    with pairs(1) as [(ours, theirs)], HeldSelector() as selector:
        selector.register(ours, selectors.EVENT_READ)
        began = time.monotonic()
        assert selector.select(-1) == selector.select(0) == []
        assert selector.select(0.02) == []
        assert time.monotonic() - began >= 0.02

        later = threading.Timer(0.02, theirs.send, (b"abc",))
        later.start()
        assert len(selector.select(None)) == 1
        later.join()


def test_all_ready_descriptors_are_reported_however_many() -> None:
    ours, theirs = socket.socketpair()
    copies = [os.dup(ours.fileno()) for _ in range(held_gil.MOST_EVENTS + 50)]
    try:
        with HeldSelector() as selector:
            for copy in copies:
                selector.register(copy, selectors.EVENT_READ)
            theirs.send(b"abc")
            told: set[int] = set()
            for _ in range(3):
                told |= {key.fd for key, _ in selector.select(0)}
    finally:
        for copy in copies:
            os.close(copy)
        ours.close()
        theirs.close()

    assert told == set(copies)


# The loop


def test_threads_wake_the_loop_and_no_call_is_missed() -> None:
    calls, threads = 3000, 4

    async def count_calls() -> int:
        loop = asyncio.get_running_loop()
        is_done = asyncio.Event()
        count = 0

        def called() -> None:
            nonlocal count
            count += 1
            if count == calls * threads:
                is_done.set()

        def call() -> None:
            for _ in range(calls):
                loop.call_soon_threadsafe(called)

        callers = [threading.Thread(target=call) for _ in range(threads)]
        for caller in callers:
            caller.start()
        await asyncio.wait_for(is_done.wait(), WAIT_S)
        for caller in callers:
            caller.join()
        return count

    with asyncio.Runner(loop_factory=HeldLoop) as runner:
        assert runner.run(count_calls()) == calls * threads


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_closed_loop_leaks_no_descriptor_and_cannot_be_woken() -> None:
    HeldLoop().close()
    before = _open_files()
    loop = HeldLoop()

    loop.close()
    loop.close()

    assert _open_files() == before
    reused = os.eventfd(0, os.EFD_NONBLOCK)
    loop._write_to_self()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon_threadsafe(int)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(reused)
    os.close(reused)


def test_a_running_loop_cannot_be_closed_and_can_still_be_woken() -> None:
    async def try_it() -> bool:
        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="running"):
            loop.close()
        is_woken = asyncio.Event()
        threading.Timer(0.01, loop.call_soon_threadsafe, (is_woken.set,)).start()
        return await asyncio.wait_for(is_woken.wait(), WAIT_S)

    with asyncio.Runner(loop_factory=HeldLoop) as runner:
        assert runner.run(try_it())


def test_a_flooded_connection_does_not_starve_others_and_timers() -> None:
    async def beside_a_flood() -> int:
        loop = asyncio.get_running_loop()
        with pairs(2) as [(flooded, source), (ours, theirs)]:
            sink, reply = _Sink(), _Reply()
            await loop.create_unix_connection(lambda: sink, sock=flooded)
            await loop.create_unix_connection(lambda: reply, sock=ours)
            loop.add_writer(source, lambda: source.send(bytes(held_gil.ROOM_BYTES)))
            loop.add_reader(theirs, _echo, theirs)
            for _ in range(50):
                reply.ask(b"abc")
                await reply.come
                await asyncio.sleep(0.0001)
            loop.remove_writer(source)
            loop.remove_reader(theirs)
            sink.transport.abort()
            reply.transport.abort()
            await asyncio.sleep(0)
        return sink.count

    with asyncio.Runner(loop_factory=HeldLoop) as runner:
        assert runner.run(asyncio.wait_for(beside_a_flood(), WAIT_S)) > 50 * 1000


class _Sink(asyncio.Protocol):
    def __init__(self) -> None:
        self.count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.count += len(data)


# Without it


def test_without_ctypes_the_client_uses_a_standard_loop_with_plain_sockets() -> None:
    program = """
import socket, sys
sys.modules["ctypes"] = None
from tinsmith.client import held_gil
from tinsmith.client.background import background
from tinsmith.testing import running_service
import tinsmith
assert not held_gil.IS_AVAILABLE and held_gil.new_event_loop() is None
with held_gil.new_socket(socket.AF_INET) as made:
    assert type(made) is socket.socket
with running_service() as service:
    with tinsmith.ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        client.get_server_capabilities()
assert not isinstance(background().loop, held_gil.HeldLoop)
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        timeout=300,
        check=False,
        capture_output=True,
        text=True,
    )

    assert (result.returncode, result.stderr) == (0, "")


def test_receive_buffers_use_physical_memory_only_as_written() -> None:
    """Every thread that reads has one, and most replies are far smaller."""
    before = resident_bytes()

    rooms = [held_gil._Room(held_gil.ROOM_BYTES) for _ in range(64)]

    assert resident_bytes() - before < len(rooms) * held_gil.ROOM_BYTES / 4


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
