"""`tinsmith serve`, from the first line it prints to its exit code.

A signal stops it gracefully: no new connections, long polls are answered, running work finishes or
is saved for the next start, everything is closed. A second signal stops it at once; nothing is lost
by that, but the next start takes longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinsmith.errors import ValidationError
from tinsmith.observe.log_fields import configure_logging
from tinsmith.observe.metrics import ServiceMetrics
from tinsmith.service.api.keys import KeyRing
from tinsmith.service.http.connections import ConnectionGate, ConnectionLimits
from tinsmith.service.http.edge import HttpEdge
from tinsmith.service.http.server import BACKLOG, HttpServer
from tinsmith.service.run.assemble import Service, body_limits
from tinsmith.service.run.operator_pages import OperatorPages
from tinsmith.service.run.service_settings import ServiceSettings, masked
from tinsmith.service.run.settings_loading import check_certificate

_log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""How long a stop waits for responses that are being written."""
FEWER_DESCRIPTORS = (65_536, 10_240)
"""To ask for where the system refuses its own hard limit: macOS reports no limit, and would leave
it at 256."""
MOST_KEPT_DESCRIPTORS = 1024
"""A quarter of all descriptors, up to this many, is reserved for the ledger, files, the store and
the engine."""
COLLECTED_AT = 20_000
"""After how many net new objects Python's garbage collector runs."""

RETURNED_BYTES = 256 * 1024
"""Blocks of memory from this size on are returned to the system as soon as they are freed."""
_M_MMAP_THRESHOLD = -3


def serve(settings: ServiceSettings) -> int:
    """Serve until a signal; returns the exit code, 0 if everything was closed in order.

    Raises:
        EngineLostError: The engine's process ended again and again. Another start loses nothing.
        LeaseHeldError: Another server uses the database.
        TinkerError: It cannot be started; the message says why and what to do.
    """
    restore = configure_logging(level=settings.log.level, format_=settings.log.format)
    _allow_connections()
    _return_memory()
    thresholds = gc.get_threshold()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_serve(settings))
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        restore()


def _allow_connections() -> None:
    """Raise the limit of open files as far as allowed: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in (hard, *FEWER_DESCRIPTORS):
        if most == hard or most > soft:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                return


def _connection_limits(settings: ServiceSettings) -> ConnectionLimits:
    """The limits of the settings, lowered where the system allows few open files."""
    limits = ConnectionLimits(
        connections=settings.limits.connections,
        unauthenticated=settings.limits.unauthenticated_connections,
        unauthenticated_per_address=settings.limits.address_connections,
    )
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return limits.within(limits.connections)
    kept = limits.within(descriptors - min(MOST_KEPT_DESCRIPTORS, descriptors // 4))
    if kept.connections < limits.connections:
        _log.warning(
            "the system allows %d open files, so connections are limited to %d; raise `ulimit -n` "
            "to allow %d",
            descriptors,
            kept.connections,
            limits.connections,
        )
    return kept


def _return_memory() -> None:
    """Have the memory of large bodies returned to the system when they are freed.

    glibc does so from 128 KiB on at first, and raises that to the largest block that was freed so,
    up to 32 MiB. From then on bodies below that stay in the arenas of the threads that read them:
    80 refused bodies of 10 and 30 MB, eight at a time, left 400 MB resident, and 6 MB with this.
    Setting a threshold keeps glibc from raising it. Other C libraries have no such setting.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, RETURNED_BYTES)


