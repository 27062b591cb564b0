"""Clients for commands, configured by the command line and the environment.

A command is less patient than a program: it gives up after a minute without an answer, and after a
few seconds if the service cannot be reached at all. The client logs to stderr.

Imports the client, so nouns import it only when a command runs.
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
    from tinsmith.client.management.fleet import FleetClient
    from tinsmith.client.rest import RestClient
    from tinsmith.client.service import ServiceClient

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
FIRST_CONTACT_S = 5.0


def rest_client(arguments: argparse.Namespace, *, is_record_only: bool = True) -> RestClient:
    """A client for runs, checkpoints and sessions. It opens no session.

    Args:
        arguments: The command's arguments.
        is_record_only: Whether an embedded service needs only its records, and no model.
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


def fleet_client(arguments: argparse.Namespace) -> FleetClient:
    """A client for the replicas of a service."""
    from tinsmith.client.management.fleet import FleetClient

    return FleetClient(_lease(arguments))


def service_client(arguments: argparse.Namespace) -> ServiceClient:
    """A client for training and sampling; use it in a `with` block, which ends its session."""
    from tinsmith.client.service import ServiceClient

    found = settings(arguments)
    urls = [found.base_url, *found.further_urls]
    return ServiceClient(base_url=urls, retry=_patience(arguments))


def settings(arguments: argparse.Namespace, **fields: Any) -> ClientSettings:
    """The settings of a command's client; the service is found as `ServiceClient` finds it."""
    from tinsmith.client.embedding import chosen_url

    _show_log(arguments)
    url = chosen_url(arguments.base_url, fields.get("api_key"))
    return settings_from(base_url=url, retry=_patience(arguments), **fields)


def limit_s(arguments: argparse.Namespace, default_s: float = CALL_TIMEOUT_S) -> float:
    """The timeout of a call: `--timeout` if given, else `default_s`."""
    chosen: float = arguments.timeout or default_s
    return chosen


def wait(
    future: APIFuture[T], arguments: argparse.Namespace, default_s: float = CALL_TIMEOUT_S
) -> T:
    """Wait for the result of a call.

    Args:
        future: The client's future.
        arguments: The command's arguments; `--timeout` takes precedence over `default_s`.
        default_s: The default timeout.

    Raises:
        APITimeoutError: The result did not arrive in time.
    """
    timeout_s = limit_s(arguments, default_s)
    try:
        return future.result(timeout_s)
    except TimeoutError as exc:
        if future.done():
            raise
        future.cancel()
        raise APITimeoutError(f"{future.what}: no result after {timeout_s:g} s") from exc


def use_record_only(arguments: argparse.Namespace) -> None:
    """Have an embedded service open its records only, so that it loads no model.

    Raises:
        CommandError: No service is configured, and nothing was trained on this machine.
    """
    from tinsmith.client.embedding import ask_for_record_only

    check_record(arguments)
    ask_for_record_only()


def check_record(arguments: argparse.Namespace) -> None:
    """Fail instead of creating a data folder when the address of a service was forgotten.

    Raises:
        CommandError: No service is configured, and nothing was trained on this machine.
    """
    from tinsmith.cli.command_errors import LOG_IN, CommandError
    from tinsmith.client.embedding import chosen_url
    from tinsmith.client.settings import EMBEDDED

    is_named = EMBEDDED in (arguments.base_url, os.environ.get("TINKER_BASE_URL"))
    if is_named or chosen_url(arguments.base_url, None) != EMBEDDED:
        return
    from tinsmith.service.run.settings_loading import load_settings

    data = load_settings().settings.data
    if not data.is_dir():
        raise CommandError(
            f"no service is configured, and nothing was trained on this machine: no folder {data}",
            remedy=LOG_IN,
        )


def _lease(arguments: argparse.Namespace) -> SessionLease:
    from tinsmith.client.lease import SessionLease
    from tinsmith.client.session import Session

    return SessionLease(Session(settings(arguments)))


def _patience(arguments: argparse.Namespace) -> RetryBudget:
    total_s = limit_s(arguments)
    # A billing problem is reported at once instead of pausing for an hour.
    return RetryBudget(
        total_s=total_s, first_contact_s=min(FIRST_CONTACT_S, total_s), billing_s=0.0
    )


def _show_log(arguments: argparse.Namespace) -> None:
    log = logging.getLogger("tinsmith")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_JsonLines() if arguments.format == "json" else _Lines())
        log.addHandler(handler)


class _Lines(logging.Formatter):
    """Log lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        return f"tinsmith: {printable(record.getMessage())}"


class _JsonLines(logging.Formatter):
    """Log lines for programs, in the same form as errors."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({record.levelname.lower(): record.getMessage()})
