"""Leases of sessions: a session is closed when its last lease is dropped, or the program exits.

Tasks and connections hold no lease, so that dropping a client closes its session. A forked child
leaves the sessions of its parent alone.

Management clients with the same settings share one lease, and so their connections and start-up
calls; so do the clones of a sampler that were unpickled in this process.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from tinsmith.client import embedding
from tinsmith.client.background import background, is_running
from tinsmith.client.forking import in_child
from tinsmith.client.futures import APIFuture
from tinsmith.client.session import SAVE_TIMEOUT_S, Session
from tinsmith.client.settings import ClientSettings
from tinsmith.types.extensions import ServiceFlags
from tinsmith.types.runs import (
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishReason,
    ClientSessionFinishSuccess,
)
from tinsmith.types.service import ClientDynamicConfigResponse

T = TypeVar("T")

EXIT_TIMEOUT_S = 3.0
"""How long the interpreter's exit may wait for sessions to close."""


class SessionLease:
    """A client's lease of a session; when the last one is dropped, the session is closed.

    Clients expose it as `holder`. Its methods are those of the official SDK's holder that programs
    use; they may be called from any thread but the background loop's.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        finalizer = weakref.finalize(self, _close_dropped, session)
        finalizer.atexit = False  # at exit, `finish_all` closes it while the loop still runs
        _open_sessions.add(session)

    def get_session_id(self) -> str:
        """The session's id; opens the session if necessary, which blocks."""
        return background().run(self.session.session_id(), "get_session_id")

    def get_client_config(self) -> ServiceFlags:
        """The service's flags; requests them if necessary, which blocks."""
        return background().run(self.session.ready(), "get_client_config")

    def get_client_dynamic_config(self) -> ClientDynamicConfigResponse:
        """The flags that may change, as of the last request."""
        return self.session.dynamic_flags

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all clients; never block it."""
        return background().loop

    def run_coroutine_threadsafe(self, work: Coroutine[Any, Any, T]) -> APIFuture[T]:
        """Run a coroutine on that loop; returns immediately."""
        return background().start(work, "run_coroutine_threadsafe")

    def get_telemetry(self) -> None:
        """Always None: tinsmith sends no telemetry."""


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_of_parent: list[Session] = []


def _keep_inherited() -> None:
    """In a forked child, keep references to the parent's open sessions, so none is finalised.

    Their connections and event loops are shared with the parent, which still uses them.
    """
    _of_parent.extend(session for session in _open_sessions if session.is_inherited())


in_child(_keep_inherited)


def finish_all() -> bool:
    """Close all sessions at the interpreter's exit and report why it exits, within a time limit.

    Returns:
        False if the user pressed Ctrl-C again, which skips saving models.
    """
    if not is_running():
        return True
    reason, sessions = _reason_of_exit(), list(_open_sessions)
    closing = [background().start(s.close(reason), "close") for s in sessions]
    is_skipped = _exit.is_save_skipped
    try:
        concurrent.futures.wait(closing, timeout=0.0 if is_skipped else EXIT_TIMEOUT_S)
        if not is_skipped and any(session.is_saving for session in sessions):
            concurrent.futures.wait(closing, timeout=SAVE_TIMEOUT_S)
    except KeyboardInterrupt:
        is_skipped = True
        skip_save()  # runs twice: for an embedded service, then for the others
    if is_skipped:
        for session in sessions:
            if session.is_saving:
                embedding.note_unsaved(session.model_ids)
    return not is_skipped


class _Exit:
    is_save_skipped = False


_exit = _Exit()


def skip_save() -> None:
    """Do not wait for models to be saved at exit: the user pressed Ctrl-C again."""
    _exit.is_save_skipped = True


def _reason_of_exit() -> ClientSessionFinishReason:
    error = getattr(sys, "last_value", None)  # set after an uncaught exception or at the prompt
    if error is None or hasattr(sys, "ps1"):
        return ClientSessionFinishSuccess()
    is_error = isinstance(error, Exception)
    return ClientSessionFinishErrored() if is_error else ClientSessionFinishInterrupted()


# Registered after the background loop's handler, and so run before it.
atexit.register(finish_all)


def _close_dropped(session: Session) -> None:
    # If no loop is running, nothing was ever sent. Starting one here would deadlock: this runs
    # whenever Python frees memory, perhaps while this very thread is starting the loop.
    if is_running() and not session.is_inherited():
        _ = background().start(session.close(ClientSessionFinishSuccess()), "close")


class SharedLeases:
    """The shared leases of this process, by settings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: weakref.WeakValueDictionary[tuple[object, ...], SessionLease] = (
            weakref.WeakValueDictionary()
        )

    def lease(
        self,
        settings: ClientSettings,
        session_id: str | None = None,
        make: Callable[[ClientSettings], Session] = Session,
    ) -> SessionLease:
        """The lease for these settings; creates one if there is none.

        Args:
            settings: The settings of the session.
            session_id: The id of another client's session, if the lease is for that one.
            make: Creates the session.
        """
        key = (session_id, *_values(settings))
        with self._lock:
            lease = self._leases.get(key)
            if lease is None:
                lease = self._leases[key] = SessionLease(make(settings))
            return lease

    def forget(self) -> None:
        """Drop all leases: a forked child must not use its parent's connections."""
        self._lock = threading.Lock()
        self._leases = weakref.WeakValueDictionary()


def _values(settings: ClientSettings) -> Iterator[object]:
    """The values of all settings, as a key: clients share a lease only if all are equal."""
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        yield tuple(sorted(value.items())) if isinstance(value, dict) else value


shared_leases = SharedLeases()
in_child(shared_leases.forget)
