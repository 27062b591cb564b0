"""The embedded service: all of it in the caller's process, on a thread of its own.

`place` finds it, and starts it if no process runs it; `client/embedding.py` finds this module by
its name, and describes what it promises. One process per data folder holds the lock and runs the
service; others reach it at its socket, and one of them takes over when it ends.

Its settings are those of `tinsmith serve`, from the same variables and the same file. It needs no
key: whoever can open the data folder's socket can read its files as well.

When the interpreter exits, running work is finished, every model saved and everything closed. A
process that is killed loses no accepted command; the next one takes longer to start.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator

import msgspec

from tinsmith.client.embedding import HerePlace, Place, SocketPlace
from tinsmith.client.lease import finish_all
from tinsmith.engine.files.sources import DEFAULT_MODEL
from tinsmith.errors import ClosedError, LedgerUnavailableError
from tinsmith.service.http.edge import HttpEdge
from tinsmith.service.run.assemble import Service, body_limits, make_folder
from tinsmith.service.run.data_folder_lock import DataFolderLock, owner_of
from tinsmith.service.run.lifecycle import loop_factory
from tinsmith.service.run.private_socket import PrivateSocket, listening, socket_path, socket_url
from tinsmith.service.run.service_settings import ServiceSettings
from tinsmith.service.run.settings_loading import load_settings

_log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.1
"""How often to look whether another process has started its service."""
CLOSING_S = 15.0
"""How long closing may take beyond the drain time."""


def place(
    *, lost: Place | None = None, is_asked_for: bool = True, is_record_only: bool = False
) -> concurrent.futures.Future[Place]:
    """As `client.embedding.Provider.place`.

    Raises:
        ClosedError: The interpreter is exiting.
    """
    return _host.place(lost, is_asked_for, is_record_only)


def close() -> None:
    """Stop the service of this process, if it runs one, with everything saved; blocks.

    The interpreter's exit does this too. Running calls of open clients fail; their next call starts
    the service again.
    """
    _host.close()


def at_exit() -> None:
    """As `client.embedding.Provider.at_exit`."""
    _host.exit()


class _Host:
    """The embedded service of this process: not begun, starting, or found."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stay: _Stay | None = None
        self._of_parents: list[_Stay] = []
        self._is_exiting = False

    def place(
        self, lost: Place | None, is_asked_for: bool, is_record_only: bool
    ) -> concurrent.futures.Future[Place]:
        with self._lock:
            if self._stay is None or self._stay.is_over(lost):
                if self._is_exiting:
                    raise ClosedError(
                        "the interpreter is exiting, and the embedded service with it"
                    )
                self._stay = _Stay(is_asked_for, is_record_only)
                self._stay.begin()
            return self._stay.found

    def close(self) -> None:
        with self._lock:
            stay, self._stay = self._stay, None
        if stay is not None:
            stay.end()

    def exit(self) -> None:
        is_saved = finish_all()
        self._is_exiting = True
        if is_saved:
            self.close()
        else:
            # Interrupted: the next start does the rest, and errors of what is cut off are noise.
            logging.getLogger("tinsmith").setLevel(logging.CRITICAL)

    def forget(self) -> None:
        """Start afresh in a forked child, which has none of its parent's threads."""
        self._lock = threading.Lock()
        if self._stay is not None:
            self._stay.leave_to_parent()
            # Kept: freeing an event loop closes its descriptors.
            self._of_parents.append(self._stay)
        self._stay = None


