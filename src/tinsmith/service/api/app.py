"""The API: from an HTTP request to a typed one, to its handler, and back to an HTTP answer.

One exchange: its endpoint is found by method and path, the credential is checked, the body is read
and decompressed, `wire/` decodes it into a typed request, the endpoint's handler answers, and the
answer is encoded. Any failure becomes a reply with a body.

The table of endpoints is `wire/endpoints.py`, the handlers are in `routes/`. There is no framework
in between: the table is the router.

Each exchange is reported when it is over (`ExchangeReport`), for metrics and the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from tinsmith.errors import (
    APIStatusError,
    CheckpointUnavailableError,
    DecodeError,
    LedgerError,
    LedgerUnavailableError,
    NotFoundError,
    PermissionDeniedError,
    TinkerError,
    without_frames,
)
from tinsmith.observe.log_fields import bind
from tinsmith.service.api.api_call import ApiCall, StreamedReply
from tinsmith.service.api.authentication import check_local
from tinsmith.service.api.context import ApiContext
from tinsmith.service.api.incoming import ClientLeftError, IncomingRequest
from tinsmith.service.api.request_decoding import (
    ON_THREAD_BYTES,
    RequestDecoder,
    body_format,
    run_on_thread,
)
from tinsmith.service.api.routes import collect
from tinsmith.service.api.submissions import NUMBERED, number_of, spend_unread
from tinsmith.service.ledger.records import TenantId
from tinsmith.types.buffers import Memory
from tinsmith.wire.endpoint_types import Endpoint, Format, Pool
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpReply, to_reply
from tinsmith.wire.failures import reply_from_error
from tinsmith.wire.routes import Router

_access_log = logging.getLogger("tinsmith.access")
_log = logging.getLogger(__name__)

TOLD_AGAIN_S = 10.0
"""How long similar failures are counted before they are logged again."""


class ExchangeReport(msgspec.Struct, kw_only=True, eq=False):
    """One exchange. Filled in while it runs; not changed once it is reported."""

    call_id: str
    method: str
    started_s: float
    """By `time.perf_counter`."""
    ended_s: float = 0.0
    path: str = ""
    endpoint: str | None = None
    """None if the path matches no endpoint."""
    tenant_id: str = ""
    status: int | None = None
    """None if nothing was answered."""
    body_bytes: int = 0
    reply_bytes: int = 0
    client_left: bool = False
    error: BaseException | None = None


Observer: TypeAlias = Callable[[ExchangeReport], None]


def log_exchange(report: ExchangeReport) -> None:
    """Log one line at the debug level. `App` logs failures itself."""
    if not _access_log.isEnabledFor(logging.DEBUG):
        return
    error = report.error
    _access_log.debug(
        "%s %s: %s",
        report.method,
        report.path,
        "the client left" if report.client_left else error or "answered",
        extra={
            "status": report.status,
            "duration_ms": round((report.ended_s - report.started_s) * 1000, 1),
            "body_bytes": report.body_bytes,
            **({} if error is None else {"error": type(error).__name__}),
        },
    )


class FailureLog:
    """Logs expected failures with a 5xx. For one event loop.

    While the ledger is unavailable, or the service starts, every client retries. A line for each
    attempt would fill the disk and bury everything else.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[tuple[str | None, int], tuple[float, int]] = {}

    def tell(self, endpoint: str | None, status: int, error: BaseException) -> None:
        """Log the first of similar failures, and after a while one more with their count."""
        now, key = self._clock(), (endpoint, status)
        told_until, untold = self._told.get(key, (0.0, 0))
        if now < told_until:
            self._told[key] = told_until, untold + 1
            return
        self._told[key] = now + TOLD_AGAIN_S, 0
        before = f" (and {untold} times before)" if untold else ""
        what = str(error) or type(error).__name__
        _log.warning("%s failed with %d%s: %s", endpoint, status, before, what)


_PROCESS, _NUMBERS = secrets.token_hex(4), itertools.count()
"""Exchanges are named after both: a random name for each would cost a system call."""
_MAX_HEADER_BYTES = 64 * 1024
_HEADERS_TOO_LARGE = 431
_UNREAD = frozenset({"telemetry"})
"""Accepted without being decoded: a client would repeat it for ever if it were refused."""
_POLLS = frozenset(name for name, endpoint in ENDPOINTS.items() if endpoint.pool is Pool.RETRIEVE)
_UNAVAILABLE_S = 1.0


