"""An in-memory Tinker service for tests: it speaks the wire, counts on fingers, fails on request.

One request goes: routed by the table of endpoints, recorded, its credential checked, struck by a
fault if a rule says so, decoded, answered by the part that its endpoint belongs to, and written.
The parts are `account.py`, `sessions.py`, `training.py`, `sampling.py`, `polls.py`,
`extensions.py` and `checkpoints.py`; this module knows how an exchange goes and not what any
endpoint does.

The service runs in a thread of its own (`with`) or on the current loop (`async with`).
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from tinsmith.errors import AuthenticationError, NotFoundError, TinkerError
from tinsmith.testing.account import OPEN_ENDPOINTS, Account, Audit, AuditLog, Usage
from tinsmith.testing.checkpoint_store import CheckpointStore
from tinsmith.testing.checkpoints import Checkpoints
from tinsmith.testing.commands import Commands
from tinsmith.testing.downloads import DOWNLOAD, FOLDER, Downloads
from tinsmith.testing.extensions import Extensions
from tinsmith.testing.faults import ExchangeFault, Faults
from tinsmith.testing.http_reading import Incoming
from tinsmith.testing.http_server import BrokenReply, HttpServer, Reply, StreamedReply
from tinsmith.testing.polls import Polls
from tinsmith.testing.received import WAIT_TIMEOUT_S, ReceivedRequest, RequestLog
from tinsmith.testing.running import ServiceThread
from tinsmith.testing.sampling import Samplers
from tinsmith.testing.sessions import Sessions
from tinsmith.testing.settings import split_options
from tinsmith.testing.training import Models
from tinsmith.wire import json_format
from tinsmith.wire.content import decompress
from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.exchange import HttpReply, read_request, to_reply
from tinsmith.wire.failures import is_retried, reply_from_error
from tinsmith.wire.limits import DecodeLimits
from tinsmith.wire.routes import Router


class ScriptedService:
    """A whole service on a port of this machine, to be used as a context manager.

    The options are the fields of `ServiceSettings` and the flags of `client/config` and
    `client/dynamic_config`.
    """

    def __init__(self, **options: Any) -> None:
        self.settings, flags, dynamic_flags = split_options(options)
        self.faults = Faults()
        self._log = RequestLog(self.settings.kept_requests)
        self._router = Router()
        self._http = HttpServer(self._answer, max_body_bytes=self.settings.max_body_bytes)
        self._limits = DecodeLimits(memory_bytes=4 * self.settings.max_body_bytes)
        self._thread: ServiceThread | None = None
        self._base_url = ""
        self.account = Account(self.settings, flags, dynamic_flags)
        self._build()

    def _build(self) -> None:
        audit, usage = Audit(), Usage()
        store = CheckpointStore(audit)
        self.downloads = Downloads(
            lambda: self.base_url, gives_parts=self.settings.downloads_in_parts
        )
        self._commands = Commands(self.settings, self.faults)
        self.sessions = Sessions(self.settings, audit, store.sizes, self.downloads)
        shared = (self.settings, self.sessions, self._commands, store)
        samplers = Samplers(*shared, usage)
        self._models = Models(*shared, samplers, usage)
        self._extensions = Extensions(
            self.settings, self.account.flags, self._commands, samplers, self.faults
        )
        self._handlers: dict[str, Callable[[ReceivedRequest], Any]] = {
            **self.account.handlers(),
            **self.sessions.handlers(),
            **self._models.handlers(),
            **samplers.handlers(),
            **Polls(self.settings, self._commands, samplers).handlers(),
            **self._extensions.handlers(),
            **Checkpoints(self.settings, store, audit, self.downloads).handlers(),
            "get_billing_usage": usage.show,
            "get_audit_log": AuditLog(self.settings, audit, self.downloads).show,
        }

    # For tests

    @property
    def base_url(self) -> str:
        """Where clients find it; empty before it was opened."""
        return self._base_url

    @property
    def api_key(self) -> str:
        """The credential that it accepts."""
        return self.settings.api_key

    def requests(self, endpoint: str | None = None) -> list[ReceivedRequest]:
        """What has come, in order; to one endpoint if named as in `ENDPOINTS`."""
        return self._log.requests(endpoint)

    def in_flight(self, endpoint: str | None = None) -> int:
        """How many requests are being answered now."""
        return self._log.in_flight(endpoint)

    def wait_requests(
        self, endpoint: str | None, count: int, timeout_s: float = WAIT_TIMEOUT_S
    ) -> list[ReceivedRequest]:
        """Block until `count` requests have come; raises `TimeoutError`. Not on its own loop."""
        return self._log.wait(endpoint, count, timeout_s)

    async def wait_requests_async(
        self, endpoint: str | None, count: int, timeout_s: float = WAIT_TIMEOUT_S
    ) -> list[ReceivedRequest]:
        """As `wait_requests`, without blocking the loop."""
        return await asyncio.to_thread(self._log.wait, endpoint, count, timeout_s)

    def wait_ended(
        self, endpoint: str | None, count: int, timeout_s: float = WAIT_TIMEOUT_S
    ) -> None:
        """Block until `count` requests have been answered or left by their client."""
        self._log.wait_ended(endpoint, count, timeout_s)

    def forget_requests(self) -> None:
        """Begin to record anew."""
        self._log.clear()

    # Life

    async def open(self) -> None:
        """Begin to listen, on the loop that is running."""
        port = await self._http.open(self.settings.port)
        self._base_url = f"http://127.0.0.1:{port}{self.settings.path_prefix}"

    async def close(self) -> None:
        """Stop: connections are dropped, work ends where it is, all tasks are over."""
        await self._http.close()
        await self._models.close()
        await self._commands.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __enter__(self) -> Self:
        self._thread = ServiceThread(self.open, self.close)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        self._thread.stop()

    # One exchange

    async def _answer(self, incoming: Incoming) -> Reply:
        path = incoming.path.removeprefix(self.settings.path_prefix)
        found = self._router.find(incoming.method, path)
        is_download = path.startswith(FOLDER) and incoming.method == "GET"
        arrived_at = time.monotonic()
        # Before anybody is told of it: who waits for requests reads what they said.
        request, problem = self._decoded(*found, incoming) if found else (None, None)
        received = self._log.add(
            arrived_at=arrived_at,
            endpoint=found[0].name if found else DOWNLOAD if is_download else None,
            method=incoming.method,
            path=path,
            query=incoming.query,
            headers=incoming.headers,
            body_bytes=len(incoming.body),
            body=bytes(incoming.body) if self.settings.keep_bodies else None,
            connection=incoming.connection,
            request=request,
        )
        status: int | None = None
        client_left = True  # unless the exchange comes to its end
        try:
            if found is None:
                unrouted = self._answer_unrouted(path, incoming)
                reply: Reply = await self._under_faults(received, lambda: _ready(unrouted))
            else:
                endpoint = found[0]
                reply = await self._under_faults(
                    received, lambda: self._work(endpoint, received, problem)
                )
            status = None if isinstance(reply, BrokenReply) else reply.status
            client_left = False
        finally:
            if client_left or not isinstance(reply, StreamedReply):
                self._log.end(received, status, client_left=client_left)
        if isinstance(reply, StreamedReply):
            return StreamedReply(reply.status, reply.headers, self._logged(reply, received))
        return reply

    async def _logged(
        self, reply: StreamedReply, received: ReceivedRequest
    ) -> AsyncIterator[bytes]:
        """The pieces of a streamed reply; the exchange ends with the last."""
        client_left = True
        try:
            async for piece in reply.pieces:
                yield piece
            client_left = False
        finally:
            self._log.end(received, reply.status, client_left=client_left)

    def _answer_unrouted(self, path: str, incoming: Incoming) -> HttpReply:
        """A file, or the news that there is nothing here."""
        try:
            if path.startswith(FOLDER) and incoming.method == "GET":
                return self.downloads.get(path, incoming)
            raise NotFoundError(f"there is no {incoming.method} {path}")
        except TinkerError as exc:
            refusal = reply_from_error(exc)
            methods = self._router.methods(path)
            if not methods:
                return refusal
            return HttpReply(405, {**refusal.headers, "Allow": ", ".join(methods)}, refusal.parts)

    async def _under_faults(
        self, received: ReceivedRequest, work: Callable[[], Awaitable[HttpReply | StreamedReply]]
    ) -> Reply:
        """Do the work, unless a rule says that it goes wrong."""
        fault = self.faults.of_exchange(received)
        if fault is None:
            return await work()
        reply: HttpReply | StreamedReply = HttpReply(204, {}, [])
        if fault.does_work:
            reply = await work()
        if fault.status is not None:
            reply = _refusal(fault)
            self._count_refused(received, reply.status)
        if fault.hold is not None:
            await fault.hold.wait_released()
        await asyncio.sleep(fault.delay_s)
        return _struck(fault, reply)

    def _decoded(
        self, endpoint: Endpoint, path_fields: dict[str, str], incoming: Incoming
    ) -> tuple[Any, TinkerError | None]:
        """The request, or why it cannot be read."""
        headers = incoming.headers
        try:
            self._extensions.check_form(headers.get("content-type"))
            body = decompress(incoming.body, headers.get("content-encoding"), self._limits)
            return read_request(
                endpoint, path_fields, incoming.query, headers, body, self._limits
            ), None
        except TinkerError as exc:
            return None, exc

    async def _work(
        self, endpoint: Endpoint, received: ReceivedRequest, problem: TinkerError | None
    ) -> HttpReply | StreamedReply:
        """Do what was asked for, or say why not."""
        try:
            credential = received.headers.get("x-api-key")
            if endpoint.name not in OPEN_ENDPOINTS and not self.account.accepts(credential):
                raise AuthenticationError("the X-API-Key header holds no key of this service")
            if problem is not None:
                raise problem
            result = self._handlers[endpoint.name](received)
            if inspect.isawaitable(result):
                result = await result
        except TinkerError as exc:
            reply = reply_from_error(exc)
            self._count_refused(received, reply.status)
            return reply
        return result if isinstance(result, HttpReply | StreamedReply) else to_reply(result)

    def _count_refused(self, received: ReceivedRequest, status: int) -> None:
        """A training number that was refused for good is never sent again; see §7.1."""
        is_final = 400 <= status < 500 and status != 402 and not is_retried(status)
        model_id = getattr(received.request, "model_id", None)
        seq_id = getattr(received.request, "seq_id", None)
        if is_final and model_id is not None and seq_id:
            self._models.spend(model_id, seq_id)


async def _ready(reply: HttpReply) -> HttpReply:
    return reply


def _refusal(fault: ExchangeFault) -> HttpReply:
    assert fault.status is not None
    body = fault.body if fault.body is not None else {"detail": "refused, as the test asked"}
    headers = {"Content-Type": "application/json", **fault.headers}
    return HttpReply(fault.status, headers, [json_format.encode(body)])


def _struck(fault: ExchangeFault, reply: HttpReply | StreamedReply) -> Reply:
    """What becomes of a reply under a fault; a stream has no half, and is cut by other rules."""
    if fault.empty_400:
        return HttpReply(400, fault.headers, [])
    if fault.reset:
        return BrokenReply("reset")
    if fault.lose_reply:
        return BrokenReply("close")
    if isinstance(reply, StreamedReply):
        is_lost = fault.half_reply
        headers = {**reply.headers, **fault.headers}
        return BrokenReply("close") if is_lost else StreamedReply(200, headers, reply.pieces)
    if fault.half_reply:
        return BrokenReply("half", reply)
    return HttpReply(reply.status, {**reply.headers, **fault.headers}, reply.parts)


def running_service(**options: Any) -> ScriptedService:
    """A service that runs while its `with` or `async with` block lasts.

    With `with` it has a thread and a loop of its own, so that blocking clients can be tested; with
    `async with` it runs on the current loop. Options are those of `ScriptedService`.
    """
    return ScriptedService(**options)
