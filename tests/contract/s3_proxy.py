"""An HTTP proxy in front of an S3 server, which fails requests on purpose.

Requests are passed on as they are, `Host` included, so that their signatures stay valid.
"""

from __future__ import annotations

import http.client
import http.server
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import ClassVar, NamedTuple
from urllib.parse import urlsplit

UPSTREAM_S = 60.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with no time to linger: closing sends RST instead of FIN."""


class SeenRequest(NamedTuple):
    """A request that came to the proxy."""

    method: str
    target: str
    """Path and query."""

    @property
    def is_upload(self) -> bool:
        """Whether it sends bytes of an object or completes it."""
        return self.method in ("PUT", "POST")

    @property
    def is_completion(self) -> bool:
        """Whether it makes an object of uploaded parts."""
        return self.method == "POST" and "uploadId=" in self.target

    @property
    def is_part(self) -> bool:
        """Whether it uploads a part."""
        return self.method == "PUT" and "partNumber=" in self.target

    @property
    def is_manifest(self) -> bool:
        """Whether it is about a manifest."""
        return urlsplit(self.target).path.endswith("/checkpoint.json")


Matches = Callable[[SeenRequest], bool]
Fault = Callable[["_Handler"], None]


def replies(status: int, code: str) -> Fault:
    """Answer with an error of S3 and do not pass the request on."""

    def fail(handler: _Handler) -> None:
        handler.read_body()
        body = f"<Error><Code>{code}</Code><Message>Injected.</Message></Error>".encode()
        handler.reply(status, [("Content-Type", "application/xml")], body)

    return fail


def resets(handler: _Handler) -> None:
    """Break the connection when a part of the request has been read."""
    handler.rfile.read(min(1000, handler.body_bytes))
    handler.reset()


def loses_reply(handler: _Handler) -> None:
    """Pass the request on, and break the connection instead of replying."""
    handler.pass_on()
    handler.reset()


def truncates(handler: _Handler) -> None:
    """Reply with half of the body, and break the connection."""
    status, headers, body = handler.pass_on()
    handler.reply(status, headers, body, sent_bytes=len(body) // 2)
    handler.reset()


def never_answers(handler: _Handler) -> None:
    """Read the request, and say nothing until the proxy is closed or the client leaves."""
    handler.read_body()
    handler.connection.settimeout(0.1)
    while not handler.proxy.is_closed:
        try:
            if not handler.connection.recv(1):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    handler.close_connection = True


class FaultyS3:
    """The proxy, on a thread of its own.

    Attributes:
        endpoint: Its address.
        seen: Every request, in the order in which they arrived.
    """

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self.upstream = (parts.hostname or "", parts.port or 0)
        self.seen: list[SeenRequest] = []
        self.is_closed = False
        self._lock = threading.Lock()
        self._plans: list[list[object]] = []
        handler = type("_Bound", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def fail(self, fault: Fault, matches: Matches, *, times: int = 1, skip: int = 0) -> None:
        """Let the next requests that match fail, after passing on `skip` of them."""
        with self._lock:
            self._plans.append([fault, matches, skip, times])

    def heal(self) -> None:
        """Fail nothing any more."""
        with self._lock:
            self._plans.clear()

    @property
    def faults_left(self) -> int:
        """How many requests are still to fail."""
        with self._lock:
            return sum(int(plan[3]) for plan in self._plans)  # type: ignore[call-overload]

    def fault_for(self, request: SeenRequest) -> Fault | None:
        """Note a request, and say how it is to fail, if it is."""
        with self._lock:
            self.seen.append(request)
            for plan in self._plans:
                fault, matches, skip, times = plan
                if times and matches(request):  # type: ignore[operator]
                    if skip:
                        plan[2] = skip - 1  # type: ignore[operator]
                        continue
                    plan[3] = times - 1  # type: ignore[operator]
                    return fault  # type: ignore[return-value]
        return None

    def close(self) -> None:
        """End it."""
        self.is_closed = True
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is nothing to print."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = UPSTREAM_S
    proxy: ClassVar[FaultyS3]

    def _answer(self) -> None:
        assert "transfer-encoding" not in self.headers, "chunked requests are not supported"
        self.body_bytes = int(self.headers.get("Content-Length") or 0)
        fault = self.proxy.fault_for(SeenRequest(self.command, self.path))
        if fault is not None:
            fault(self)
            return
        try:
            status, headers, body = self.pass_on()
        except OSError:  # the server is gone
            self.reset()
            return
        self.reply(status, headers, body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def read_body(self) -> bytes:
        return self.rfile.read(self.body_bytes)

    def pass_on(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """The server's own answer."""
        upstream = http.client.HTTPConnection(*self.proxy.upstream, timeout=UPSTREAM_S)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders(self.read_body())
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def reply(
        self,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
        *,
        sent_bytes: int | None = None,
    ) -> None:
        """Reply, with fewer bytes than announced if asked."""
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value  # a HEAD has one without a body
            elif name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body[:sent_bytes])
        self.wfile.flush()

    def reset(self) -> None:
        """Break the connection with a TCP reset."""
        time.sleep(0.01)  # what was sent before has left
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.connection.close()

    def log_message(self, *_: object) -> None:
        """Print nothing."""