class App:
    """Answers requests. For one event loop.

    Args:
        context: The components of the API; the caller closes the ledger and the store.
        observer: Told of every exchange when it is over.

    Raises:
        ValidationError: An endpoint has no handler, or more than one.
    """

    def __init__(self, context: ApiContext, observer: Observer = log_exchange) -> None:
        self.context = context
        self._observer = observer
        routes = collect()
        self._handlers = routes.handlers
        self._open = routes.open
        self._router = Router(routes.endpoints)
        self._decoder = RequestDecoder(context.settings)
        self._prefix = context.settings.path_prefix
        self._failures = FailureLog()

    async def check_reached(self, headers: Mapping[str, str]) -> None:
        """Refuse what a web page sent, if the service has no keys (`check_local`).

        For pages beside the API that need no key. The ledger is asked only about what would be
        refused: health checks must not wait for it while it is unavailable.

        Raises:
            PermissionDeniedError: It comes from a web page, or was sent to a foreign host name.
        """
        try:
            check_local(headers)
        except PermissionDeniedError:
            try:
                if await self.context.authenticator.has_keys():
                    return
            except LedgerError as exc:
                _log.debug("cannot look up whether there are keys: %s", exc)
            raise

    # One exchange

    async def answer(self, incoming: IncomingRequest) -> None:
        """Answer a request. Log lines of the current task have its fields from now on."""
        report = ExchangeReport(
            call_id=f"{_PROCESS}{next(_NUMBERS):x}",
            method=incoming.method,
            path=incoming.path,
            started_s=time.perf_counter(),
        )
        try:
            reply = await self._reply(incoming, report)
            headers = {**reply.headers, "X-Request-Id": report.call_id}
            if isinstance(reply, StreamedReply):
                report.status = reply.status
                await _send_stream(reply, headers, report, incoming)
            else:
                sent = await incoming.answer(HttpReply(reply.status, headers, reply.parts))
                report.status = sent.status
                report.reply_bytes = sum(map(len, sent.parts))
        except ClientLeftError:
            report.client_left = True
        finally:
            report.ended_s = time.perf_counter()
            self._observer(report)

    async def _reply(
        self, incoming: IncomingRequest, report: ExchangeReport
    ) -> HttpReply | StreamedReply:
        """What to answer; failures become replies here."""
        headers = incoming.headers
        try:
            _check_headers(headers)
            endpoint, fields = self._find(incoming)
            report.endpoint = endpoint.name
            tenant_id = await self._tenant(endpoint, incoming, report)
            if tenant_id:
                incoming.authenticate(tenant_id)
            bind(request=report.call_id, endpoint=endpoint.name, tenant=tenant_id or None)
            raw, pieces = await self._receive(endpoint, incoming, report)
            request, body = await self._decode(endpoint, fields, incoming, raw, tenant_id)
            if endpoint.name in _POLLS:  # a long poll does not need its body
                raw = body = b""
                incoming.release_body()
            call = ApiCall(
                context=self.context,
                endpoint=endpoint,
                request=request,
                tenant_id=tenant_id,
                headers=headers,
                body=body,
                pieces=pieces,
                format=body_format(headers),
                call_id=report.call_id,
                base_url=self._base_url(incoming),
                left=incoming.left,
            )
            answer = await self._handlers[endpoint.name](call)
            if isinstance(answer, (HttpReply, StreamedReply)):
                return answer
            return to_reply(answer)
        except ClientLeftError:
            raise
        except (TinkerError, MemoryError) as exc:
            report.error = without_frames(exc)
            if isinstance(exc, LedgerUnavailableError):
                self.context.ledger.board.doubt_ledger()
                if report.endpoint in _POLLS:
                    # Clients poll again at once after a 5xx; thousands of them must not spin.
                    await asyncio.sleep(_UNAVAILABLE_S)
            elif isinstance(exc, CheckpointUnavailableError):
                self.context.ledger.board.doubt_store()
            reply = _refusal(exc)
            if reply.status >= 500:
                self._failures.tell(report.endpoint, reply.status, exc)
            return reply
        except Exception as exc:  # noqa: BLE001 - the HTTP edge
            _log.exception("%s failed", report.endpoint or report.path)
            report.error = without_frames(exc)
            return reply_from_error(exc)
        finally:
            incoming.release_body()

    def _find(self, incoming: IncomingRequest) -> tuple[Endpoint, dict[str, str]]:
        method, path = incoming.method, incoming.path
        if self._prefix and not path.startswith(self._prefix + "/"):
            raise _unknown_route(method, path)
        path = path[len(self._prefix) :]
        found = self._router.find(method, path)
        if found is None:
            methods = self._router.methods(path)
            if methods:
                raise _WrongMethodError(method, path, methods)
            raise _unknown_route(method, path)
        return found

    async def _tenant(
        self, endpoint: Endpoint, incoming: IncomingRequest, report: ExchangeReport
    ) -> TenantId:
        if endpoint.name in self._open:
            return TenantId("")
        credentials, given = self.context.authenticator, incoming.headers.get("x-api-key")
        holder = credentials.remembered(given) or await credentials.holder(given)
        if holder.key is None:
            check_local(incoming.headers)
        if endpoint.is_for_operators and not holder.is_operator:
            raise _unknown_route(incoming.method, incoming.path[len(self._prefix) :])
        report.tenant_id = holder.tenant.tenant_id
        return holder.tenant.tenant_id

    async def _receive(
        self, endpoint: Endpoint, incoming: IncomingRequest, report: ExchangeReport
    ) -> tuple[Memory, AsyncIterator[Memory | None] | None]:
        """The whole body, or what its handler reads it with."""
        if endpoint.takes_stream:
            most_bytes = self.context.settings.import_bytes
            return b"", _counted(incoming.read_pieces(most_bytes), report)
        raw = await incoming.read_body()
        if raw is None:
            raise ClientLeftError
        report.body_bytes = len(raw)
        return raw, None

    async def _decode(
        self,
        endpoint: Endpoint,
        fields: dict[str, str],
        incoming: IncomingRequest,
        raw: Memory,
        tenant_id: TenantId,
    ) -> tuple[Any, Memory]:
        """The request and its decompressed body."""
        if endpoint.name in _UNREAD:
            return None, b""
        if endpoint.takes_stream:
            return await self._decoder.decode(endpoint, fields, incoming, b""), b""
        body = await self._decoder.decompress(incoming, raw)
        try:
            return await self._decoder.decode(endpoint, fields, incoming, body), body
        except TinkerError:
            if endpoint.name in NUMBERED:
                await self._spend_undecodable(tenant_id, body, body_format(incoming.headers))
            raise

    async def _spend_undecodable(self, tenant_id: TenantId, body: Memory, form: Format) -> None:
        """Spend the number of a command that cannot be decoded: later ones need not wait for it."""
        read = functools.partial(number_of, body, form)
        with contextlib.suppress(DecodeError, NotFoundError):
            model_id, number = read() if len(body) < ON_THREAD_BYTES else await run_on_thread(read)
            await spend_unread(
                self.context.lookups, self.context.ledger, tenant_id, model_id, number
            )

    def _base_url(self, incoming: IncomingRequest) -> str:
        given = self.context.settings.public_url
        if given is not None:
            return given.rstrip("/")
        host = incoming.headers.get("host", "localhost")
        return f"{incoming.scheme}://{host}{self._prefix}"


