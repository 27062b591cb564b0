"""One connection: what may be sent on it, in which order it is answered, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from tinsmith.service.http.connections import ConnectionGate
from tinsmith.service.http.edge import HttpEdge, HttpExchange
from tinsmith.service.http.protocol import MAX_HEAD_BYTES, MAX_PIPELINED, BoundedHttpProtocol
from tinsmith.service.http.server import HttpServer
from tinsmith.service.run.lifecycle import loop_factory
from tinsmith.testing.running import ServiceThread
from tinsmith.wire.exchange import HttpReply

LARGE_BYTES = 64 * 1024


class Impatient(BoundedHttpProtocol):
    """Gives up early."""

    head_timeout_s = 0.2


async def app(incoming: HttpExchange) -> None:
    """Answers with the length of the body, or as the path says."""
    if incoming.path == "/broken":
        raise RuntimeError("on purpose")
    if incoming.path == "/unread":
        await incoming.answer(HttpReply(401, {"Content-Length": "0"}, [b""]))
    elif incoming.path == "/two-lines":
        await incoming.answer(HttpReply(200, {"X-Bad": "a\r\nb: c", "Content-Length": "0"}, [b""]))
    elif incoming.path == "/large":
        await incoming.answer(
            HttpReply(200, {"Content-Length": str(4 * LARGE_BYTES)}, [b"l" * 4 * LARGE_BYTES])
        )
    elif incoming.path == "/too-large":
        await incoming.answer(
            HttpReply(413, {"Content-Length": "2", "Connection": "close"}, [b"no"])
        )
    elif incoming.path == "/who":
        who = incoming.headers.get("x-api-key", "nobody").encode()
        await incoming.answer(HttpReply(200, {"Content-Length": str(len(who))}, [who]))
    elif incoming.path.startswith("/pieces"):
        headers = {"Content-Length": incoming.query} if incoming.query else {}
        await incoming.start(200, headers)
        for piece in (b"one", b"", b"two"):
            await incoming.write(piece)
        await incoming.end()
    else:
        length = str(len(await incoming.read_body() or b"")).encode()
        await incoming.answer(HttpReply(200, {"Content-Length": str(len(length))}, [length]))


@pytest.fixture(params=[BoundedHttpProtocol, Impatient])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A server that speaks this HTTP."""
    listener = socket.create_server(("127.0.0.1", 0))
    servers: list[HttpServer] = []

    async def start() -> None:
        servers.append(HttpServer(HttpEdge(app), request.param))
        await servers[0].open(listener)

    async def stop() -> None:
        await servers[0].close(5.0)

    thread = ServiceThread(start, stop)
    thread.start()
    yield listener.getsockname()[1]
    thread.stop()


