"""A whole service, assembled from its settings: ledger, store, engine, scheduler, API.

`lifecycle.py` gives it a socket; the embedded service calls its app in the process. Components are
opened in the order in which they need each other, and closed in reverse.

With the role `api` there is no engine and no scheduler: base models are those that the scheduler
has published. With the role `scheduler` the engine is loaded first, and then the lease is waited
for; `operator_pages.py` refuses requests of the API.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.checkpoints.registry import open_store
from tinsmith.engine.base import Engine
from tinsmith.engine.registry import check_device, make_engine
from tinsmith.errors import (
    EngineLostError,
    LeaseHeldError,
    LedgerError,
    TinkerError,
    ValidationError,
)
from tinsmith.observe.metrics import ServiceMetrics
from tinsmith.observe.spans import Spans, open_spans
from tinsmith.service.api.api_settings import ApiSettings
from tinsmith.service.api.app import App
from tinsmith.service.api.context import ApiContext
from tinsmith.service.api.keys import KeyRing
from tinsmith.service.api.sweeper import Sweeper
from tinsmith.service.http.bodies import BodyLimits
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import TenantId
from tinsmith.service.ledger.recovery import names_files
from tinsmith.service.ledger.registry import open_ledger
from tinsmith.service.ledger.scheduler_lease import Lease
from tinsmith.service.ledger.server_versions import GONE_S, NOTED_S, RunningServer
from tinsmith.service.run import fleet_reports, run_log
from tinsmith.service.run.fleet_reports import FleetReports
from tinsmith.service.run.free_space import FreeSpace
from tinsmith.service.run.key_guard import check_keys_lost, note_keys
from tinsmith.service.run.lease_keeper import LeaseKeeper
from tinsmith.service.run.metrics_reader import MetricsReader
from tinsmith.service.run.model_fetching import fetched_models, loading
from tinsmith.service.run.published_models import PublishedModels, publish_models
from tinsmith.service.run.run_log import RunLog
from tinsmith.service.run.secret import signing_secret
from tinsmith.service.run.service_settings import ServiceSettings
from tinsmith.service.run.store_health import StoreHealth
from tinsmith.service.run.supervisor import SchedulerSupervisor
from tinsmith.service.scheduler.scheduler import Scheduler
from tinsmith.service.scheduler.scheduler_settings import SchedulerSettings

_log = logging.getLogger(__name__)

SPACE_S = 5.0
"""How often the free space on the disk is measured."""
MODELS_S = 2.0
"""How often a server without an engine looks for the base models that the scheduler serves."""
REAP_S = 5.0
"""How often silent sessions are looked for."""
SWEEP_S = 60.0
"""How often expired results, sessions and files are deleted."""
IO_THREADS = 64
"""More than the commands that may use the store at once: bodies and payloads are written and read
on these threads too, and must not wait behind a slow store."""


class Tell(Protocol):
    """Told what a start is waiting for."""

    def __call__(self, what: str, *, is_standby: bool = False) -> None:
        """Note it, in words; a standby is ready, and waits for its turn."""
        ...


def _tell_nobody(what: str, *, is_standby: bool = False) -> None:
    pass


class Service:
    """A running service, made by `open`. For one event loop.

    Attributes:
        app: Answers requests.
        ledger: The durable record.
        store: Saved weights.
        metrics: The service's metrics.
        spans: Where its spans go, if anywhere.
        free_space: The free space on the disk of the data folder.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        ledger: Ledger,
        store: CheckpointStore,
        engine: Engine | None,
        spans: Spans,
        secret: bytes,
        leasing: LeaseKeeper | None,
        api: ApiSettings,
        published: PublishedModels | None = None,
    ) -> None:
        self.ledger = ledger
        self._leasing = leasing
        self.store = store
        self.spans = spans
        self.metrics = ServiceMetrics()
        self._settings = settings
        self._engine = engine
        self._keys = KeyRing(ledger)
        self._working = None if engine is None else self._supervisor(engine)
        self._sweeper = Sweeper(ledger, store, self._epoch)
        self._measuring = MetricsReader(
            self.metrics, ledger, spans, has_scheduler=engine is not None
        )
        self._run_log = RunLog(ledger, self._epoch)
        self._published = published or PublishedModels(
            ledger, settings.limits, () if engine is None else engine.base_models()
        )
        self._fleet_reports = None if engine is None else FleetReports(ledger, engine, self._epoch)
        context = ApiContext(
            ledger,
            self._published,
            store=store,
            settings=api,
            secret=secret,
        )
        self.app = App(context, self._measuring.tell_exchange)
        self.metrics.long_polls.read_with(lambda: len(self.app.context.long_polls))
        self.free_space = FreeSpace(settings.data)
        self.metrics.free_bytes.read_with(lambda: self.free_space.free_bytes)
        self.metrics.engine_losses.read_with(self._engine_losses)
        self._server_id = secrets.token_hex(8)
        self._tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(IO_THREADS, "tinsmith-io"))
        self._lost: asyncio.Future[TinkerError] = loop.create_future()
        self._has_begun = False
        self._is_closed = False

    def _supervisor(self, engine: Engine) -> SchedulerSupervisor:
        scheduling = _scheduler_settings(self._settings)
        return SchedulerSupervisor(
            engine,
            self.ledger.board,
            lambda suspects: Scheduler(
                self.ledger, engine, self.store, scheduling, self.spans, suspects, self._lease
            ),
            leasing=self._leasing,
            prepare=lambda: publish_models(self.ledger, engine.base_models(), self._epoch()),
        )

    @classmethod
    async def open(
        cls,
        settings: ServiceSettings,
        *,
        is_private: bool = False,
        is_record_only: bool = False,
        tell: Tell = _tell_nobody,
    ) -> Self:
        """Open everything, then recover and work in the background.

        Returns when requests can be accepted; `ledger.board.report`, and with it `/readyz`, says
        whether commands are being run yet.

        Args:
            settings: The service's settings.
            is_private: Whether only the owner of the data folder can reach it, who needs no key.
            is_record_only: Whether to answer only from the ledger: no model is fetched or loaded,
                and no command is run.
            tell: Called with what is being waited for, in words, from any thread.

        Raises:
            TinkerError: A component cannot be opened; the message says which and why.
        """
        has_engine = not is_record_only and settings.role != "api"
        if settings.engine == "embedded" and has_engine:
            for device in {settings.device, *(one.device or "auto" for one in settings.fleet)}:
                check_device(device)  # before a model is fetched
        make_folder(settings.data)
        async with contextlib.AsyncExitStack() as opened:
            ledger = await opened.enter_async_context(
                await open_ledger(
                    settings.database,
                    retention=settings.retention,
                    accept_loss=settings.accept_loss,
                )
            )
            leasing = published = None
            engine: Engine | None = None
            if has_engine and settings.role == "all":
                leasing = await _leasing(settings, ledger, tell)
                opened.push_async_callback(leasing.close)
            if not await _has_keys(settings, KeyRing(ledger)) and not is_private:
                _check_reach(settings)
            secret = await signing_secret(ledger, settings.data)
            store = await asyncio.to_thread(
                open_store,
                settings.checkpoints,
                work=settings.data / "work",
                must_exist=await names_files(ledger),
            )
            opened.callback(store.close)
            health = StoreHealth(store, ledger.board)
            if is_record_only:
                engine = make_engine("fake", settings.served_models, settings.embedded)
                await opened.enter_async_context(engine)
            else:
                await health.start()
            if settings.role == "api":
                published = await PublishedModels.wait(ledger, settings.limits, tell)
            elif has_engine:
                models = await fetched_models(settings, tell)
                with loading(models, settings, tell):
                    engine = make_engine(
                        settings.engine,
                        models,
                        settings.embedded,
                        has_own_process=settings.has_engine_process,
                        replicas=settings.fleet,
                        folder=settings.data / "fleet",
                        silence_s=settings.engine_silence_s,
                    )
                    await opened.enter_async_context(engine)
            if settings.role == "scheduler":
                leasing = await _leasing(settings, ledger, tell)
                opened.push_async_callback(leasing.close)
            spans = open_spans(settings.otel_endpoint)
            api = api_settings(settings, is_private=is_private)
            service = cls(settings, ledger, store, engine, spans, secret, leasing, api, published)
            await service.free_space.look()
            opened.pop_all()
        if not is_record_only:
            service.begin()
            service._start("store health", health.run)
        return service

    @property
    def is_standing_by(self) -> bool:
        """Whether its scheduler waits for the lease that another server holds."""
        return self._leasing is not None and self._leasing.is_waiting

    def begin(self) -> None:
        """Recover and work in the background, from parts that are open."""
        self._has_begun = True
        sessions = self.app.context.sessions
        self.ledger.board.follow()
        if self._working is not None:
            self._start("scheduler", self._work)
            self._start("session ends", sessions.finish_endings)
            self._start("sweeping", _every(SWEEP_S, self._sweep))
            self._start("runs", _every(run_log.LOOK_S, self._run_log.look))
            self._start("replicas", _every(fleet_reports.LOOK_S, self._report_fleet))
        else:
            self._start("base models", _every(MODELS_S, self._published.look))
        if self._settings.role != "scheduler":  # it hears no heartbeats
            self._start("silent sessions", _every(REAP_S, sessions.end_silent))
        if self.ledger.is_shared:
            self._start("server entry", self._note_running)
        self._start("keys", _every(REAP_S, self._note_keys))
        self._start("free space", _every(SPACE_S, self.free_space.look))
        self._start("measuring", self._measuring.run)

    async def _note_running(self) -> None:
        """Keep it known that this server runs, for those that start."""
        servers = self.ledger.entries(RunningServer)
        where = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            while True:
                now = self.ledger.now()
                entry = RunningServer(
                    id=self._server_id,
                    tenant_id=TenantId(""),
                    created_at=now,
                    role=self._settings.role,
                    where=where,
                    noted_at=now,
                )
                try:
                    await servers.put(entry)
                    for gone in await servers.due(now - 10 * GONE_S):
                        await servers.remove(gone.id, due_before=now - GONE_S)
                except LedgerError as exc:
                    _log.debug("could not note that this server runs: %s", exc)
                await asyncio.sleep(NOTED_S)
        finally:
            with contextlib.suppress(LedgerError, asyncio.CancelledError):
                await servers.remove(self._server_id)

    async def _note_keys(self) -> None:
        """Remember that there are keys: the first may be created while the service runs."""
        await _has_keys(self._settings, self._keys)

    @property
    def _lease(self) -> Lease | None:
        """The scheduler's lease; None for a service that only reads."""
        return None if self._leasing is None else self._leasing.lease

    def _epoch(self) -> int | None:
        return None if self._lease is None else self._lease.epoch

    def _engine_losses(self) -> int:
        if self._working is None or self._engine is None:
            return 0
        return self._working.losses + sum(one.losses for one in self._engine.replicas())

    async def _report_fleet(self) -> None:
        if self._fleet_reports is not None and self._lease is not None and self._lease.is_held:
            await self._fleet_reports.look()

    async def _sweep(self) -> None:
        if self._lease is not None and self._lease.is_held:
            await self._sweeper.sweep()

    async def _work(self) -> None:
        assert self._working is not None
        try:
            await self._working.run()
        except (EngineLostError, LeaseHeldError) as exc:
            self._lost.set_result(exc)
            raise
        except Exception:
            if self._leasing is not None:
                await self._leasing.close()  # nothing runs here: let another server take over
            raise

    async def wait_lost(self) -> TinkerError:
        """Return why the service cannot continue: its engine was lost too often, or its lease.

        Accepted commands are in the ledger; the next start continues with them.
        """
        return await asyncio.shield(self._lost)

    def _start(self, what: str, work: Callable[[], Awaitable[object]]) -> None:
        async def told() -> None:
            try:
                await work()
            except (asyncio.CancelledError, EngineLostError, LeaseHeldError):
                raise  # the last two are reported by whoever stops the service for them
            except Exception:
                _log.exception("the service's %s task has failed", what)
                raise

        self._tasks.append(asyncio.create_task(told(), name=f"service: {what}"))

    def end_waits(self) -> None:
        """Answer all long polls now, and let no new one wait."""
        self.app.context.long_polls.close()

    async def close(self) -> None:
        """Answer long polls, finish what is running, save every model, and close everything.

        May be called again.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.end_waits()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._has_begun and self._working is not None:
            await self._working.close(self._settings.drain_s)
            await self._run_log.look()
        if self._engine is not None:
            await self._engine.close()
        await asyncio.to_thread(self.store.close)
        if self._leasing is not None:
            await self._leasing.close()
        await self.ledger.close()
        await asyncio.to_thread(self.spans.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def _leasing(settings: ServiceSettings, ledger: Ledger, tell: Tell) -> LeaseKeeper:
    """Acquire the scheduler's lease; a server with the role `scheduler` waits for its turn."""
    is_standby = settings.role == "scheduler"
    if is_standby:
        tell("standing by: another server holds the scheduler's lease", is_standby=True)
        _log.info("the engine is loaded; waiting for the scheduler's lease")
    else:
        tell("waiting for the lease on the ledger, which another server may hold")
    leasing = await LeaseKeeper.acquire(ledger, settings.lease_s, is_standby=is_standby)
    if is_standby:
        _log.info("acquired the scheduler's lease, with epoch %d", leasing.lease.epoch)
    tell("the service is starting")
    return leasing


