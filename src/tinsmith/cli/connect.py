"""Clients for commands, made from the command line and the environment.

A command is less patient than a program: it gives up on a service that does not answer within a
minute, and on one that was never reached within seconds. What the client logs goes to stderr.

Loads the client, and so is imported when a command runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from tinsmith.cli.text import printable
from tinsmith.client.futures import APIFuture
from tinsmith.client.retry import RetryBudget
from tinsmith.client.settings import ClientSettings, settings_from
from tinsmith.errors import APITimeoutError

if TYPE_CHECKING:
    from tinsmith.client.admin import AdminClient
    from tinsmith.client.lease import SessionLease
    from tinsmith.client.rest import RestClient
    from tinsmith.client.service import ServiceClient

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
FIRST_CONTACT_S = 5.0


def rest_client(arguments: argparse.Namespace, *, is_record_only: bool = True) -> RestClient:
    """A client for runs, checkpoints and sessions; it opens no session of its own.

    Args:
        arguments: Of the command.
        is_record_only: Whether the command ends soon, and needs no model of an embedded service.
    """
    from tinsmith.client.rest import RestClient

    if is_record_only:
        use_record_only(arguments)
    return RestClient(_lease(arguments))


def admin_client(arguments: argparse.Namespace) -> AdminClient:
    """A client for usage and storage."""
    from tinsmith.client.admin import AdminClient

    use_record_only(arguments)
    return AdminClient(_lease(arguments))


def service_client(arguments: argparse.Namespace) -> ServiceClient:
    """A client that trains and samples; use it with `with`, so that its session is finished."""
    from tinsmith.client.service import ServiceClient

    return ServiceClient(base_url=settings(arguments).base_url, retry=_patience(arguments))


def settings(arguments: argparse.Namespace, **fields: Any) -> ClientSettings:
    """The settings of a command's client, which finds its service as `ServiceClient` does."""
    from tinsmith.client.embedding import chosen_url

    _listen_to_log(arguments)
    url = chosen_url(arguments.base_url, fields.get("api_key"))
    return settings_from(base_url=url, retry=_patience(arguments), **fields)


def limit_s(arguments: argparse.Namespace, most_s: float = CALL_TIMEOUT_S) -> float:
    """How long a call may take: what `--timeout` says, else `most_s`."""
    chosen: float = arguments.timeout or most_s
    return chosen


def wait(future: APIFuture[T], arguments: argparse.Namespace, most_s: float = CALL_TIMEOUT_S) -> T:
    """The result of a call.

    Args:
        future: What the client returned.
        arguments: Of the command; its `--timeout` counts before `most_s`.
        most_s: How long to wait where the user did not say.

    Raises:
        APITimeoutError: It did not come in time.
    """
    longest_s = limit_s(arguments, most_s)
    try:
        return future.result(longest_s)
    except TimeoutError as exc:
        if future.done():
            raise
        future.cancel()
        raise APITimeoutError(f"{future.what}: no answer within {longest_s:g} s") from exc


def use_record_only(arguments: argparse.Namespace) -> None:
    """Ask an embedded service for what is on record alone, so that it loads no model.

    Raises:
        CommandError: Nothing says where the service is, and nothing was trained here.
    """
    from tinsmith.client.embedding import ask_for_record_only

    check_record(arguments)
    ask_for_record_only()


def check_record(arguments: argparse.Namespace) -> None:
    """Make no data folder for whoever has only forgotten to say where the service is.

    Raises:
        CommandError: Nothing says where it is, and nothing was trained here.
    """
    from tinsmith.cli.failures import SIGN_IN, CommandError
    from tinsmith.client.embedding import chosen_url
    from tinsmith.client.settings import EMBEDDED

    is_named = EMBEDDED in (arguments.base_url, os.environ.get("TINKER_BASE_URL"))
    if is_named or chosen_url(arguments.base_url, None) != EMBEDDED:
        return
    from tinsmith.serve.loading import load_settings

    data = load_settings().settings.data
    if not data.is_dir():
        raise CommandError(
            f"no service is named, and nothing was trained here yet: there is no folder {data}",
            remedy=SIGN_IN,
        )


def _lease(arguments: argparse.Namespace) -> SessionLease:
    from tinsmith.client.lease import SessionLease
    from tinsmith.client.session import Session

    return SessionLease(Session(settings(arguments)))


def _patience(arguments: argparse.Namespace) -> RetryBudget:
    total_s = limit_s(arguments)
    # Want of funds is told at once: nobody looks at a command that pauses for an hour.
    return RetryBudget(
        total_s=total_s, first_contact_s=min(FIRST_CONTACT_S, total_s), billing_s=0.0
    )


def _listen_to_log(arguments: argparse.Namespace) -> None:
    log = logging.getLogger("tinsmith")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_JsonLines() if arguments.format == "json" else _Lines())
        log.addHandler(handler)


class _Lines(logging.Formatter):
    """Log lines as people read them."""

    def format(self, record: logging.LogRecord) -> str:
        return f"tinsmith: {printable(record.getMessage())}"


class _JsonLines(logging.Formatter):
    """Log lines as programs read them, beside errors of the same form."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({record.levelname.lower(): record.getMessage()})
