"""A Tinker service for tests: the real one, in memory, that records what it is asked and can fail.

It is assembled from the service's own parts: its HTTP server, its API, its scheduler, the ledger in
memory and the fake engine. Faults are injected around them: in the exchange (this module, called
by `exchange_seam.py`), in the ledger (`faulty_ledger.py`), in the engine (`faulty_engine.py`), in
streams (`stream_faults.py`) and on the connection (`byte_proxy.py`).

The service runs in a thread of its own (`with`) or on the current loop (`async with`).
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.engine.base import Engine
from tinsmith.engine.embedded.embedded_settings import EmbeddedSettings
from tinsmith.engine.fake.engine import FakeEngine, fake_model
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.engine.registry import make_engine
from tinsmith.errors import TinkerError
from tinsmith.observe.spans import open_spans
from tinsmith.service.api.api_call import StreamedReply
from tinsmith.service.api.keys import default_tenant, digest_of
from tinsmith.service.http.edge import HttpEdge
from tinsmith.service.http.server import BACKLOG, HttpServer
from tinsmith.service.ledger.records import ApiKey, QueueId
from tinsmith.service.run.assemble import Service, api_settings, body_limits
from tinsmith.service.run.service_settings import Limits, ServiceSettings
from tinsmith.testing.account import Account, json_reply
from tinsmith.testing.app_call import AppCall
from tinsmith.testing.byte_proxy import ByteProxy
from tinsmith.testing.downloads import DOWNLOAD, FOLDER, Downloads
from tinsmith.testing.exchange_seam import BrokenReply, ExchangeSeam, Incoming, Reply
from tinsmith.testing.faults import ExchangeFault, Faults
from tinsmith.testing.faulty_engine import FaultyEngine
from tinsmith.testing.faulty_ledger import CURRENT, REFUSED, FaultyLedger
from tinsmith.testing.received import WAIT_TIMEOUT_S, ReceivedRequest, RequestLog
from tinsmith.testing.running import ServiceThread
from tinsmith.testing.scripted_settings import split_options
from tinsmith.testing.stream_faults import struck_stream
from tinsmith.types.checkpoints import CheckpointArchiveUrlResponse
from tinsmith.types.extensions import ServiceFlags
from tinsmith.types.futures import TryAgainResponse
from tinsmith.types.runs import TraceExportResponse
from tinsmith.wire.content import decompress
from tinsmith.wire.decode_limits import DecodeLimits
from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.exchange import HttpReply, read_request, to_reply
from tinsmith.wire.failures import is_retried
from tinsmith.wire.routes import Router

Work = Callable[[], Awaitable[HttpReply | StreamedReply]]
SHORTEST_POLL_S = 0.001
CLOSE_S = 5.0
"""How long requests may take to end once their connections are dropped."""
SESSION_LOOKS = 10
"""How often silent sessions are looked for within the time that they have."""


class ScriptedService:
    """A whole service on a port of this machine, to be used as a context manager.

    The options are the fields of `ScriptedServiceSettings` and the flags of `client/config` and
    `client/dynamic_config`.
    """

    def __init__(self, **options: Any) -> None:
        self.settings, flags, dynamic_flags = split_options(options)
        self.faults = Faults()
        self.account = Account(flags, dynamic_flags, self.settings.token_lifetime_s)
        self.downloads = Downloads(
            lambda: self.base_url, gives_parts=self.settings.downloads_in_parts
        )
        self.answers: dict[str, Callable[[ReceivedRequest], HttpReply | StreamedReply]] = {}
        """Answers of the test's own, by endpoint, instead of the service's."""
        self._log = RequestLog()
        self._router = Router()
        self._limits = DecodeLimits(memory_bytes=4 * self.settings.max_body_bytes)
        self._traces_asked: dict[str, int] = {}
        self._steady_keys: dict[str, str] = {}
        self._thread: ServiceThread | None = None
        self._opened = contextlib.AsyncExitStack()
        self._base_url = ""

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
        """Forget what was recorded so far."""
        self._log.clear()

    # Life

    async def open(self) -> None:
        """Begin to listen, on the loop that is running."""
        async with contextlib.AsyncExitStack() as opened:
            listener = opened.enter_context(_listening(self.settings.port))
            port = listener.getsockname()[1]
            self._base_url = f"http://127.0.0.1:{port}{self.settings.path_prefix}"
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tinsmith-")))
            self._service = await opened.enter_async_context(await self._assembled(folder))
            if self.settings.session_lifetime_s is not None:
                looking = asyncio.create_task(self._end_silent(self.settings.session_lifetime_s))
                opened.callback(looking.cancel)
            inner = _listening(0)
            self._proxy = ByteProxy(listener, inner.getsockname()[1])
            seam = ExchangeSeam(
                self._answer, self._proxy.connection_from, self.settings.max_body_bytes
            )
            server = HttpServer(seam)
            await server.open(inner)
            opened.push_async_callback(server.close, CLOSE_S)
            opened.push_async_callback(self._proxy.close)
            self._opened = opened.pop_all()

    async def close(self) -> None:
        """Stop: connections are dropped, work ends where it is, all tasks are over."""
        await self._opened.aclose()

    async def _assembled(self, folder: Path) -> Service:
        """The real service over a ledger in memory and the chosen engine, at work."""
        chosen = self.settings
        settings = ServiceSettings(
            public_url=self._base_url,
            data=folder,
            database="memory:",
            engine=chosen.engine,
            models=tuple(chosen.base_models),
            limits=Limits(
                body_bytes=chosen.max_body_bytes, decoded_bytes=4 * chosen.max_body_bytes
            ),
            long_poll_s=max(chosen.long_poll_s, SHORTEST_POLL_S),
            gap_wait_s=chosen.gap_wait_s,
            session_timeout_s=chosen.session_lifetime_s or 1e6,
            drain_s=5.0,
        )
        self._ledger = FaultyLedger(self.faults, chosen.result_lifetime_s)
        faulty = FaultyEngine(
            self._engine(settings),
            chosen.max_tokens,
            lambda work_id: self._ledger.failure_of(work_id) is not None,
        )
        engine = cast(Engine, faulty)
        await engine.open()
        await self._add_keys()
        flags = msgspec.convert(self.account.flags, ServiceFlags, strict=False)
        service = Service(
            settings,
            self._ledger,
            FolderStore(folder / "checkpoints"),
            engine,
            open_spans(None),
            secret=b"of a service for tests, which signs nothing of worth",
            leasing=None,
            api=msgspec.structs.replace(
                api_settings(settings),
                inline_bytes=chosen.inline_bytes,
                batch_items=flags.tinsmith_batch_items or 256,
                batch_bytes=flags.tinsmith_batch_bytes or 2**30,
                answer_inline_bytes=flags.tinsmith_inline_bytes or 2**20,
            ),
        )
        self._app = HttpEdge(service.app.answer, body_limits(settings))
        service.begin()
        return service

    def _engine(self, settings: ServiceSettings) -> Engine:
        chosen = self.settings
        if chosen.engine != "fake":
            # One thread: how many there are decides the last bits.
            return make_engine(chosen.engine, settings.served_models, EmbeddedSettings(threads=1))
        models = [
            msgspec.structs.replace(
                fake_model(one.name, one.tokenizer_id, one.alias_of),
                vocabulary=chosen.vocabulary_size,
                eos_tokens=(chosen.eos_token,),
            )
            for one in settings.served_models
        ]
        return FakeEngine(models, FakeSettings(tokens_per_step=1))

    async def _add_keys(self) -> None:
        """All keys belong to one tenant: what one has made, the others see."""
        tenant = await default_tenant(self._ledger)
        for key in (self.settings.api_key, *self.settings.further_api_keys):
            await self._ledger.entries(ApiKey).add(
                ApiKey(
                    id=digest_of(key),
                    tenant_id=tenant.tenant_id,
                    created_at=self._ledger.now(),
                    name="test key",
                    shown=key[:8],
                )
            )

    async def _end_silent(self, lifetime_s: float) -> None:
        while True:
            await asyncio.sleep(lifetime_s / SESSION_LOOKS)
            await self._service.app.context.sessions.end_silent()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self) -> Self:
        self._thread = ServiceThread(self.open, self.close)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._thread.stop()

    # One exchange

    async def _answer(self, incoming: Incoming) -> Reply:
        path = incoming.path.removeprefix(self.settings.path_prefix)
        found = self._router.find(incoming.method, path)
        is_download = path.startswith(FOLDER) and incoming.method == "GET"
        arrived_at = time.monotonic()
        # Decoded before it is recorded: who waits for requests reads what they said.
        received = self._log.add(
            arrived_at=arrived_at,
            endpoint=found[0].name if found else DOWNLOAD if is_download else None,
            method=incoming.method,
            path=path,
            query=incoming.query,
            headers=incoming.headers,
            body_bytes=len(incoming.body),
            body=incoming.body if self.settings.keep_bodies else None,
            connection=incoming.connection.number,
            request=self._decoded(*found, incoming) if found else None,
        )
        CURRENT.set(received)
        status: int | None = None
        client_left = True  # unless the exchange comes to its end
        try:
            reply = await self._under_faults(received, lambda: self._work(received, incoming))
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
            async with contextlib.aclosing(reply.pieces) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    yield piece
            client_left = False
        finally:
            self._log.end(received, reply.status, client_left=client_left)

    def _decoded(self, endpoint: Endpoint, fields: dict[str, str], incoming: Incoming) -> Any:
        """The request; None if it cannot be read, which the service says itself."""
        headers = incoming.headers
        try:
            body = decompress(incoming.body, headers.get("content-encoding"), self._limits)
            return read_request(endpoint, fields, incoming.query, headers, body, self._limits)
        except TinkerError:
            return None

    async def _under_faults(self, received: ReceivedRequest, work: Work) -> Reply:
        """Do the work, unless a rule says that it goes wrong."""
        fault = self.faults.of_exchange(received)
        if fault is None:
            return await work()
        reply: HttpReply | StreamedReply = HttpReply(204, {}, [])
        if fault.does_work:
            reply = await work()
        if fault.status is not None:
            reply = _refusal(fault)
            await self._note_refused(received, fault.status)
        if fault.hold is not None:
            await fault.hold.wait_released()
        await asyncio.sleep(fault.delay_s)
        return _struck(fault, reply)

    async def _note_refused(self, received: ReceivedRequest, status: int) -> None:
        """A command's number that was refused for good is never sent again."""
        is_final = 400 <= status < 500 and status != 402 and not is_retried(status)
        model_id = getattr(received.request, "model_id", None)
        seq_id = getattr(received.request, "seq_id", None)
        if is_final and model_id is not None and seq_id:
            await self._ledger.spend(QueueId(model_id), seq_id)

    async def _work(
        self, received: ReceivedRequest, incoming: Incoming
    ) -> HttpReply | StreamedReply:
        """What the service answers, as the options have it."""
        if received.endpoint in self.answers:
            return self.answers[received.endpoint](received)
        if received.endpoint == DOWNLOAD and self.downloads.has(received.path):
            return self.downloads.get(received.path, received.headers)
        refusal = self.account.refusal(received) or await self._paused(received)
        if refusal is not None:
            return refusal
        headers = dict(received.headers)
        if "x-api-key" in headers:
            headers["x-api-key"] = self.account.credential(headers["x-api-key"])
        if received.endpoint == DOWNLOAD and not self.settings.downloads_in_parts:
            headers.pop("range", None)
        if received.endpoint in ("create_session", "copy_weights"):
            headers["x-idempotency-key"] = self._steady_key(headers.get("x-idempotency-key"))
        reply = await AppCall(self._app, incoming, received.path, headers).reply()
        if isinstance(reply, HttpReply):
            return self._posed(received, reply)
        faults = self.faults.of_stream(received)
        pieces = struck_stream(reply.pieces, faults) if faults else reply.pieces
        return StreamedReply(reply.status, reply.headers, pieces)

    def _steady_key(self, given: str | None) -> str:
        """A key that makes ids, and what is drawn from them, the same in each run of a program."""
        number = len(self._steady_keys)
        return self._steady_keys.setdefault(given or f"none {number}", f"key {number}")

    async def _paused(self, received: ReceivedRequest) -> HttpReply | None:
        """What a poll is told of a pause that has its own ideas of time and status."""
        if received.endpoint != "retrieve_future" or received.request is None:
            return None
        request_id = received.request.request_id
        hold = self._ledger.pause_of(request_id)
        if hold is None or (hold.poll_after_s is None and hold.poll_status == 408):
            return None
        held_s = self.settings.long_poll_s if hold.poll_after_s is None else hold.poll_after_s
        command = await self._ledger.wait_settled(request_id, timeout_s=held_s)
        if command.is_settled:
            return None
        hold.note_poll()
        told = to_reply(
            TryAgainResponse(
                request_id=request_id,
                queue_state=hold.queue_state,
                queue_state_reason=hold.reason,
                retry_after_ms=hold.retry_after_ms,
            )
        )
        return HttpReply(hold.poll_status, told.headers, told.parts)

    def _posed(self, received: ReceivedRequest, reply: HttpReply) -> HttpReply:
        """A reply as a service with these options gives it."""
        self._note_polls(received, reply)
        name, body = received.endpoint, b"".join(reply.parts)
        if name == "get_checkpoint_archive_url" and reply.status == 302:
            return reply if self.settings.archive_redirects else _without_redirect(reply)
        if reply.status != 200:
            return reply
        if name == "get_audit_log" and self.settings.audit_redirects:
            return HttpReply(302, {"Location": self.downloads.put("audit.json", body)}, [])
        if name == "export_session_trace":
            session_id = received.request.session_id
            asked = self._traces_asked[session_id] = self._traces_asked.get(session_id, 0) + 1
            if asked <= self.settings.trace_polls:
                return to_reply(TraceExportResponse(status="pending"))
        return self.account.posed(received, reply)

    def _note_polls(self, received: ReceivedRequest, reply: HttpReply) -> None:
        """Count the polls that were told of a pause."""
        holds = []
        if received.endpoint == "retrieve_future" and reply.status == 408:
            holds = [self._ledger.pause_of(received.request.request_id)]
        elif received.endpoint == "retrieve_results" and reply.status == 200:
            holds = [*self._ledger.pauses_of_queue(received.request.target.sampling_session_id)]
        for hold in holds:
            if hold is not None:
                hold.note_poll()


