"""`tinsmith serve`, from the first line it prints to its exit code.

A signal ends it in order: no new connections, whoever waits is answered, what runs ends or is saved
for the next start, everything is closed. A second signal ends it at once; nothing is lost by that,
the next start only takes longer.
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
from tinsmith.serve.assemble import Service
from tinsmith.serve.http_server import BACKLOG, HttpServer
from tinsmith.serve.loading import check_certificate
from tinsmith.serve.operator_pages import OperatorPages
from tinsmith.serve.settings import ServiceSettings, masked
from tinsmith.server.connections import ConnectionGate, ConnectionLimits
from tinsmith.server.keys import KeyRing

_log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""How long a stop waits for the answers that are being written."""
FEWER_DESCRIPTORS = (65_536, 10_240)
"""To be asked for where the system refuses what it says that it allows: macOS says without end, and
would leave it at 256."""
MOST_KEPT_DESCRIPTORS = 1024
"""A quarter of all descriptors, and no more than this, is kept from connections for the ledger,
files, the store and the engine."""
COLLECTED_AT = 20_000
"""So many new objects, beyond those that have ended, make Python look for garbage."""

RETURNED_BYTES = 256 * 1024
"""Blocks of memory from this size on are returned to the system as soon as they are freed."""
_M_MMAP_THRESHOLD = -3


def serve(settings: ServiceSettings) -> int:
    """Serve until a signal comes; returns the exit code: 0 if all was closed in order.

    Raises:
        EngineLostError: The engine's process ended again and again. Another start loses nothing.
        LeaseHeldError: Another server works from the database.
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
    """Have as many descriptors as the system allows: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in (hard, *FEWER_DESCRIPTORS):
        if most == hard or most > soft:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                return


def _connection_limits(settings: ServiceSettings) -> ConnectionLimits:
    """Those of the settings, less where descriptors are few: the ledger and files need some."""
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
            "the system allows %d open files, so at most %d connections; raise `ulimit -n` for %d",
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
    """Have garbage looked for less often, and not among what stays as long as the service does.

    A request makes hundreds of objects, nearly all of which end with it: looking for cycles among
    those of all requests under way, every few of them, takes a seventh of the time (900 sessions:
    0.99 s of CPU instead of 0.83 s). No exchange may leave a body in a cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_AT, *gc.get_threshold()[1:])


def loop_factory() -> Any:
    """What makes the service's event loop; None for asyncio's own."""
    try:
        import uvloop
    except ModuleNotFoundError:  # it has no wheel for every system
        return None
    return uvloop.new_event_loop


async def _serve(settings: ServiceSettings) -> int:
    listener = _listen(settings)
    with contextlib.closing(listener):
        pages = OperatorPages(has_metrics=settings.metrics)
        gate = ConnectionGate(_connection_limits(settings))
        server, ending = HttpServer(pages, gate=gate), _Ending(pages)
        with ending.begun_by_signals():
            # Health can be asked for from now on; a model may take minutes to be fetched.
            await server.open(listener, _tls(settings))
            serving = asyncio.create_task(_serve_until(ending, server))
            try:
                service = await _opened(settings, pages, serving)
                if service is None:
                    return 0
                async with service:
                    service.metrics.connections.read_with(lambda: gate.counts)
                    service.metrics.connections_closed.read_with(lambda: gate.closed_counts)
                    pages.service = service
                    _spare_collector()
                    _log.info(
                        "serving on %s; ledger %s, checkpoints %s, engine %s",
                        _address(settings, listener),
                        masked(settings.database),
                        masked(settings.checkpoints),
                        settings.engine,
                    )
                    await _tell_variables(settings, listener, service)
                    await _until_it_ends(ending, serving, service, settings)
            finally:
                ending.begin()
                await asyncio.gather(serving, return_exceptions=True)
        _log.info("closed")
    return 0


async def _serve_until(ending: _Ending, server: HttpServer) -> None:
    await ending.wait()
    await server.close(ANSWER_S)


async def _opened(
    settings: ServiceSettings, pages: OperatorPages, serving: asyncio.Task[None]
) -> Service | None:
    """The service, once its models are loaded; None if a signal came first."""

    def tell(what: str) -> None:
        pages.waits_for = what

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
    """Serve until a signal comes.

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
        _log.info("closing: what runs may take %g s to end", settings.drain_s)
    finally:
        losing.cancel()


def _listen(settings: ServiceSettings) -> socket.socket:
    """A socket that listens already, so that a port that is taken is told before any work."""
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
    """Remove the socket that a service which was killed left behind, and nothing else."""
    if not path.exists():
        return
    if not path.is_socket():
        raise ValidationError(f"{path} is a file, and no socket", remedy="choose another one")
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
    """Print what a client sets to come here, as lines for a shell; programs read the log instead.

    No key is printed: the ledger does not have them.
    """
    if settings.unix_socket is not None or settings.log.format != "text":
        return
    url = settings.public_url or _address(settings, listener)
    if settings.public_url is None and settings.host in ("0.0.0.0", "::"):  # noqa: S104 - read only
        url = url.replace("[::]" if settings.host == "::" else settings.host, socket.gethostname())
    has_keys = await KeyRing(service.ledger).has_keys()
    key = "'<a key>'  # `tinsmith key create` makes one" if has_keys else "tml-local"
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
    """The end of the service in order: no new connections, and whoever waits is answered."""

    def __init__(self, pages: OperatorPages) -> None:
        self._pages = pages
        self._begun = asyncio.Event()

    def begin(self) -> None:
        """Begin to end. May be called again."""
        self._begun.set()
        if self._pages.service is not None:
            self._pages.service.end_waits()

    async def wait(self) -> None:
        """Return when it has begun."""
        await self._begun.wait()

    @contextlib.contextmanager
    def begun_by_signals(self) -> Iterator[None]:
        """Have the first signal begin it, and the second one end the process."""
        loop = asyncio.get_running_loop()

        def end(number: signal.Signals) -> None:
            if self._begun.is_set():
                raise SystemExit(128 + number)
            _log.info("%s: stopping; once more ends it at once", number.name)
            self.begin()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
