"""A user's hold on a session: the last one to go ends it, and the interpreter's exit ends them all.

Tasks and connections do not count as holds, so that a client that is dropped takes its session with
it. Sessions that a forked child finds belong to its parent: they are left alone.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import sys
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from tinsmith.client import autosaves
from tinsmith.client.background import background, is_running
from tinsmith.client.forking import in_child
from tinsmith.client.futures import APIFuture
from tinsmith.client.session import SAVE_TIMEOUT_S, Session
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
"""How long the interpreter's exit may wait for sessions to be finished."""


class SessionLease:
    """A user's hold on a session; when the last one is dropped, the session is closed.

    Clients show it as `holder`. The methods are what programs use of the official SDK's holder;
    they may be called from any thread but the background loop's.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        finalizer = weakref.finalize(self, _close_dropped, session)
        finalizer.atexit = False  # at exit `finish_all` does it, while the loop still runs
        _open_sessions.add(session)

    def get_session_id(self) -> str:
        """The session's id; opens it if need be, which blocks."""
        return background().run(self.session.session_id(), "get_session_id")

    def get_client_config(self) -> ServiceFlags:
        """The service's flags; asks for them if need be, which blocks."""
        return background().run(self.session.ready(), "get_client_config")

    def get_client_dynamic_config(self) -> ClientDynamicConfigResponse:
        """The flags that may change, as they were when last asked for."""
        return self.session.dynamic_flags

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that carries all traffic: what blocks it stops everything."""
        return background().loop

    def run_coroutine_threadsafe(self, work: Coroutine[Any, Any, T]) -> APIFuture[T]:
        """Run a coroutine on that loop; returns at once."""
        return background().start(work, "run_coroutine_threadsafe")

    def get_telemetry(self) -> None:
        """There is none."""


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_of_parent: list[Session] = []


def _keep_inherited() -> None:
    """In a forked child: touch nothing that was open, not even to free it.

    Connections and event loops are shared with the parent, which goes on using them.
    """
    _of_parent.extend(session for session in _open_sessions if session.is_inherited())


in_child(_keep_inherited)


def finish_all() -> bool:
    """At the interpreter's exit, tell the service how it went; but do not keep the user waiting.

    Returns:
        Whether all that was to be saved is saved: False after another Ctrl-C.
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
        skip_save()  # this is called again: first for an embedded service, then for all others
    if is_skipped:
        for session in sessions:
            if session.is_saving:
                autosaves.note_unsaved(session.model_ids)
    return not is_skipped


class _Exit:
    is_save_skipped = False


_exit = _Exit()


def skip_save() -> None:
    """Have the interpreter's exit not wait for models to be saved: Ctrl-C came again."""
    _exit.is_save_skipped = True


def _reason_of_exit() -> ClientSessionFinishReason:
    error = getattr(sys, "last_value", None)  # what ended the program, or the last error typed in
    if error is None or hasattr(sys, "ps1"):
        return ClientSessionFinishSuccess()
    is_error = isinstance(error, Exception)
    return ClientSessionFinishErrored() if is_error else ClientSessionFinishInterrupted()


# Registered after the background loop's own, and so run before it.
atexit.register(finish_all)


def _close_dropped(session: Session) -> None:
    # Nothing was ever sent if no loop runs; and to start one here, at any moment at which Python
    # frees memory, would wait for ever if this very thread is just starting one.
    if is_running() and not session.is_inherited():
        _ = background().start(session.close(ClientSessionFinishSuccess()), "close")