def _spare_collector() -> None:
    """Run the garbage collector less often, and not over what lives as long as the service.

    A request makes hundreds of objects, nearly all of which end with it. Looking for cycles among
    those of all running requests takes a seventh of the time (900 sessions: 0.99 s of CPU instead
    of 0.83 s). No exchange may leave a body in a cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_AT, *gc.get_threshold()[1:])


def loop_factory() -> Any:
    """The factory of the service's event loop; None for asyncio's own."""
    try:
        import uvloop
    except ModuleNotFoundError:  # it has no wheel for every system
        return None
    return uvloop.new_event_loop


async def _serve(settings: ServiceSettings) -> int:
    listener = _listen(settings)
    with contextlib.closing(listener):
        pages = OperatorPages(has_metrics=settings.metrics, role=settings.role)
        gate = ConnectionGate(_connection_limits(settings))
        edge = HttpEdge(pages, body_limits(settings))
        server, ending = HttpServer(edge, gate=gate), _Ending(pages)
        with ending.begun_by_signals():
            # /healthz and /readyz answer from now on; fetching a model may take minutes.
            await server.open(listener, _tls(settings))
            serving = asyncio.create_task(_serve_until(ending, server))
            try:
                service = await _opened(settings, pages, serving)
                if service is None:
                    return 0
                async with service:
                    _measure_edge(service.metrics, gate, edge)
                    pages.service = service
                    _spare_collector()
                    _log.info(
                        "serving on %s; ledger %s, checkpoints %s, engine %s",
                        _address(settings, listener),
                        masked(settings.database),
                        masked(settings.checkpoints),
                        settings.engine if settings.role != "api" else "of the scheduler",
                    )
                    await _tell_variables(settings, listener, service)
                    await _until_it_ends(ending, serving, service, settings)
            finally:
                ending.begin()
                await asyncio.gather(serving, return_exceptions=True)
        _log.info("stopped")
    return 0


def _measure_edge(metrics: ServiceMetrics, gate: ConnectionGate, edge: HttpEdge) -> None:
    metrics.connections.read_with(lambda: gate.counts)
    metrics.connections_closed.read_with(lambda: gate.closed_counts)
    metrics.body_bytes.read_with(lambda: edge.received.held_bytes)
    metrics.answer_bytes.read_with(lambda: edge.sent.held_bytes)
    metrics.bodies_refused.read_with(lambda: edge.received.refused_counts)


async def _serve_until(ending: _Ending, server: HttpServer) -> None:
    await ending.wait()
    await server.close(ANSWER_S)


async def _opened(
    settings: ServiceSettings, pages: OperatorPages, serving: asyncio.Task[None]
) -> Service | None:
    """The service, once its models are loaded; None if it was told to stop before."""

    def tell(what: str, *, is_standby: bool = False) -> None:
        pages.waits_for, pages.is_standby = what, is_standby

    opening = asyncio.create_task(Service.open(settings, tell=tell))
    try:
        await asyncio.wait([opening, serving], return_when=asyncio.FIRST_COMPLETED)
        return opening.result() if opening.done() else None
    finally:
        if not opening.done():
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)


async def _until_it_ends(
    ending: _Ending, serving: asyncio.Task[None], service: Service, settings: ServiceSettings
) -> None:
    """Serve until a signal.

    Raises:
        EngineLostError: The engine was lost too often.
        LeaseHeldError: The lease was lost to another server.
    """
    losing = asyncio.create_task(service.wait_lost())
    try:
        await asyncio.wait([serving, losing], return_when=asyncio.FIRST_COMPLETED)
        ending.begin()
        await serving
        if losing.done():
            raise losing.result()
        _log.info("stopping: waiting up to %g s for running work", settings.drain_s)
    finally:
        losing.cancel()


def _listen(settings: ServiceSettings) -> socket.socket:
    """A listening socket: opened first, so that a port in use is reported before any work."""
    try:
        if settings.unix_socket is not None:
            _clear_socket(settings.unix_socket)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(settings.unix_socket))
            listener.listen(BACKLOG)
            return listener
        return socket.create_server(
            (settings.host, settings.port),
            family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET,
            backlog=BACKLOG,
        )
    except OSError as exc:
        where = settings.unix_socket or f"{settings.host} port {settings.port}"
        raise ValidationError(
            f"cannot listen on {where}: {exc.strerror or exc}",
            remedy="choose another one with --host and --port, or --unix-socket",
        ) from exc


def _clear_socket(path: Path) -> None:
    """Remove the socket that a killed service left behind, and nothing else."""
    if not path.exists():
        return
    if not path.is_socket():
        raise ValidationError(f"{path} exists and is not a socket", remedy="choose another one")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ValidationError(f"another program listens on {path}", remedy="choose another one")


def _address(settings: ServiceSettings, listener: socket.socket) -> str:
    if settings.unix_socket is not None:
        return f"the Unix socket {settings.unix_socket}"
    scheme = "https" if settings.tls.cert is not None else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


async def _tell_variables(
    settings: ServiceSettings, listener: socket.socket, service: Service
) -> None:
    """Print the variables that a client sets to use this service, ready to paste into a shell.

    Not with a machine-readable log. No key is printed: the ledger stores only digests.
    """
    is_told = settings.unix_socket is None and settings.log.format == "text"
    if not is_told or settings.role == "scheduler":
        return
    url = settings.public_url or _address(settings, listener)
    if settings.public_url is None and settings.host in ("0.0.0.0", "::"):  # noqa: S104 - read only
        url = url.replace("[::]" if settings.host == "::" else settings.host, socket.gethostname())
    has_keys = await KeyRing(service.ledger).has_keys()
    key = "'<your key>'  # create one with `tinsmith key create`" if has_keys else "tml-local"
    lines = ["for clients:", f"  export TINKER_BASE_URL={url}", f"  export TINKER_API_KEY={key}"]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def _tls(settings: ServiceSettings) -> ssl.SSLContext | None:
    if settings.tls.cert is None:
        return None
    check_certificate(settings.tls)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(settings.tls.cert, settings.tls.key)
    return context


class _Ending:
    """A graceful stop: no new connections, and long polls are answered."""

    def __init__(self, pages: OperatorPages) -> None:
        self._pages = pages
        self._begun = asyncio.Event()

    def begin(self) -> None:
        """Begin to stop. May be called again."""
        self._begun.set()
        if self._pages.service is not None:
            self._pages.service.end_waits()

    async def wait(self) -> None:
        """Return when it has begun."""
        await self._begun.wait()

    @contextlib.contextmanager
    def begun_by_signals(self) -> Iterator[None]:
        """Stop gracefully at the first signal, and exit at the second."""
        loop = asyncio.get_running_loop()

        def end(number: signal.Signals) -> None:
            if self._begun.is_set():
                raise SystemExit(128 + number)
            _log.info("received %s: stopping; send it again to stop immediately", number.name)
            self.begin()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