def _unknown_route(method: str, path: str) -> NotFoundError:
    return NotFoundError(f"there is no {method} {path[:200]}")


class _WrongMethodError(APIStatusError):
    """405: the path exists, for other methods."""

    def __init__(self, method: str, path: str, methods: list[str]) -> None:
        super().__init__(f"{path[:200]} takes {', '.join(methods)}, not {method}", status_code=405)
        self.allow = ", ".join(methods)


def _refusal(error: TinkerError | MemoryError) -> HttpReply:
    reply = reply_from_error(error)
    if isinstance(error, _WrongMethodError):
        return HttpReply(reply.status, {**reply.headers, "Allow": error.allow}, reply.parts)
    return reply


def _check_headers(headers: Mapping[str, str]) -> None:
    if sum(map(len, headers)) + sum(map(len, headers.values())) > _MAX_HEADER_BYTES:
        raise APIStatusError(
            f"the headers are larger than {_MAX_HEADER_BYTES} bytes",
            status_code=_HEADERS_TOO_LARGE,
        )


async def _counted(
    pieces: AsyncIterator[Memory | None], report: ExchangeReport
) -> AsyncIterator[Memory | None]:
    async for piece in pieces:
        report.body_bytes += 0 if piece is None else len(piece)
        yield piece


# Sending


async def _send_stream(
    reply: StreamedReply, headers: dict[str, str], report: ExchangeReport, incoming: IncomingRequest
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
    reply: StreamedReply, headers: dict[str, str], report: ExchangeReport, incoming: IncomingRequest
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
