"""The embedded service, for clients that name no other: when it is used, and where it runs.

`service.run` assembles it. The client never imports that package, but loads it by name at the first
call, like a plug-in; this module is the whole interface between the two. So the client works
without the libraries of the service, and with them needs no second program.

One process per data folder runs the service; others reach it through a Unix socket. `Place` says
which. At the interpreter's exit the service is closed, with everything saved.

**Autosaves.** The service saves every trained model of a session whose program ended with an error
or by Ctrl-C, as `weights/autosave`. Sessions record what was saved; `tell` prints it on stderr,
after Python's traceback, with the call that resumes from it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from tinsmith.client.auth import address_of_login, has_credential
from tinsmith.client.settings import EMBEDDED
from tinsmith.errors import ClosedError, ValidationError

if TYPE_CHECKING:
    from tinsmith.client.transports.in_process import Application


from tinsmith.types.checkpoints import Checkpoint

CHECKPOINT_ID = "weights/autosave"
MOST_NAMED = 3
"""How many models are listed by name."""


class _Noted:
    def __init__(self) -> None:
        self.saved: list[Checkpoint] = []
        self.unsaved: list[str] = []
        """Models that were not saved in time."""


_noted = _Noted()


def note_saved(checkpoints: Iterable[Checkpoint]) -> None:
    """Record the autosaves among these checkpoints. From any thread."""
    _noted.saved += [one for one in checkpoints if one.checkpoint_id == CHECKPOINT_ID]


def note_unsaved(model_ids: Iterable[str]) -> None:
    """Record models that may be saved only after this program has ended. From any thread."""
    _noted.unsaved += model_ids


def tell() -> None:
    """Print what was recorded, once."""
    saved, unsaved = _noted.saved, _noted.unsaved
    _noted.saved, _noted.unsaved = [], []
    if saved:
        _print(_saved_text(saved))
    if unsaved:
        _print(_unsaved_text(unsaved))


def tell_slow() -> None:
    """Print why the program does not end immediately."""
    _print("saving the trained models; press Ctrl-C again to skip")


def _saved_text(saved: list[Checkpoint]) -> str:
    first = saved[0]
    until = "" if first.expires_at is None else f", kept until {first.expires_at:%Y-%m-%d}"
    if len(saved) == 1:
        how = f'create_training_client_from_state_with_optimizer("{first.tinker_path}")'
        return f"saved {first.tinker_path}{until}; resume with {how}"
    return (
        f"saved {len(saved)} models{until}: {_named([one.tinker_path for one in saved])}; resume "
        "with create_training_client_from_state_with_optimizer(path)"
    )


def _unsaved_text(model_ids: list[str]) -> str:
    paths = [f"tinker://{model_id}/{CHECKPOINT_ID}" for model_id in model_ids]
    # Commands that only list things do not run the engine, and so save nothing.
    return f"not saved yet: {_named(paths)}; the next program that trains or samples here saves it"


def _named(paths: list[str]) -> str:
    more = len(paths) - MOST_NAMED
    return ", ".join(paths[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _print(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"tinsmith: {text}\n")
        sys.stderr.flush()


PROVIDER = "tinsmith.service.run.embedded_service"
"""The module that implements `Provider`."""
NEEDED = ("numpy", "pyrage")
"""Packages of the `server` extra that the service needs."""
NEEDED_UNASKED = (*NEEDED, "torch")
"""Those of the engine too: without all of them, a missing API key is the likelier mistake."""
INSTALL = "pip install 'tinsmith[server]'"


class HerePlace(msgspec.Struct, frozen=True):
    """The service runs in this process, on its own event loop."""

    application: Application
    loop: asyncio.AbstractEventLoop


class SocketPlace(msgspec.Struct, frozen=True):
    """Another process runs the service."""

    unix_socket: str
    pid: int


Place: TypeAlias = HerePlace | SocketPlace


class Provider(Protocol):
    """The functions of the module `PROVIDER`."""

    def place(
        self,
        *,
        lost: Place | None = None,
        is_asked_for: bool = True,
        is_record_only: bool = False,
    ) -> concurrent.futures.Future[Any]:
        """The `Place` of the service, which is started if needed. Returns immediately.

        Args:
            lost: Where it was, if it no longer answers there.
            is_asked_for: Whether the user named it; otherwise a log line announces it.
            is_record_only: Whether only stored records are needed: then no model is loaded, and
                other processes wait until this one ends.
        """
        ...

    def at_exit(self) -> None:
        """Finish the sessions of this process, then stop the service if it runs here; blocks."""
        ...


class _Choices:
    """What the clients of this process have chosen."""

    is_taken = False
    is_implied = False
    """Whether it was chosen by default."""
    is_record_only = False
    """Whether this process only needs stored records."""


_choices = _Choices()


def chosen_url(
    base_url: str | Sequence[str] | None,
    api_key: str | None,
    environment: Mapping[str, str] | None = None,
) -> str | Sequence[str] | None:
    """The base URL to use: `embedded` where no address and no credential are set.

    Args:
        base_url: The argument of that name; it is returned if given.
        api_key: The argument of that name; a key implies a service that asks for one.
        environment: Replaces the process's environment.

    Returns:
        The address of the login if nothing else is set. None if something is set, or if the service
        is not installed, which leads to the error about a missing credential.

    Raises:
        ValidationError: It is named, but not installed.
        ClosedError: The interpreter is shutting down.
    """
    env = os.environ if environment is None else environment
    named = base_url or env.get("TINKER_BASE_URL")
    if named == EMBEDDED:
        if not is_installed(NEEDED):
            raise ValidationError("the embedded service is not installed", remedy=INSTALL)
        _end_with_interpreter()
    if named or api_key:
        return base_url
    if has_credential(env):
        return address_of_login(env)
    if not is_installed(NEEDED_UNASKED):
        return None
    _end_with_interpreter()
    _choices.is_implied = True
    return EMBEDDED


def ask_for_record_only() -> None:
    """Declare that this process only needs stored records: no model is loaded.

    For short-lived commands. A service that another process runs is used as usual.
    """
    _choices.is_record_only = True


def is_installed(packages: Iterable[str]) -> bool:
    """Whether packages are installed; imports none of them."""
    return all(importlib.util.find_spec(name) is not None for name in packages)


async def find_place(lost: Place | None = None) -> Place:
    """Where the service runs, started if needed; may take as long as downloading a model.

    Raises:
        ValidationError: The packages of the service are not installed.
        TinkerError: It cannot be started; the message says why.
    """
    _end_with_interpreter()  # also for a command, which names the service
    provider: Provider = await asyncio.to_thread(_load)
    found = provider.place(
        lost=lost,
        is_asked_for=not _choices.is_implied,
        is_record_only=_choices.is_record_only,
    )
    # Shielded: other calls wait for it too, and one that is cancelled must not end it.
    finding = asyncio.wrap_future(found)
    finding.add_done_callback(_look_at)
    place: Place = await asyncio.shield(finding)
    return place


def _look_at(finding: asyncio.Future[Any]) -> None:
    """Retrieve an error that no call waits for any more: asyncio would log it."""
    if not finding.cancelled():
        finding.exception()


def _end_with_interpreter() -> None:
    """Close the service at the interpreter's exit.

    Not by `atexit`: by then executors accept no more work, and closing a service needs them. Python
    has no public hook for the moment before; its own executors use this one.
    """
    if _choices.is_taken:
        return
    try:
        importlib.import_module("concurrent.futures.thread")  # hooks run in reverse order
        threading._register_atexit(_at_exit)  # type: ignore[attr-defined]
    except RuntimeError as exc:
        raise ClosedError(
            "the interpreter is shutting down: its main thread has ended",
            remedy="join the threads that use the embedded service in the main thread",
        ) from exc
    _choices.is_taken = True


def _at_exit() -> None:
    _wait_for_threads()
    provider: Provider | None = sys.modules.get(PROVIDER)
    if provider is not None:
        with contextlib.suppress(KeyboardInterrupt):  # the next start does the rest
            provider.at_exit()
    tell()


def _wait_for_threads() -> None:
    """Wait for the user's threads, which may still train; Python waits for them too, but later.

    Not for those of executors, which are stopped after this.
    """
    executors = set(sys.modules["concurrent.futures.thread"]._threads_queues)
    for thread in threading.enumerate():
        is_told_later = thread in executors or type(thread).__module__.startswith("concurrent.")
        if not thread.daemon and not is_told_later and thread is not threading.main_thread():
            thread.join()


def _load() -> Any:
    try:
        return importlib.import_module(PROVIDER)
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("tinsmith"):
            raise
        raise ValidationError(
            f"the embedded service needs {exc.name}, which is not installed", remedy=INSTALL
        ) from exc
