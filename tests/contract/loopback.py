"""A recording HTTP server on a loopback port, made of the standard library and of our wire half.

It finds each call's route in `ENDPOINTS`, reads it with `read_request`, asks a service for the
answer, and writes that with `to_reply`. What no route takes, or no decoder reads, is kept in
`problems`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from tinsmith.errors import NotFoundError, TinkerError
from tinsmith.types import MetadataOnlyResponse, TryAgainResponse
from tinsmith.wire import content, exchange
from tinsmith.wire.endpoint_types import Answer, Endpoint, Format
from tinsmith.wire.endpoints import ENDPOINTS, FUTURE_RESULTS
from tinsmith.wire.exchange import HttpReply, to_reply
from tinsmith.wire.failures import reply_from_error

Answering = Callable[[Endpoint, Any], Any]
"""Gives the answer to a typed request: of a future the `UntypedAPIFuture`, of a poll the result."""

IDLE_S = 30.0


class Call(NamedTuple):
    """One request as it arrived, and what we read from it."""

    endpoint: Endpoint
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    request: Any


def route(method: str, path: str) -> tuple[Endpoint, dict[str, str]] | None:
    """The first endpoint that takes a path, and what stands for its fields."""
    for endpoint in ENDPOINTS.values():
        found = _pattern(endpoint.path).fullmatch(path)
        if endpoint.method == method and found:
            return endpoint, {name: unquote(value) for name, value in found.groupdict().items()}
    return None


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
    escaped = re.sub(r"{(\w+):path}", r"(?P<\1>.+)", escaped)
    return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", escaped))


class LoopbackServer:
    """Serves one service on a free port of 127.0.0.1 while its `with` block runs."""

    def __init__(self, answer: Answering) -> None:
        self.calls: list[Call] = []
        self.problems: list[str] = []
        self._answer = answer
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def named(self, name: str) -> list[Call]:
        """The calls to one endpoint, in order."""
        return [call for call in self.calls if call.endpoint.name == name]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = IDLE_S

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                reply = server._reply(self.command, self.path, headers, body)
                self.send_response(reply.status)
                for name, value in {"Content-Length": "0", **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                for part in reply.parts:
                    self.wfile.write(part)

            do_GET = do_POST = do_PUT = do_DELETE = _serve

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _reply(self, method: str, target: str, headers: dict[str, str], body: bytes) -> HttpReply:
        try:
            return self._serve_call(self._read(method, target, headers, body))
        except TinkerError as exc:
            return reply_from_error(exc)

    def _read(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Call:
        split = urlsplit(target)
        query = dict(
            parse_qsl(split.query, keep_blank_values=True, strict_parsing=bool(split.query))
        )
        found = route(method, split.path)
        if found is None:
            self.problems.append(f"no route takes {method} {target}")
            raise NotFoundError(f"no route {method} {split.path}")
        endpoint, path_fields = found
        try:
            plain = bytes(content.decompress(body, headers.get("content-encoding")))
            request = exchange.read_request(endpoint, path_fields, query, headers, plain)
        except TinkerError as exc:
            self.problems.append(f"{method} {target}: {exc}")
            raise
        call = Call(endpoint, method, split.path, query, headers, plain, request)
        with self._lock:
            self.calls.append(call)
        return call

    def _serve_call(self, call: Call) -> HttpReply:
        with self._lock:
            answer = self._answer(call.endpoint, call.request)
        if isinstance(answer, TryAgainResponse):
            reply = to_reply(answer)
            return HttpReply(408, reply.headers, reply.parts)
        if call.endpoint.answer is Answer.RESULT and not isinstance(answer, MetadataOnlyResponse):
            return to_reply(answer, _result_format(answer, call.headers.get("accept")))
        return to_reply(answer)


def _result_format(result: Any, accept: str | None) -> Format:
    """Protobuf where the result has such a form and the client says that it reads it."""
    is_binary = any(
        isinstance(result, known.type) and known.format is Format.PROTOBUF
        for known in FUTURE_RESULTS.values()
    )
    return Format.PROTOBUF if is_binary and content.accepts_protobuf(accept) else Format.JSON
