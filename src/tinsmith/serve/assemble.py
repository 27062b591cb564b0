"""A whole service, put together from its settings: ledger, store, engine, scheduler, server.

`lifecycle.py` gives it a socket; the embedded service calls its app in the process. It is opened in
the order in which its parts need each other, and closed in the opposite one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.checkpoints.registry import open_store
from tinsmith.engines.base import BaseModel, Engine
from tinsmith.engines.registry import check_device, make_engine
from tinsmith.errors import EngineLostError, LeaseHeldError, TinkerError, ValidationError
from tinsmith.ledger.base import Ledger
from tinsmith.ledger.lease import Lease
from tinsmith.ledger.records import Session
from tinsmith.ledger.recovery import names_files
from tinsmith.ledger.registry import open_ledger
from tinsmith.observe.metrics import ServiceMetrics
from tinsmith.observe.spans import Spans, open_spans
from tinsmith.scheduler.loop import Scheduler
from tinsmith.scheduler.settings import SchedulerSettings
from tinsmith.serve import run_log
from tinsmith.serve.fetching import fetched_models, loading
from tinsmith.serve.free_space import FreeSpace
from tinsmith.serve.key_guard import check_keys_lost, note_keys
from tinsmith.serve.leasing import Leasing
from tinsmith.serve.measuring import Measuring
from tinsmith.serve.run_log import RunLog
from tinsmith.serve.secret import read_secret
from tinsmith.serve.settings import Limits, ServiceSettings
from tinsmith.serve.store_health import StoreHealth
from tinsmith.serve.working import Working
from tinsmith.server.app import App, make_app
from tinsmith.server.keys import KeyRing
from tinsmith.server.parts import Parts
from tinsmith.server.settings import ServerSettings
from tinsmith.server.sweeper import Sweeper

_log = logging.getLogger(__name__)

SPACE_S = 5.0
"""How often the room on the disk is looked at."""
REAP_S = 5.0
"""How often silent sessions are looked for."""
SWEEP_S = 60.0
"""How often what nobody needs any more is taken away."""
IO_THREADS = 64
"""More than the scheduler's commands that may be at the store at once: bodies and payloads are
written and read on these threads too, and do not wait behind a slow store."""


def _tell_nobody(_: str) -> None:
    pass


class Service:
    """A service that runs. Made by `open`; for one event loop.

    Attributes:
        app: What answers requests, as an ASGI application.
        ledger: The durable record.
        store: Saved weights.
        metrics: What is counted.
        spans: Where its spans go, if anywhere.
        free_space: The room on the disk of the data folder.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        ledger: Ledger,
        store: CheckpointStore,
        engine: Engine,
        spans: Spans,
        secret: bytes,
        leasing: Leasing | None,
        *,
        is_private: bool = False,
    ) -> None:
        self.ledger = ledger
        self._leasing = leasing
        self.store = store
        self.spans = spans
        self.metrics = ServiceMetrics()
        self._settings = settings
        self._engine = engine
        self._keys = KeyRing(ledger)
        scheduling = _scheduler_settings(settings)
        self._working = Working(
            engine,
            ledger.board,
            lambda suspects: Scheduler(
                ledger, engine, store, scheduling, spans, suspects, self._lease
            ),
            leasing=leasing,
        )
        self._sweeper = Sweeper(ledger, store, self._epoch)
        self._measuring = Measuring(self.metrics, ledger, spans)
        self._run_log = RunLog(ledger, self._epoch)
        self.app: App = make_app(
            Parts(
                ledger=ledger,
                store=store,
                base_models={
                    model.name: _held_to(settings.limits, model) for model in engine.base_models()
                },
                settings=_server_settings(settings, is_private),
                secret=secret,
            ),
            observer=self._measuring.tell_exchange,
        )
        self.metrics.long_polls.read_with(lambda: len(self.app.service.waits))
        bodies = self.app.bodies
        self.metrics.body_bytes.read_with(lambda: bodies.held_bytes)
        self.metrics.answer_bytes.read_with(lambda: self.app.answers.held_bytes)
        self.metrics.bodies_refused.read_with(lambda: bodies.refused_counts)
        self.free_space = FreeSpace(settings.data)
        self.metrics.free_bytes.read_with(lambda: self.free_space.free_bytes)
        self.metrics.engine_losses.read_with(lambda: self._working.losses)
        self._tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(IO_THREADS, "tinsmith-io"))
        self._lost: asyncio.Future[TinkerError] = loop.create_future()
        self._has_begun = False
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        settings: ServiceSettings,
        *,
        is_private: bool = False,
        is_record_only: bool = False,
        tell: Callable[[str], None] = _tell_nobody,
    ) -> Self:
        """Open everything, and begin to recover and to work in the background.

        Returns when requests can be taken; whether commands are run already,
        `ledger.board.scheduler` says, and `/readyz` with it.

        Args:
            settings: All that can be set.
            is_private: Whether only the owner of the data folder can reach it, who needs no key.
            is_record_only: Whether to answer what is on record and to run nothing: no model is
                fetched or loaded, and nothing that waits is done.
            tell: Called with what is being waited for, in words, from any thread.

        Raises:
            TinkerError: A part cannot be opened; the message says which and why.
        """
        if settings.engine == "embedded" and not is_record_only:
            check_device(settings.device)  # before a model is fetched
        make_folder(settings.data)
        async with contextlib.AsyncExitStack() as opened:
            ledger = await opened.enter_async_context(
                await open_ledger(
                    settings.database,
                    retention=settings.retention,
                    accept_loss=settings.accept_loss,
                )
            )
            leasing = None
            if not is_record_only:
                tell("it waits for its lease on the ledger, which another server may hold")
                leasing = await Leasing.acquire(ledger, settings.lease_s)
                tell("the service is starting")
                opened.push_async_callback(leasing.close)
            if not await _has_keys(settings, KeyRing(ledger)) and not is_private:
                _check_reach(settings)
            secret = read_secret(settings.data, was_used=await ledger.entries(Session).count() > 0)
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
                models = await fetched_models(settings, tell)
                with loading(models, settings, tell):
                    engine = make_engine(
                        settings.engine,
                        models,
                        settings.embedded,
                        has_own_process=settings.has_engine_process,
                    )
                    await opened.enter_async_context(engine)
            spans = open_spans(settings.otel_endpoint)
            service = cls(
                settings, ledger, store, engine, spans, secret, leasing, is_private=is_private
            )
            await service.free_space.look()
            opened.pop_all()
        if not is_record_only:
            service._begin()
            service._start("the store's health", health.run)
        return service

    def _begin(self) -> None:
        self._has_begun = True
        sessions = self.app.service.sessions
        self._start("scheduler", self._work)
        self._start("endings", sessions.finish_endings)
        self._start("silent sessions", _every(REAP_S, sessions.end_silent))
        self._start("keys", _every(REAP_S, self._note_keys))
        self._start("sweeping", _every(SWEEP_S, self._sweep))
        self._start("free space", _every(SPACE_S, self.free_space.look))
        self._start("measuring", self._measuring.run)
        self._start("runs", _every(run_log.LOOK_S, self._run_log.look))

    async def _note_keys(self) -> None:
        """The first key may be made while the service runs."""
        await _has_keys(self._settings, self._keys)

    @property
    def _lease(self) -> Lease | None:
        """What the scheduler writes under; None for a service that only reads."""
        return None if self._leasing is None else self._leasing.lease

    def _epoch(self) -> int | None:
        return None if self._lease is None else self._lease.epoch

    async def _sweep(self) -> None:
        if self._lease is not None and self._lease.is_held:
            await self._sweeper.sweep()

    async def _work(self) -> None:
        try:
            await self._working.run()
        except (EngineLostError, LeaseHeldError) as exc:
            self._lost.set_result(exc)
            raise
        except Exception:
            if self._leasing is not None:
                await self._leasing.close()  # it runs nothing any more: another server may
            raise

    async def wait_lost(self) -> TinkerError:
        """Return why, if the service cannot go on: its engine was lost too often, or its lease.

        What was accepted is in the ledger; another start goes on with it.
        """
        return await asyncio.shield(self._lost)

    def _start(self, what: str, work: Callable[[], Awaitable[object]]) -> None:
        async def told() -> None:
            try:
                await work()
            except (asyncio.CancelledError, EngineLostError, LeaseHeldError):
                raise  # the last two are told by whoever ends the service for them
            except Exception:
                _log.exception("the service's work on %s has ended", what)
                raise

        self._tasks.append(asyncio.create_task(told(), name=f"service: {what}"))

    def end_waits(self) -> None:
        """Answer whoever waits, and let nobody wait from now on."""
        self.app.service.end_waits()

    async def close(self) -> None:
        """Answer whoever waits, let what runs end, save every model, and let go of everything.

        May be called again.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.end_waits()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._has_begun:
            await self._working.close(self._settings.drain_s)
            await self._run_log.look()
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


async def _has_keys(settings: ServiceSettings, keys: KeyRing) -> bool:
    """Whether there is a key; that there was one is remembered outside the ledger."""
    has_keys = await keys.has_keys()
    if has_keys:
        await asyncio.to_thread(note_keys, settings.data)
    return has_keys


def _check_reach(settings: ServiceSettings) -> None:
    """Of a service without keys. Before models are loaded: nobody should wait for a refusal."""
    check_keys_lost(settings.data)
    if settings.is_loopback:
        return
    raise ValidationError(
        f"{settings.host} can be reached by others, and there is no key: anybody could use it",
        remedy="run `tinsmith key create` first, or serve on 127.0.0.1",
    )


def _every(period_s: float, work: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
    """The work again and again; one time that fails is logged, and the next one comes."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                await work()
            except Exception as exc:  # noqa: BLE001 - the ledger may be away for a while
                _log.warning("%s: %s; it is tried again", work.__qualname__, exc)

    return repeat


