"""The server as an ASGI application: from bytes to a typed request, and from an answer to bytes.

One exchange: its endpoint is found by method and path, the credential is checked, the body is read
within bounds and unpacked, `wire/` makes a typed request of it, the endpoint's handler answers, and
the answer is written. Whatever goes wrong on the way becomes a reply with a body.

The table of endpoints is `wire/endpoints.py`, the handlers are in `routes/`. There is no framework
in between: the table is the router, and what is left is this page.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from tinsmith.errors import (
    APIStatusError,
    BadRequestError,
    BodyTooLargeError,
    CheckpointUnavailableError,
    DecodeError,
    LedgerError,
    LedgerUnavailableError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    TinkerError,
    without_frames,
)
from tinsmith.ledger.records import TenantId
from tinsmith.observe.log_fields import bind
from tinsmith.server.bodies import BodyBudget, HeldBody, packed
from tinsmith.server.call import Answer, Call, StreamedReply
from tinsmith.server.connections import TooManyConnectionsError, address_group
from tinsmith.server.exchanges import ExchangeReport, Failures, Observer, log_exchange
from tinsmith.server.incoming import (
    AsgiRequest,
    ClientLeftError,
    Incoming,
    Message,
    Receive,
    Send,
)
from tinsmith.server.intake import NUMBERED, number_of, spend_unread
from tinsmith.server.local_only import check_local
from tinsmith.server.parts import Parts
from tinsmith.server.routes import collect
from tinsmith.server.service import Service
from tinsmith.types.buffers import Memory
from tinsmith.wire.content import decompress, is_protobuf
from tinsmith.wire.endpoint_types import Endpoint, Format, Pool
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpReply, read_request, to_reply
from tinsmith.wire.failures import reply_from_error
from tinsmith.wire.json_format import text_limits
from tinsmith.wire.limits import DecodeLimits
from tinsmith.wire.routes import Router

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PROCESS, _NUMBERS = secrets.token_hex(4), itertools.count()
"""Of which the names of exchanges are made: a random one for each would ask the system."""
_MOST_HEADER_BYTES = 64 * 1024
_HEADERS_TOO_LARGE = 431
_MOST_QUERY_FIELDS = 64
_UNREAD = frozenset({"telemetry"})
"""What is accepted whatever it holds: clients send it again for ever if it is refused."""
_POLLS = frozenset(name for name, endpoint in ENDPOINTS.items() if endpoint.pool is Pool.RETRIEVE)
_UNAVAILABLE_S = 1.0
_DECODE_ASIDE_BYTES = 512 * 1024
"""Larger bodies are decoded on a thread, so that others are answered meanwhile."""
_MESSAGES_PER_DATUM = 64
"""On average, in the largest request: two for each chunk of its input and two for each tensor."""
_MOST_UNPACKING = 4
"""Large bodies at a time: how large they become is known when they are unpacked, not before. The
same for reading them, which takes memory too."""
_MESSAGES_READ_HERE = 16 * 1024
"""More, in however few bytes, are decoded on a thread too."""
_DECODED_HERE = DecodeLimits(memory_bytes=_DECODE_ASIDE_BYTES)


def make_app(parts: Parts, *, observer: Observer = log_exchange) -> App:
    """A server over these parts, to be run by any ASGI server or called in the process.

    Args:
        parts: What it works with; they stay the caller's to close.
        observer: Told of every exchange when it is over.

    Raises:
        ValidationError: An endpoint has no handler, or more than one.
    """
    return App(Service(parts), observer)


class App:
    """The ASGI application. For one event loop."""

    def __init__(self, service: Service, observer: Observer) -> None:
        self.service = service
        self._observer = observer
        routes = collect()
        self._handlers = routes.handlers
        self._open = routes.open
        self._router = Router(routes.endpoints)
        self._bodies = BodyBudget(service.parts.settings)
        self.answers = BodyBudget(service.parts.settings)
        self._limits = DecodeLimits(
            memory_bytes=service.parts.settings.decoded_bytes,
            messages=_MESSAGES_PER_DATUM * service.parts.settings.most_datums,
        )
        self._read_here = msgspec.structs.replace(self._limits, messages=_MESSAGES_READ_HERE)
        self._unpacking = asyncio.Semaphore(_MOST_UNPACKING)
        self._prefix = service.parts.settings.path_prefix
        self._failures = Failures()
        self._told_fields: set[tuple[str, str]] = set()

    @property
    def bodies(self) -> BodyBudget:
        """What the bodies that are being read take."""
        return self._bodies

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """`scope`, `receive` and `send` as ASGI has them."""
        if scope["type"] == "http":
            await self.answer(AsgiRequest(scope, receive, send))
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def check_reached(self, headers: Mapping[str, str]) -> None:
        """Refuse what a web page sent, if the service has no keys; see `local_only.py`.

        For pages beside the API, which need no key. The ledger is asked only about what would be
        refused: health is asked for also while it is away, and then must not wait for it.

        Raises:
            PermissionDeniedError: It comes from a page, or was sent to a name of somebody else.
        """
        try:
            check_local(headers)
        except PermissionDeniedError:
            try:
                if await self.service.credentials.has_keys():
                    return
            except LedgerError as exc:  # there may be none
                _log.debug("whether there are keys is not known: %s", exc)
            raise

    # One exchange

    async def answer(self, incoming: Incoming) -> None:
        """Answer a request, in a task of its own: log lines have its fields until that ends."""
        report = ExchangeReport(
            call_id=f"{_PROCESS}{next(_NUMBERS):x}",
            method=incoming.method,
            path=incoming.path,
            started_s=time.perf_counter(),
        )
        sent = HeldBody(self.answers, _address(incoming))
        try:
            reply = await self._affordable(await self._reply(incoming, report), sent, report)
            report.status = reply.status
            headers = {**reply.headers, "X-Request-Id": report.call_id}
            if isinstance(reply, StreamedReply):
                await _send_stream(reply, headers, report, incoming)
            else:
                body = b"".join(reply.parts)
                report.reply_bytes = len(body)
                if reply.status != 204 and "Content-Length" not in headers:
                    headers["Content-Length"] = str(len(body))
                await incoming.answer(reply.status, headers, body)
        except ClientLeftError:
            report.client_left = True
        finally:
            sent.release()
            report.ended_s = time.perf_counter()
            self._observer(report)

    async def _reply(self, incoming: Incoming, report: ExchangeReport) -> HttpReply | StreamedReply:
        """What to answer; whatever goes wrong is made a reply here."""
        headers = incoming.headers
        held = HeldBody(self._bodies, _address(incoming))
        try:
            _check_headers(headers)
            endpoint, fields = self._find(incoming)
            report.endpoint = endpoint.name
            tenant_id = held.tenant_id = await self._tenant(endpoint, headers, report)
            if tenant_id and incoming.connection is not None:
                incoming.connection.authenticate(tenant_id)
            bind(request=report.call_id, endpoint=endpoint.name, tenant=tenant_id or None)
            raw = await held.read(incoming.receive, headers, incoming.body)
            report.body_bytes = len(raw)
            request, body = await self._decode(endpoint, fields, incoming, raw, held, tenant_id)
            if endpoint.name in _POLLS:  # it waits for long, and needs nothing of its body
                raw = body = b""
                held.release()
            call = Call(
                service=self.service,
                endpoint=endpoint,
                request=request,
                tenant_id=tenant_id,
                headers=headers,
                body=body,
                format=_format(headers),
                call_id=report.call_id,
                base_url=self._base_url(incoming),
                left=incoming.left,
            )
            answer = await self._handlers[endpoint.name](call)
            return await self._written(answer, headers)
        except ClientLeftError:
            raise
        except (TinkerError, MemoryError) as exc:
            report.error = without_frames(exc)
            if isinstance(exc, LedgerUnavailableError):
                self.service.parts.ledger.board.ledger_doubted.set()
                if report.endpoint in _POLLS:
                    # Clients poll again at once after a 5xx; thousands of them must not spin.
                    await asyncio.sleep(_UNAVAILABLE_S)
            elif isinstance(exc, CheckpointUnavailableError):
                self.service.parts.ledger.board.store_doubted.set()
            reply = _refusal(exc)
            if reply.status >= 500:
                self._failures.tell(report.endpoint, reply.status, exc)
            return reply
        except Exception as exc:  # noqa: BLE001 - the outer edge; told in full in the log
            _log.exception("a request failed")
            report.error = without_frames(exc)
            return reply_from_error(exc)
        finally:
            held.release()

    async def _affordable(
        self, reply: HttpReply | StreamedReply, sent: HeldBody, report: ExchangeReport
    ) -> HttpReply | StreamedReply:
        """The reply, or a refusal where the tenant's clients leave too much unread.

        With a 503, after which clients ask for a result again; a 429 could end their wait for it.
        """
        if isinstance(reply, StreamedReply):
            return reply
        sent.tenant_id = report.tenant_id
        try:
            sent.hold(sum(map(len, reply.parts)))
        except RateLimitError as exc:
            report.error = without_frames(exc)
        else:
            return reply
        del reply  # which may be large, and is not sent
        await asyncio.sleep(_UNAVAILABLE_S)  # clients come again at once
        return _refusal(
            APIStatusError(
                "answers that were sent to you and not read yet take too much memory",
                status_code=503,
                retry_after_s=_UNAVAILABLE_S,
                remedy="read answers faster, or ask for fewer at once",
            )
        )

    def _find(self, incoming: Incoming) -> tuple[Endpoint, dict[str, str]]:
        method, path = incoming.method, incoming.path
        if self._prefix and not path.startswith(self._prefix + "/"):
            raise NotFoundError(f"there is no {method} {path[:200]}")
        path = path[len(self._prefix) :]
        found = self._router.find(method, path)
        if found is None:
            methods = self._router.methods(path)
            if methods:
                raise _WrongMethodError(method, path, methods)
            raise NotFoundError(f"there is no {method} {path[:200]}")
        return found

    async def _tenant(
        self, endpoint: Endpoint, headers: Mapping[str, str], report: ExchangeReport
    ) -> TenantId:
        if endpoint.name in self._open:
            return TenantId("")
        credentials, given = self.service.credentials, headers.get("x-api-key")
        holder = credentials.remembered(given) or await credentials.holder(given)
        if holder.key is None:
            check_local(headers)
        report.tenant_id = holder.tenant.tenant_id
        return holder.tenant.tenant_id

    async def _decode(
        self,
        endpoint: Endpoint,
        fields: dict[str, str],
        incoming: Incoming,
        raw: Memory,
        held: HeldBody,
        tenant_id: TenantId,
    ) -> tuple[Any, Memory]:
        if endpoint.name in _UNREAD:
            return None, b""
        headers, query, aside = incoming.headers, _query(incoming.query), True
        encoding = headers.get("content-encoding")
        if len(raw) < _DECODE_ASIDE_BYTES:
            # A few bytes may unpack to very many: here to no more than is decoded here.
            with contextlib.suppress(BodyTooLargeError):
                body = decompress(raw, encoding, _DECODED_HERE)
                aside = False
        if aside:
            body = await self._unpack_aside(raw, encoding, _format(headers))
            held.hold(len(body))
        read = functools.partial(self._read, endpoint, fields, query, headers, body)
        try:
            if not aside:
                with contextlib.suppress(BodyTooLargeError):
                    return read(self._read_here), body
            async with self._unpacking:
                return await _aside(functools.partial(read, self._limits)), body
        except TinkerError:
            if endpoint.name in NUMBERED:
                read_number = functools.partial(number_of, body, _format(headers))
                await self._spend_unread(tenant_id, read_number, aside=aside)
            raise

    async def _spend_unread(
        self, tenant_id: TenantId, read_number: Callable[[], tuple[str, int]], *, aside: bool
    ) -> None:
        """A command that cannot be read: what comes after it need not wait for its number."""
        with contextlib.suppress(DecodeError, NotFoundError):
            told = await _aside(read_number) if aside else read_number()
            await spend_unread(self.service.lookups, self.service.parts.ledger, tenant_id, *told)

    async def _unpack_aside(self, raw: Memory, encoding: str | None, form: Format) -> Memory:
        if not encoding:
            return raw
        limits = self._limits if form is Format.PROTOBUF else text_limits(self._limits)
        async with self._unpacking:
            return await _aside(functools.partial(decompress, raw, encoding, limits))

    def _read(
        self,
        endpoint: Endpoint,
        fields: dict[str, str],
        query: dict[str, str],
        headers: Mapping[str, str],
        body: Memory,
        limits: DecodeLimits,
    ) -> Any:
        return read_request(
            endpoint,
            fields,
            query,
            headers,
            body,
            limits,
            on_unknown=lambda names: self._tell_unknown(endpoint, names),
        )

    def _tell_unknown(self, endpoint: Endpoint, names: set[str]) -> None:
        """Log a field that we do not know, once: a newer client may mean something by it."""
        for name in sorted(names):
            key = (endpoint.name, name[:80])
            if key not in self._told_fields and len(self._told_fields) < 1000:
                self._told_fields.add(key)
                _log.info("%s: the request's field %r is not known and is ignored", *key)

    async def _written(
        self, answer: Answer, headers: Mapping[str, str]
    ) -> HttpReply | StreamedReply:
        if isinstance(answer, StreamedReply):
            return answer
        reply = answer if isinstance(answer, HttpReply) else to_reply(answer)
        return await packed(reply, headers.get("accept-encoding", ""), self.service.parts.settings)

    def _base_url(self, incoming: Incoming) -> str:
        given = self.service.parts.settings.public_url
        if given is not None:
            return given.rstrip("/")
        host = incoming.headers.get("host", "localhost")
        return f"{incoming.scheme}://{host}{self._prefix}"


class _WrongMethodError(APIStatusError):
    """405: the path is there, for other methods."""

    def __init__(self, method: str, path: str, methods: list[str]) -> None:
        super().__init__(f"{path[:200]} takes {', '.join(methods)}, not {method}", status_code=405)
        self.allow = ", ".join(methods)


async def _aside(work: Callable[[], T]) -> T:
    """Run work on a thread that has let go of all of it when this returns or raises.

    What a thread of the pool is called with, and what comes of it, it keeps until it has its next
    turn. The request may be answered by then, and its body would still be there.
    """
    given = [work]
    values: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            values.append(given.pop()())
        except Exception as exc:  # noqa: BLE001 - raised below
            errors.append(without_frames(exc))

    await asyncio.to_thread(run)
    if errors:
        raise errors.pop()
    return values.pop()


def _refusal(error: TinkerError | MemoryError) -> HttpReply:
    reply = reply_from_error(error)
    headers = dict(reply.headers)
    if isinstance(error, _WrongMethodError):
        headers["Allow"] = error.allow
    if reply.status in (408, 413, 431) or isinstance(error, TooManyConnectionsError):
        headers["Connection"] = "close"  # the rest of the body may still be on its way
    return HttpReply(reply.status, headers, reply.parts)


def _address(incoming: Incoming) -> str:
    return address_group(incoming.client[0]) if incoming.client else ""


def _check_headers(headers: Mapping[str, str]) -> None:
    if sum(map(len, headers)) + sum(map(len, headers.values())) > _MOST_HEADER_BYTES:
        raise APIStatusError(
            f"the headers are larger than {_MOST_HEADER_BYTES} bytes",
            status_code=_HEADERS_TOO_LARGE,
        )


def _query(text: str) -> dict[str, str]:
    if not text:
        return {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_QUERY_FIELDS)
    except ValueError as exc:
        raise BadRequestError(f"the query has more than {_MOST_QUERY_FIELDS} fields") from exc
    return dict(pairs)


def _format(headers: Mapping[str, str]) -> Format:
    return Format.PROTOBUF if is_protobuf(headers.get("content-type")) else Format.JSON


# Sending


async def _send_stream(
    reply: StreamedReply, headers: dict[str, str], report: ExchangeReport, incoming: Incoming
) -> None:
    """Send the pieces as they come, until the last or until the client leaves."""
    sending = asyncio.create_task(_send_pieces(reply, headers, report, incoming))
    left = incoming.left()
    try:
        await asyncio.wait((sending, left), return_when=asyncio.FIRST_COMPLETED)
        report.client_left = not sending.done()
    finally:
        left.cancel()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending


async def _send_pieces(
    reply: StreamedReply, headers: dict[str, str], report: ExchangeReport, incoming: Incoming
) -> None:
    try:
        await incoming.start(reply.status, headers)
        async for piece in reply.pieces:
            report.reply_bytes += len(piece)
            await incoming.write(piece)
        await incoming.end()
    finally:
        close = getattr(reply.pieces, "aclose", None)
        if close is not None:
            await close()


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return
