"""What went wrong, in words for people and as JSON for programs.

A failure has a type, a message, a remedy where one is known, and the status and id of the request
that was refused. It goes to stderr; stdout is for results alone.
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
from tinsmith.wire.failures import said_in

FAILED = 1
WRONG_USAGE = 2

SIGN_IN = (
    "run `tinsmith auth login`, or set TINKER_BASE_URL and TINKER_API_KEY; "
    "--base-url embedded needs no key, nor does a service on this machine that has none"
)

# What a status means in a word, and what to do about it where the error itself does not say.
_STATUSES: dict[int, tuple[str, str | None]] = {
    400: ("invalid request", None),
    401: ("not signed in", SIGN_IN),
    402: ("billing", "see the billing page of your organisation; the service pauses unpaid work"),
    403: ("permission denied", "`tinsmith auth whoami` shows whose credential is used"),
    404: ("not found", "it may be deleted or expired, or belong to somebody else"),
    409: ("conflict", "try again when what it waits for has ended"),
    422: ("invalid values", None),
    429: ("rate limit", "wait a little and try again"),
}
_SERVER_FAILED = ("the service failed", "try again later; if it goes on, tell its operator")


class CommandError(TinkerError):
    """A command could not do what it was asked for."""


class UsageError(CommandError):
    """The command line itself is wrong."""

    def __init__(self, message: str, *, usage: str = "", remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.usage = usage


def require_numpy(what: str) -> None:
    """Refuse before anything is written; `what` says what needs it.

    Raises:
        CommandError: It is not installed.
    """
    try:
        import numpy  # noqa: F401 - only looked for
    except ModuleNotFoundError as exc:
        raise CommandError(
            f"{what} needs numpy, which is not installed", remedy="pip install 'tinsmith[server]'"
        ) from exc


def told(error: Exception, wants_json: bool) -> int:
    """Tell why a command ended, and give the exit code that stands for it.

    An error that nobody foresaw is a mistake of ours: it is raised again, for its traceback, unless
    a program is to read it.
    """
    is_foreseen = isinstance(error, TinkerError | OSError | ImportError)
    if not is_foreseen and not wants_json:
        raise error
    report(error, wants_json)
    return WRONG_USAGE if isinstance(error, UsageError) else FAILED


def report(error: BaseException, wants_json: bool) -> None:
    """Tell an error on stderr, in the form that was asked for."""
    found = described(error)
    if wants_json:
        import json  # no help needs it

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
    """An error as the fields that programs read; what is not known is None."""
    return {
        "type": type(error).__name__,
        "message": _message(error),
        "remedy": _remedy(error),
        "status": error.status_code if isinstance(error, APIStatusError) else None,
        "request_id": getattr(error, "request_id", None),
    }


def in_short(error: BaseException) -> str:
    """An error as one line, for lists of what failed."""
    found = described(error)
    status = f" ({found['status']})" if found["status"] else ""
    return f"{_kind(error)}{found['message']}{status}"


def _message(error: BaseException) -> str:
    # What the service says of it, rather than the body that it said it with.
    said = said_in(getattr(error, "body", None))
    if said is not None:
        return said
    if isinstance(error, TinkerError) and error.args:
        return str(error.args[0])
    return str(error) or type(error).__name__


def _remedy(error: BaseException) -> str | None:
    if isinstance(error, AuthenticationError):
        return SIGN_IN  # its own is for programs
    given = getattr(error, "remedy", None)
    if given or not isinstance(error, APIError):
        return str(given) if given else None
    if isinstance(error, APIStatusError):
        return _of_status(error.status_code)[1]
    if isinstance(error, APITimeoutError):
        return "--timeout gives it more time"
    if isinstance(error, APIConnectionError):
        return "check TINKER_BASE_URL and the network"
    return None


def _kind(error: BaseException) -> str:
    """A word or two for what happened, with a colon; empty where the message says it all."""
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
    return _STATUSES.get(status, (f"refused with {status}", None))