def _listening(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=BACKLOG)


def _without_redirect(reply: HttpReply) -> HttpReply:
    """The address of an archive in the body, as newer services give it."""
    headers = {name.lower(): value for name, value in reply.headers.items()}
    expires = email.utils.parsedate_to_datetime(headers["expires"])
    return to_reply(CheckpointArchiveUrlResponse(url=headers["location"], expires=expires))


def _refusal(fault: ExchangeFault) -> HttpReply:
    assert fault.status is not None
    reply = json_reply(fault.body or {"detail": REFUSED}, fault.status)
    return HttpReply(reply.status, {**reply.headers, **fault.headers}, reply.parts)


def _struck(fault: ExchangeFault, reply: HttpReply | StreamedReply) -> Reply:
    """What becomes of a reply under a fault; a stream has no half, and is cut by other rules."""
    if fault.empty_400:
        return HttpReply(400, fault.headers, [])
    if fault.reset:
        return BrokenReply("reset")
    if fault.lose_reply:
        return BrokenReply("close")
    if isinstance(reply, StreamedReply):
        headers = {**reply.headers, **fault.headers}
        if fault.half_reply:
            return BrokenReply("close")
        return StreamedReply(reply.status, headers, reply.pieces)
    if fault.half_reply:
        return BrokenReply("half", reply)
    return HttpReply(reply.status, {**reply.headers, **fault.headers}, reply.parts)


def running_service(**options: Any) -> ScriptedService:
    """A service that runs while its `with` or `async with` block lasts.

    With `with` it has a thread and a loop of its own, so that blocking clients can be tested; with
    `async with` it runs on the current loop. Options are those of `ScriptedService`.
    """
    return ScriptedService(**options)
