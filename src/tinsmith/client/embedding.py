"""The service in this process, for clients that name no other: when it is taken, and where it is.

It is put together by `serve`, which stands above the client and is never imported by it: it is
loaded by its name when the first call is made, as a plug-in would be, and what the two say to each
other is this page. So the client stays what it is without the libraries of a service, and whoever
has them needs no second program.

One process of a data folder runs the service; others find it at a Unix socket. Which of the two it
is, the client learns as a `Place`. At the interpreter's exit it is closed, with everything saved.
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
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from tinsmith.client import autosaves
from tinsmith.client.auth import address_of_login, has_credential
from tinsmith.client.settings import EMBEDDED
from tinsmith.errors import ClosedError, ValidationError

if TYPE_CHECKING:
    from tinsmith.client.transports.in_process import Application

PROVIDER = "tinsmith.serve.embedded"
"""The module that has `place`, as `Provider` describes it."""
NEEDED = ("numpy", "pyrage")
"""Packages of the `server` extra without which there is no service."""
NEEDED_UNASKED = (*NEEDED, "torch")
"""Those of the engine too: whoever has not all of them has more likely forgotten a key."""
INSTALL = "pip install 'tinsmith[server]'"


class HerePlace(msgspec.Struct, frozen=True):
    """It runs in this process, on an event loop of its own."""

    application: Application
    loop: asyncio.AbstractEventLoop


class SocketPlace(msgspec.Struct, frozen=True):
    """Another process runs it."""

    unix_socket: str
    pid: int


Place: TypeAlias = HerePlace | SocketPlace


class Provider(Protocol):
    """What `PROVIDER` has."""

    def place(
        self,
        *,
        lost: Place | None = None,
        is_asked_for: bool = True,
        is_record_only: bool = False,
    ) -> concurrent.futures.Future[Any]:
        """The `Place` of the service, which is started if nobody runs it. Returns at once.

        Args:
            lost: Where it was, if it does not answer there any more.
            is_asked_for: Whether the user named it; else the log says so more loudly.
            is_record_only: Whether what is on record is all that is asked for: then no model is
                loaded, and other processes wait until this one ends.
        """
        ...

    def at_exit(self) -> None:
        """End the sessions of this process, then the service if it is here; blocks."""
        ...


class _Choices:
    """What the clients of this process have chosen."""

    is_taken = False
    is_implied = False
    """Whether it was taken without being named."""
    is_record_only = False
    """Whether this process asks only for what is on record."""


_choices = _Choices()


def chosen_url(
    base_url: str | None, api_key: str | None, environment: Mapping[str, str] | None = None
) -> str | None:
    """The base URL to use: `embedded` where no address and no credential are set.

    Args:
        base_url: The argument of that name; what is given is kept.
        api_key: Likewise; whoever has a key means a service that asks for one.
        environment: What stands for the environment; the process's own by default.

    Returns:
        The address of a login where nothing is set but that. None where something is set, or where
        the service is not installed: then what was always said of a missing credential holds.

    Raises:
        ValidationError: It is named, and not installed.
        ClosedError: The interpreter is about to end, and a service could not be.
    """
    env = os.environ if environment is None else environment
    named = base_url or env.get("TINKER_BASE_URL")
    if named == EMBEDDED:
        if not is_installed(NEEDED):
            raise ValidationError("the service in this process is not installed", remedy=INSTALL)
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
    """Say that this process asks only for what is on record: it loads no model.

    For commands, which end soon. A service that another process runs is used as ever.
    """
    _choices.is_record_only = True


def is_installed(packages: Iterable[str]) -> bool:
    """Whether packages are there; loads none of them."""
    return all(importlib.util.find_spec(name) is not None for name in packages)


async def find_place(lost: Place | None = None) -> Place:
    """Where the service is, started if need be; may take as long as fetching a model does.

    Raises:
        ValidationError: The packages of a service are not installed.
        TinkerError: It cannot be started; the message says why.
    """
    _end_with_interpreter()  # also for a command, which has named the service and not chosen it
    provider: Provider = await asyncio.to_thread(_load)
    found = provider.place(
        lost=lost,
        is_asked_for=not _choices.is_implied,
        is_record_only=_choices.is_record_only,
    )
    # Shielded: others wait for it too, and one that gives up must not end it for them.
    finding = asyncio.wrap_future(found)
    finding.add_done_callback(_look_at)
    place: Place = await asyncio.shield(finding)
    return place


def _look_at(finding: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody waits for any more: asyncio would complain of it."""
    if not finding.cancelled():
        finding.exception()


def _end_with_interpreter() -> None:
    """Have the service closed at the exit.

    Not by `atexit`: by then no executor takes work any more, and closing a service needs some.
    Python has no public name for the moment before; its own executors use this one.
    """
    if _choices.is_taken:
        return
    try:
        importlib.import_module("concurrent.futures.thread")  # what is registered first runs last
        threading._register_atexit(_at_exit)  # type: ignore[attr-defined]
    except RuntimeError as exc:
        raise ClosedError(
            "the interpreter is about to end, as its main thread has",
            remedy="wait there for the threads that use a service in this process",
        ) from exc
    _choices.is_taken = True


def _at_exit() -> None:
    _wait_for_threads()
    provider: Provider | None = sys.modules.get(PROVIDER)
    if provider is not None:
        with contextlib.suppress(KeyboardInterrupt):  # another one: the next start does the rest
            provider.at_exit()
    autosaves.tell()


def _wait_for_threads() -> None:
    """Let the user's threads end, which may still train: Python waits for them too, but later.

    Not for those of executors: they wait to be told of the exit, which comes after this.
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
            f"the service in this process needs {exc.name}, which is not installed", remedy=INSTALL
        ) from exc