class _Stay:
    """One run of the service here, or one connection to it elsewhere, until it ends."""

    def __init__(self, is_asked_for: bool, is_record_only: bool) -> None:
        self.found: concurrent.futures.Future[Place] = concurrent.futures.Future()
        self._is_asked_for = is_asked_for
        self._is_record_only = is_record_only
        self._thread = threading.Thread(target=self._run, name="tinsmith-service", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._held: DataFolderLock | None = None
        self._socket: PrivateSocket | None = None
        self._drain_s = 0.0
        self._is_ended = False

    def begin(self) -> None:
        self._thread.start()

    def is_over(self, lost: Place | None) -> bool:
        """Whether it failed or has ended; `lost` is a place that did not answer."""
        if not self.found.done():
            return False
        if self.found.cancelled() or self.found.exception() is not None:
            return True
        where = self.found.result()
        return where == lost if isinstance(where, SocketPlace) else not self._thread.is_alive()

    def end(self) -> None:
        self._is_ended = True  # checked before it starts, if there is no loop yet
        if self._loop is None or self._task is None:
            return  # there is nothing to save yet
        with contextlib.suppress(RuntimeError):  # the loop is closed: it ended by itself
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(self._drain_s + CLOSING_S)
        if self._thread.is_alive():
            _log.warning(
                "the embedded service did not stop in time; the next start recovers what is left"
            )

    def leave_to_parent(self) -> None:
        if self._held is not None:
            self._held.release()
        if self._socket is not None:
            self._socket.forget()

    # On its thread

    def _run(self) -> None:
        try:
            settings = _settings()
            self._drain_s = settings.drain_s
            claimed = _claim(settings)
            if isinstance(claimed, SocketPlace):
                self._tell("using the service of %s in process %d", settings.data, claimed.pid)
                self.found.set_result(claimed)
                return
            with claimed as self._held, asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._serve(settings, claimed))
        except BaseException as exc:  # noqa: BLE001 - raised by those who wait for it
            if self.found.done():
                _log.exception("the embedded service has failed")
            else:
                self.found.set_exception(exc)

    async def _serve(self, settings: ServiceSettings, held: DataFolderLock) -> None:
        """Run the service until the task is cancelled."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            if self._is_ended:
                raise asyncio.CancelledError
            with socket_path(settings.data) as path, _named_owner():
                # URLs in responses lead to the socket: there is no port.
                settings = msgspec.structs.replace(settings, public_url=socket_url(path))
                self._tell(
                    "the service runs in this process: engine %s, models %s, data in %s",
                    settings.engine,
                    ", ".join(model.name for model in settings.served_models),
                    settings.data,
                )
                opening = Service.open(
                    settings, is_private=True, is_record_only=self._is_record_only
                )
                async with await opening as service:
                    edge = HttpEdge(service.app.answer, body_limits(settings))
                    async with listening(edge, path) as self._socket:
                        await self._answer(service, edge, held, path)
        except asyncio.CancelledError:
            if not self.found.done():
                self.found.set_exception(ClosedError("the service was closed while it started"))

    async def _answer(
        self, service: Service, edge: HttpEdge, held: DataFolderLock, path: str
    ) -> None:
        """Accept clients until the service is lost or the task is cancelled."""
        if not self._is_record_only:  # else others wait: they may want to train
            held.publish(path)
        assert self._loop is not None
        self.found.set_result(HerePlace(edge, self._loop))
        try:
            raise await service.wait_lost()
        finally:
            service.end_waits()

    def _tell(self, message: str, *arguments: object) -> None:
        """Log one line: as a warning where nobody asked for the service, so that it is seen.

        A command that only reads has output of its own.
        """
        is_quiet = self._is_asked_for or self._is_record_only
        _log.log(logging.INFO if is_quiet else logging.WARNING, message, *arguments)


def _settings() -> ServiceSettings:
    """The settings of the environment, with defaults that make a first run work."""
    loaded = load_settings()
    settings = loaded.settings
    engine = "embedded" if loaded.sources["engine"] == "default" else settings.engine
    models = settings.models or (DEFAULT_MODEL,)
    return msgspec.structs.replace(settings, role="all", engine=engine, models=models)


def _claim(settings: ServiceSettings) -> DataFolderLock | SocketPlace:
    """The lock of the data folder, or the place of the process that runs its service."""
    make_folder(settings.data)
    told_at = time.monotonic()
    while True:
        held = DataFolderLock.try_take(settings.data)
        if held is not None:
            return held
        owner = owner_of(settings.data)
        if owner is not None and owner.unix_socket and _answers(owner.unix_socket):
            return SocketPlace(owner.unix_socket, owner.pid)
        if time.monotonic() - told_at > 10.0:
            told_at = time.monotonic()
            pid = "?" if owner is None else owner.pid
            _log.info("waiting for process %s to start the service of %s", pid, settings.data)
        time.sleep(LOOK_AGAIN_S)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _named_owner() -> Iterator[None]:
    """Say what to do where another process uses the ledger: most likely `tinsmith serve`."""
    try:
        yield
    except LedgerUnavailableError as exc:
        exc.remedy = (
            "if that is `tinsmith serve`, set TINKER_BASE_URL to its address; "
            "or set TINSMITH_HOME to another folder"
        )
        raise


_host = _Host()
os.register_at_fork(after_in_child=_host.forget)