def read(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    whole = b""
    while piece := connection.recv(65536):
        whole += piece
    return whole


@pytest.mark.parametrize("port", [BoundedHttpProtocol], indirect=True)
@pytest.mark.parametrize("line", [b"x: " + b"y" * 5000 + b"\r\n", b"z" * 5000])
def test_an_endless_head_is_rejected(port: int, line: bytes) -> None:
    """Many headers, and one that goes on and on."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nlong: ")
        sent = 0
        try:
            while sent < 10 * MAX_HEAD_BYTES:
                connection.sendall(line)
                sent += len(line)
        except OSError:
            pass  # it was closed while we sent
        try:
            answer = read(connection)
        except ConnectionResetError:
            answer = b"HTTP/1.1 431 "

    assert answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("port", [Impatient], indirect=True)
@pytest.mark.parametrize("sent", [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nhost: x\r\n"])
def test_an_incomplete_head_times_out(port: int, sent: bytes) -> None:
    """The connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(sent)

        assert read(connection) == b""


@pytest.mark.parametrize("port", [Impatient], indirect=True)
def test_an_incomplete_second_head_times_out_too(port: int) -> None:
    """After a whole request on the same connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"\r\n\r\n0"):
            answer += connection.recv(65536)
        connection.sendall(b"GET / HT")

        assert read(connection) == b""


@pytest.mark.parametrize("port", [BoundedHttpProtocol], indirect=True)
def test_large_bodies_and_many_requests_do_not_count_as_heads(port: int) -> None:
    """They are counted elsewhere; several requests on one connection, in one go too."""
    body = b"b" * (8 * MAX_HEAD_BYTES)
    head = f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for _ in range(3):
            connection.sendall(head + body)
            answer = b""
            while not answer.endswith(str(len(body)).encode()):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 ")
        last = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 50 + last)

        assert read(connection).count(b"HTTP/1.1 200 ") == 51


@pytest.mark.parametrize("port", [Impatient], indirect=True)
def test_the_head_timeout_does_not_apply_to_the_body(port: int) -> None:
    """The time for a head ends with the head: a body may take longer."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\na")
        connection.settimeout(3 * Impatient.head_timeout_s)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(20)
        connection.sendall(b"bc")

        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def answered(port: int, *sent: bytes) -> bytes:
    """What comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for piece in sent:
            connection.sendall(piece)
        return read(connection)


plain = pytest.mark.parametrize("port", [BoundedHttpProtocol], indirect=True)
LAST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@plain
@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"GET http:// HTTP/1.1\r\n\r\n"],
)
def test_input_that_is_not_http_is_rejected_with_a_reason(port: int, sent: bytes) -> None:
    """And nothing more is read."""
    answer = answered(port, sent)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Connection: close" in answer


@plain
def test_too_many_pipelined_requests_are_rejected(port: int) -> None:
    """Else one read could bring ten thousand of them into the memory."""
    answer = answered(port, b"GET / HTTP/1.1\r\n\r\n" * 10 * MAX_PIPELINED)

    assert b"HTTP/1.1 400 " in answer
    assert answer.count(b"HTTP/1.1 200 ") <= MAX_PIPELINED


@plain
def test_a_streamed_response_is_chunked_or_has_its_announced_length(port: int) -> None:
    """The next answer follows where the client expects it."""
    chunked = answered(port, b"GET /pieces HTTP/1.1\r\nhost: x\r\n\r\n", LAST)
    announced = answered(port, b"GET /pieces?6 HTTP/1.1\r\nhost: x\r\n\r\n", LAST)

    assert b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\nHTTP/1.1 200 " in chunked
    assert b"\r\n\r\nonetwoHTTP/1.1 200 " in announced


@plain
def test_a_truncated_response_closes_its_connection(port: int) -> None:
    """Else the client would take the next answer for the rest of it."""
    answer = answered(port, b"GET /pieces?7 HTTP/1.1\r\nhost: x\r\n\r\n")

    assert answer.endswith(b"\r\n\r\nonetwo")


@plain
def test_an_http_1_0_client_gets_an_unchunked_response(port: int) -> None:
    """HTTP/1.0 knows the end by the end of the connection."""
    answer = answered(port, b"GET /pieces HTTP/1.0\r\n\r\n")

    assert answer.endswith(b"\r\n\r\nonetwo")
    assert b"chunked" not in answer


@plain
def test_a_large_response_arrives_complete(port: int) -> None:
    """Also if it is taken slowly, and others follow."""
    answer = answered(port, b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n", LAST)

    assert answer.count(b"l" * 4 * LARGE_BYTES + b"HTTP/1.1 200 ") == 1


@plain
def test_a_response_to_head_has_no_body(port: int) -> None:
    """Only its length."""
    answer = answered(port, b"HEAD /large HTTP/1.1\r\nhost: x\r\n\r\n", LAST)

    assert b"content-length: 262144" in answer
    assert b"lll" not in answer


@plain
def test_an_app_error_is_a_500_and_other_requests_are_answered(port: int) -> None:
    """A header that would be two lines is such a failure: it could carry anything."""
    for path in (b"/broken", b"/two-lines"):
        answer = answered(port, b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n", LAST)

        assert answer.startswith(b"HTTP/1.1 500 ")
        assert answer.count(b"HTTP/1.1 200 ") == 1
        assert b"b: c" not in answer


@plain
def test_an_unread_body_is_skipped(port: int) -> None:
    """The request behind it is answered."""
    head = b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n"

    answer = answered(port, head, b"b" * 300000, LAST)

    assert [answer.count(b" 401 "), answer.count(b" 200 ")] == [1, 1]


@plain
def test_a_body_of_very_many_tiny_chunks_is_read_completely(port: int) -> None:
    """What each of them costs does not grow with those before it."""
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"

    answer = answered(port, head + b"1\r\nx\r\n" * 300_000 + b"0\r\n\r\n")

    assert answer.endswith(b"\r\n\r\n300000")


@plain
def test_expect_100_continue_is_answered_if_the_body_is_wanted(port: int) -> None:
    """When its body is wanted; if it is not, nothing can follow on that connection."""
    expecting = b" HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"POST /" + expecting)
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abc" + LAST)
        assert read(connection).count(b"HTTP/1.1 200 ") == 2

    answer = answered(port, b"POST /unread" + expecting)

    assert answer.startswith(b"HTTP/1.1 401 ")


@plain
def test_an_upgrade_request_is_answered_as_http_and_closed(port: int) -> None:
    """And the connection is closed: what follows would not be HTTP."""
    upgrade = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"

    answer = answered(port, upgrade + b"\x81\x05hello")

    assert answer.startswith(b"HTTP/1.1 200 ")


def test_closing_answers_pending_requests_and_closes_idle_connections() -> None:
    """Whoever takes too long is given up."""

    async def work() -> tuple[bytes, bytes, bytes]:
        asked, may_answer = asyncio.Semaphore(0), asyncio.Event()

        async def slow(incoming: HttpExchange) -> None:
            asked.release()
            if incoming.path == "/never":
                await asyncio.Event().wait()
            await may_answer.wait()
            await incoming.answer(HttpReply(200, {"Content-Length": "2"}, [b"ok"]))

        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(HttpEdge(slow))
        await server.open(listener)
        address = listener.getsockname()[:2]
        idle, idle_writer = await asyncio.open_connection(*address)
        busy, busy_writer = await asyncio.open_connection(*address)
        stuck, stuck_writer = await asyncio.open_connection(*address)
        busy_writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        stuck_writer.write(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n")
        await asked.acquire()
        await asked.acquire()
        closing = asyncio.create_task(server.close(0.3))
        ended = await idle.read()
        may_answer.set()
        answer = await busy.read()
        await closing
        try:
            given_up = await stuck.read()
        except ConnectionResetError:
            given_up = b""
        for writer in (idle_writer, busy_writer, stuck_writer):
            writer.close()
        return ended, answer, given_up

    ended, answer, given_up = asyncio.run(work())

    assert ended == b""
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"ok")
    assert given_up == b""


def test_a_handler_is_notified_when_its_client_disconnects() -> None:
    """In the middle of a body, and while it waits for the answer."""

    async def work() -> list[str]:
        told: list[str] = []
        seen = asyncio.Semaphore(0)

        async def waiting(incoming: HttpExchange) -> None:
            seen.release()
            if await incoming.read_body() is None:
                told.append("in the body")
            else:
                await incoming.left()
                told.append("after it")
            seen.release()

        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(HttpEdge(waiting))
        await server.open(listener)
        for sent in (b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nab"):
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.write(sent)
            await seen.acquire()
            writer.close()
            await seen.acquire()
        await server.close(5.0)
        return told

    assert asyncio.run(work()) == ["after it", "in the body"]


@plain
@pytest.mark.parametrize("name", [b"Host", b"X-Api-Key", b"Transfer-Encoding"])
def test_a_duplicate_security_header_is_rejected(port: int, name: bytes) -> None:
    """A proxy before us may have looked at the other one."""
    answer = answered(port, b"GET / HTTP/1.1\r\n" + 2 * (name + b": a\r\n") + b"\r\n")

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert name.lower() + b" came twice" in answer


@plain
def test_trailers_are_not_treated_as_headers(port: int) -> None:
    """Else they could say who somebody is after a proxy has looked at the head."""
    head = b"POST /who HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked"

    answer = answered(port, head + b"\r\n\r\n1\r\nx\r\n0\r\nx-api-key: admin\r\n\r\n")

    assert answer.endswith(b"\r\n\r\nnobody")


@plain
@pytest.mark.parametrize("bad", [b"\x00\r\n\r\n", b"GET / HTTP/1.1\r\nlong: " + b"l" * 2**18])
def test_requests_before_a_malformed_one_are_answered_first(port: int, bad: bytes) -> None:
    """The refusal is the answer to what cannot be read, and to nothing else."""
    asked = b"GET /who HTTP/1.1\r\nhost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(2 * asked + bad)
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # not all of it was read
            while piece := connection.recv(65536):
                answer += piece

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"nobodyHTTP/1.1 ") == 2
    assert re.search(rb"nobodyHTTP/1.1 4(00|31) ", answer)


def test_a_body_error_after_the_response_started_just_closes_the_connection() -> None:
    """A refusal would be taken for a part of the answer."""

    async def work() -> bytes:
        async def early(incoming: HttpExchange) -> None:
            await incoming.start(200, {})
            await incoming.write(b"one")
            await incoming.left()

        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(HttpEdge(early))
        await server.open(listener)
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        begun = await reader.readuntil(b"one\r\n")
        writer.write(b"not a size\r\n")
        rest = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        await server.close(5.0)
        return begun + rest

    assert asyncio.run(work()).endswith(b"\r\n\r\n3\r\none\r\n")


@plain
def test_bytes_after_a_connection_close_request_are_ignored(port: int) -> None:
    """It was said that nothing does."""
    answer = answered(port, LAST + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1 ") == 1


@plain
def test_an_upgrade_request_with_a_body_is_rejected(port: int) -> None:
    """The parser passes it over; then its sender is told so."""
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"

    answer = answered(port, head + b"content-length: 3\r\n\r\nabc")

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"another protocol" in answer


@plain
def test_an_unwanted_expect_100_body_closes_the_connection(port: int) -> None:
    """Else it would send its next request on it."""
    head = b"POST /unread HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"

    assert b"\r\nconnection: close\r\n" in answered(port, head)


class Watchful(BoundedHttpProtocol):
    """Waits for nobody for long."""

    head_timeout_s = 0.05
    stall_timeout_s = 0.05


def test_an_incomplete_head_does_not_end_the_response_before_it() -> None:
    """Its time begins when it is its turn."""

    async def work() -> bytes:
        async def slow(incoming: HttpExchange) -> None:
            await asyncio.sleep(6 * Watchful.head_timeout_s)
            await incoming.answer(HttpReply(200, {"Content-Length": "2"}, [b"ok"]))

        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(HttpEdge(slow), Watchful)
        await server.open(listener)
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HT")
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        await server.close(5.0)
        return answer

    assert asyncio.run(work()).endswith(b"ok")


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, loop_factory()])
def test_a_client_that_reads_nothing_is_disconnected(
    is_last: bool, make_loop: Callable[[], asyncio.AbstractEventLoop] | None
) -> None:
    """While its answer is being written, and after the last one was."""

    async def work() -> None:
        async def large(incoming: HttpExchange) -> None:
            body = b"l" * 2**25
            await incoming.start(200, {"Connection": "close"} if is_last else {})
            if is_last:  # what does not fit is left to the end of the connection
                assert incoming._connection is not None
                abort = cast(Any, incoming._connection.close)
                abort.__self__.set_write_buffer_limits(2**26)
            await incoming.write(body)
            await incoming.end()
            told.set()

        class Told(Watchful):
            def connection_lost(self, error: Exception | None) -> None:
                super().connection_lost(error)
                gone.set()

        told, gone = asyncio.Event(), asyncio.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(HttpEdge(large), Told)
        await server.open(listener)
        with socket.create_connection(listener.getsockname()[:2]) as idle:
            idle.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.wait_for(told.wait(), 20)
            await asyncio.wait_for(gone.wait(), 20)
        await server.close(5.0)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(work())


def test_a_connection_opened_while_the_server_closes_is_closed() -> None:
    """It was accepted before; a TLS handshake may take long."""

    async def work() -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(HttpEdge(app))
        await server.open(listener)
        await server.close(5.0)
        ours, theirs = socket.socketpair()
        loop, connection = asyncio.get_running_loop(), ConnectionGate().admit("x", lambda: None)
        await loop.connect_accepted_socket(lambda: BoundedHttpProtocol(server, connection), theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()

    assert asyncio.run(work()) == b""


@plain
def test_a_client_that_sends_too_much_can_still_read_the_413(port: int) -> None:
    """A connection that is closed on what still comes would lose the answer."""
    head = b"POST /too-large HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % 2**24
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head)
        connection.recv(1, socket.MSG_PEEK)  # it is refused by now
        connection.sendall(b"b" * 2**24)
        answer = read(connection)

    assert answer.startswith(b"HTTP/1.1 413 ")


@plain
@pytest.mark.parametrize("name", [b"gzip, chunked", b"gzip", b"identity", b"chunked, chunked"])
def test_an_unsupported_transfer_encoding_is_rejected(port: int, name: bytes) -> None:
    """Else its bytes would be taken for the body."""
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: " + name + b"\r\n\r\n"

    answer = answered(port, head + b"1\r\nx\r\n0\r\n\r\n")

    assert answer.startswith((b"HTTP/1.1 501 ", b"HTTP/1.1 400 "))
    assert answer.count(b"HTTP/1.1 ") == 1


@plain
def test_chunked_is_accepted_in_upper_case(port: int) -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nTransfer-Encoding: Chunked\r\n\r\n"

    assert answered(port, head + b"1\r\nx\r\n0\r\n\r\n").endswith(b"\r\n\r\n1")


@plain
def test_spaces_after_chunked_are_ignored(port: int) -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nTransfer-Encoding: chunked \r\n\r\n"

    assert answered(port, head + b"1\r\nx\r\n0\r\n\r\n").endswith(b"\r\n\r\n1")


@plain
def test_a_client_that_half_closes_gets_its_responses(port: int) -> None:
    """It has closed its half of the connection, and not the other."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        asked = b"GET /who HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET /pieces HTTP/1.1\r\nhost: x\r\n\r\n"
        connection.sendall(asked)
        connection.shutdown(socket.SHUT_WR)

        answer = read(connection)

    assert b"\r\n\r\nnobody" in answer
    assert answer.endswith(b"3\r\ntwo\r\n0\r\n\r\n")


@plain
def test_a_client_that_half_closes_within_a_body_is_disconnected(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf")
        connection.shutdown(socket.SHUT_WR)

        assert read(connection) == b""
