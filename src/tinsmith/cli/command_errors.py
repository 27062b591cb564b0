"""Errors of commands: reported on stderr as text for people or JSON for programs.

A report has the error's type and message, a remedy where one is known, and the status and id of a
failed request. stdout is for results only.
"""

from __future__ import annotations

import sys
from typing import Any

from tinsmith.cli.text import printable
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    TinkerError,
)
from tinsmith.wire.failures import detail_in

FAILURE = 1
INVALID_USAGE = 2

LOG_IN = (
    "run `tinsmith auth login`, or set TINKER_BASE_URL and TINKER_API_KEY; to use a service inside "
    "this process, which needs no key, pass --base-url embedded"
)

# Each status in a few words, and a remedy in case the error itself has none.
_STATUSES: dict[int, tuple[str, str | None]] = {
    400: ("invalid request", None),
    401: ("not logged in", LOG_IN),
    402: ("billing problem", "see your organization's billing page"),
    403: ("permission denied", "run `tinsmith auth whoami` to see whose API key is used"),
    404: ("not found", "it may have been deleted, have expired, or belong to someone else"),
    409: ("conflict", "retry when the conflicting operation has finished"),
    422: ("invalid value", None),
    429: ("rate limit exceeded", "wait and retry"),
}
_SERVER_FAILED = ("the service failed", "retry later; if it keeps failing, tell the operator")


class CommandError(TinkerError):
    """A command failed."""


class UsageError(CommandError):
    """The command line is invalid."""

    def __init__(self, message: str, *, usage: str = "", remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.usage = usage


def require_numpy(what: str) -> None:
    """Check that numpy is installed, before anything is written.

    Raises:
        CommandError: It is not; the message names `what` needs it.
    """
    try:
        import numpy  # noqa: F401 - is it there?
    except ModuleNotFoundError as exc:
        raise CommandError(
            f"{what} requires numpy, which is not installed",
            remedy="pip install 'tinsmith[server]'",
        ) from exc


def fail(error: Exception, wants_json: bool) -> int:
    """Report the error that ended a command and return its exit code.

    An unexpected error is a bug: it is raised again for its traceback, unless JSON was requested.
    """
    is_expected = isinstance(error, TinkerError | OSError | ImportError)
    if not is_expected and not wants_json:
        raise error
    report(error, wants_json)
    return INVALID_USAGE if isinstance(error, UsageError) else FAILURE


def report(error: BaseException, wants_json: bool) -> None:
    """Print an error on stderr in the requested format."""
    found = described(error)
    if wants_json:
        import json  # not needed for --help

        print(json.dumps({"error": found}), file=sys.stderr)
        return
    usage = getattr(error, "usage", "")
    status = f" ({found['status']})" if found["status"] else ""
    lines = [f"{usage}tinsmith: {_kind(error)}{printable(found['message'])}{status}"]
    if found["remedy"]:
        lines.append(f"  {printable(found['remedy'])}")
    if found["request_id"]:
        lines.append(f"  request id: {printable(found['request_id'])}")
    print("\n".join(lines), file=sys.stderr)


def described(error: BaseException) -> dict[str, Any]:
    """An error as JSON fields; unknown ones are None."""
    return {
        "type": type(error).__name__,
        "message": _message(error),
        "remedy": _remedy(error),
        "status": error.status_code if isinstance(error, APIStatusError) else None,
        "request_id": getattr(error, "request_id", None),
    }


def one_line(error: BaseException) -> str:
    """An error on one line, for lists of failures."""
    found = described(error)
    status = f" ({found['status']})" if found["status"] else ""
    return f"{_kind(error)}{found['message']}{status}"


def _message(error: BaseException) -> str:
    # The message in the body of the response, rather than the whole body.
    said = detail_in(getattr(error, "body", None))
    if said is not None:
        return said
    if isinstance(error, TinkerError) and error.args:
        return str(error.args[0])
    return str(error) or type(error).__name__


def _remedy(error: BaseException) -> str | None:
    if isinstance(error, AuthenticationError):
        return LOG_IN  # the error's own remedy is for programs
    given = getattr(error, "remedy", None)
    if given or not isinstance(error, APIError):
        return str(given) if given else None
    if isinstance(error, APIStatusError):
        return _of_status(error.status_code)[1]
    if isinstance(error, APITimeoutError):
        return "allow more time with --timeout"
    if isinstance(error, APIConnectionError):
        return "check TINKER_BASE_URL (or --base-url) and the network"
    return None


def _kind(error: BaseException) -> str:
    """What happened in a few words and a colon; empty if the message says it all."""
    if isinstance(error, APIStatusError):
        return f"{_of_status(error.status_code)[0]}: "
    if isinstance(error, APITimeoutError):
        return "timed out: "
    if isinstance(error, APIConnectionError):
        return "connection failed: "
    return "" if isinstance(error, TinkerError) else f"{type(error).__name__}: "


def _of_status(status: int) -> tuple[str, str | None]:
    if status >= 500:
        return _SERVER_FAILED
    return _STATUSES.get(status, (f"status {status}", None))