def _scheduler_settings(settings: ServiceSettings) -> SchedulerSettings:
    return SchedulerSettings(
        gap_wait_s=settings.gap_wait_s,
        engine_silence_s=settings.engine_silence_s,
        snapshot_commands=settings.snapshots.every_commands,
        snapshot_work_s=settings.snapshots.every_s,
        most_batch_tokens=settings.limits.batch_tokens,
    )


def _held_to(limits: Limits, model: BaseModel) -> BaseModel:
    """The model as the server offers it: what the engine could do, within the limits."""
    return msgspec.structs.replace(
        model,
        max_context=min(model.max_context, limits.prompt_tokens),
        max_rank=min(model.max_rank, limits.rank),
    )


def _server_settings(settings: ServiceSettings, is_private: bool) -> ServerSettings:
    limits = settings.limits
    return ServerSettings(
        public_url=settings.public_url,
        body_bytes=limits.body_bytes,
        import_bytes=limits.import_bytes,
        decoded_bytes=limits.decoded_bytes,
        bodies_bytes=limits.bodies_bytes,
        tenant_bodies_bytes=limits.tenant_bodies_bytes,
        address_bodies_bytes=limits.address_bodies_bytes,
        upload_bytes_per_s=limits.upload_bytes_per_s,
        upload_window_s=limits.upload_window_s,
        commands_in_flight=limits.in_flight,
        most_sessions=limits.sessions,
        most_models=limits.models,
        long_poll_s=settings.long_poll_s,
        session_timeout_s=settings.session_timeout_s,
        is_embedded=is_private,
        offers_tokens=not is_private,  # there may be no key to give one for
        trusts_keyless=is_private,
    )


def make_folder(data: Path) -> None:
    """Make the data folder, which nobody else may look into.

    Raises:
        ValidationError: It cannot be made.
    """
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as exc:
        raise ValidationError(
            f"{data} cannot be the data folder: {exc.strerror or exc}",
            remedy="name a folder that can be written to, with --data or TINSMITH_HOME",
        ) from exc