async def _has_keys(settings: ServiceSettings, keys: KeyRing) -> bool:
    """Whether there is an API key; if so, that is also noted outside the ledger."""
    has_keys = await keys.has_keys()
    if has_keys:
        await asyncio.to_thread(note_keys, settings.data)
    return has_keys


def _check_reach(settings: ServiceSettings) -> None:
    """Refuse to serve others without keys; before models are loaded, which takes minutes."""
    check_keys_lost(settings.data)
    if settings.is_loopback:
        return
    raise ValidationError(
        f"refusing to serve on {settings.host} without API keys: anyone could use the service",
        remedy="run `tinsmith key create` first, or serve on 127.0.0.1",
    )


def _every(period_s: float, work: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
    """Repeat work with pauses; a failure is logged, and the work is repeated."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                await work()
            except Exception as exc:  # noqa: BLE001 - such as a ledger that is unavailable for now
                _log.warning("%s failed, retrying in %g s: %s", work.__qualname__, period_s, exc)

    return repeat


def _scheduler_settings(settings: ServiceSettings) -> SchedulerSettings:
    return SchedulerSettings(
        gap_wait_s=settings.gap_wait_s,
        engine_silence_s=settings.engine_silence_s,
        snapshot_commands=settings.snapshots.every_commands,
        snapshot_work_s=settings.snapshots.every_s,
        most_batch_tokens=settings.limits.batch_tokens,
        store_wait_s=settings.store_wait_s,
    )


def api_settings(settings: ServiceSettings, *, is_private: bool = False) -> ApiSettings:
    """The limits of the API, from the settings of the service."""
    limits = settings.limits
    return ApiSettings(
        public_url=settings.public_url,
        direct_downloads=settings.direct_downloads,
        body_bytes=limits.body_bytes,
        import_bytes=limits.import_bytes,
        decoded_bytes=limits.decoded_bytes,
        commands_in_flight=limits.in_flight,
        most_sessions=limits.sessions,
        most_models=limits.models,
        long_poll_s=settings.long_poll_s,
        session_timeout_s=settings.session_timeout_s,
        is_embedded=is_private,
        offers_tokens=not is_private,  # there may be no key to give one for
        trusts_keyless=is_private,
    )


def body_limits(settings: ServiceSettings) -> BodyLimits:
    """The limits on the bodies that this service receives."""
    limits = settings.limits
    return BodyLimits(
        body_bytes=limits.body_bytes,
        bodies_bytes=limits.bodies_bytes,
        tenant_bodies_bytes=limits.tenant_bodies_bytes,
        address_bodies_bytes=limits.address_bodies_bytes,
        upload_bytes_per_s=limits.upload_bytes_per_s,
        upload_window_s=limits.upload_window_s,
    )


def make_folder(data: Path) -> None:
    """Create the data folder, readable by its owner alone.

    Raises:
        ValidationError: It cannot be created.
    """
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as exc:
        raise ValidationError(
            f"{data} cannot be the data folder: {exc.strerror or exc}",
            remedy="choose a writable folder with --data or TINSMITH_HOME",
        ) from exc
