"""The mapping between errors and HTTP responses, `retry-after` included; for both ends.

The client turns an error response into the exception that user code catches (`error_from_reply`);
the server turns an exception into an error response (`reply_from_error`). An accepted request that
fails later is not an error response: its result is a `RequestFailedResponse`, sent with status 200.

**`retry-after`** headers are read by clients and written by servers. `retry-after-ms` takes
precedence. `retry-after` is a number of seconds, with or without a fraction, or a date in any of
the three forms of RFC 9110. A value that cannot be read counts as missing: the header is advice,
and a malformed one must not stop a retry.

Backoff, jitter and the number of attempts are the caller's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from tinsmith import errors as e
from tinsmith.errors import ValidationError
from tinsmith.types.buffers import Memory
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.wire import json_format
from tinsmith.wire.decode_limits import DecodeLimits
from tinsmith.wire.exchange import HttpReply

DEFAULT_CAP_S: Final = 60.0
"""Longer delays are cut to this. The official SDK ignores longer ones and retries sooner."""

_MAX_VALUE_CHARS = 64  # the longest valid value, an RFC 850 date, has 33

_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?", re.IGNORECASE)


def _utc_now() -> datetime:
    return datetime.now(UTC)


def retry_after_s(
    headers: Mapping[str, str],
    *,
    now: Callable[[], datetime] = _utc_now,
    cap_s: float | None = DEFAULT_CAP_S,
) -> float | None:
    """Return the delay that a response's headers ask for. Never raises.

    Args:
        headers: The response headers; names are case-insensitive.
        now: The clock that dates are compared with; called only for dates.
        cap_s: Longer delays are cut to this; `None` for no limit.

    Returns:
        Seconds to wait, 0.0 for a date in the past; `None` if neither header holds a date or a
        finite, non-negative number.
    """
    delay_s = _delay_s(headers, now)
    if delay_s is None or cap_s is None:
        return delay_s
    return min(delay_s, cap_s)


def format_retry_after(delay_s: float) -> dict[str, str]:
    """Return both headers for a delay; a negative delay, such as a missed deadline, becomes 0.

    Both are rounded up, so that no client retries too early. The official SDK ignores 0 and
    anything above 60 s.

    Raises:
        ValidationError: The delay is not a finite number of milliseconds.
    """
    if not math.isfinite(delay_s * 1000):
        raise ValidationError(f"invalid retry delay {delay_s} s: expected a finite number")
    # Rounded first: 2.007 s must not become 2008 ms because of its last binary digit.
    delay_ms = math.ceil(round(max(delay_s, 0.0) * 1000, 3))
    return {"retry-after-ms": str(delay_ms), "retry-after": str(-(-delay_ms // 1000))}


def _delay_s(headers: Mapping[str, str], now: Callable[[], datetime]) -> float | None:
    milliseconds = _number(_value(headers, "retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = _value(headers, "retry-after")
    seconds = _number(value)
    return seconds if seconds is not None else _seconds_until(value, now)


def _value(headers: Mapping[str, str], wanted: str) -> str:
    """The stripped value of a header; empty if the header is missing or its value too long."""
    for name, value in headers.items():
        if name.lower() == wanted:
            return value.strip(" \t") if len(value) <= _MAX_VALUE_CHARS else ""
    return ""


def _number(text: str) -> float | None:
    # float() would also accept "nan", "1_0" and digits of other scripts.
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def _seconds_until(text: str, now: Callable[[], datetime]) -> float | None:
    if not (text.isascii() and text.isprintable()):
        return None
    from email.utils import parsedate_tz  # slow to import, and dates are rare

    try:
        fields = parsedate_tz(text)
        if fields is None:
            return None
        present = now().astimezone(UTC)
        year, month, day, hour, minute, second = fields[:6]
        if "-" in text:  # RFC 850, with a year of two digits
            year = _full_year(year % 100, (month, day, hour, minute, second), present)
        # A timedelta also takes second 60, a leap second. An asctime date has no zone: it is UTC.
        moment = datetime(year, month, day, hour, minute, tzinfo=UTC)
        moment += timedelta(seconds=second - (fields[9] or 0))
    except (ValueError, IndexError, OverflowError):  # 30 February, 25 o'clock, the year 0
        return None
    return max((moment - present).total_seconds(), 0.0)


def _full_year(two_digits: int, rest: tuple[int, ...], present: datetime) -> int:
    """The latest year with these digits that puts the date at most 50 years ahead (RFC 9110)."""
    latest = (present.year + 50, *present.timetuple()[1:6])
    year = latest[0] - latest[0] % 100 + two_digits
    return year if (year, *rest) <= latest else year - 100


_SHOWN_BYTES = 64 * 1024
"""How much of an error response's body is kept."""

_CLASSES: dict[int, type[e.APIStatusError]] = {
    400: e.BadRequestError,
    401: e.AuthenticationError,
    402: e.BillingError,
    403: e.PermissionDeniedError,
    404: e.NotFoundError,
    409: e.ConflictError,
    422: e.UnprocessableEntityError,
    429: e.RateLimitError,
}
_STATUSES: dict[type[BaseException], int] = {
    e.BodyTooLargeError: 413,
    e.DecodeError: 400,
    e.ValidationError: 422,
    # The ledger. Permanent errors have statuses that clients do not retry; see `is_retried`.
    e.CommandConflictError: 400,
    e.CommandPassedError: 400,
    e.UnknownEntryError: 404,
    e.ResultGoneError: 410,
    e.LedgerUnavailableError: 503,
    # Checkpoints.
    e.CheckpointNotFoundError: 404,
    e.CheckpointExistsError: 400,
    e.CheckpointFormatError: 422,
    e.CheckpointUnavailableError: 503,
    # Not a 4xx: another request may have used the memory.
    MemoryError: 503,
}
_RETRY_AFTER_S: dict[type[BaseException], float] = {
    e.LedgerUnavailableError: 1.0,
    e.CheckpointUnavailableError: 5.0,
    e.StorageFullError: 30.0,
    MemoryError: 1.0,
}
"""The retry delay for errors without a `retry_after_s`."""
_RETRIED = frozenset({408, 409, 429})
REDIRECTS = frozenset({301, 302, 303, 307, 308})
"""The response, or the service, is at another URL."""


class ReplyHeaders(dict[str, str]):
    """Response headers with case-insensitive names, without cookies."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        kept = {name.lower(): value for name, value in headers.items()}
        kept.pop("set-cookie", None)
        super().__init__(kept)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def get(self, name: str, default: Any = None) -> Any:
        """The header's value, or the default."""
        return super().get(name.lower(), default)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplyHeaders, (dict(self),)


class FailedReply:
    """The status and headers of an error response."""

    __slots__ = ("headers", "status_code")

    def __init__(self, status_code: int, headers: Mapping[str, str]) -> None:
        self.status_code = status_code
        self.headers = ReplyHeaders(headers)

    def __repr__(self) -> str:
        return f"FailedReply({self.status_code})"


def status_class(status: int) -> type[e.APIStatusError]:
    """The error class of a status."""
    if status >= 500:
        return e.InternalServerError
    return _CLASSES.get(status, e.APIStatusError)


def is_retried(status: int) -> bool:
    """Whether Tinker clients retry after this status: 408, 409, 429, and 500 and above.

    A permanent error must have another status, or clients retry it for minutes.
    """
    return status in _RETRIED or status >= 500


def error_from_reply(
    status: int, headers: Mapping[str, str], body: Memory, *, request_id: str | None = None
) -> e.APIStatusError:
    """The error for an error response.

    The message is `Error code: <status> - <detail>`, with the `detail` of a JSON body, or the whole
    body if it has none. A body that is not JSON is the message itself; without a body the message
    is the status alone. The delay of `Retry-After` is kept uncapped; the retry code decides how
    much of it to honour.
    """
    message, shown = _readable(status, body)
    reply = FailedReply(status, headers)
    return status_class(status)(
        message,
        response=reply,
        body=shown,
        status_code=status,
        retry_after_s=retry_after_s(headers, cap_s=None),
        request_id=request_id,
        remedy=_redirect_remedy(reply),
    )


def _redirect_remedy(reply: FailedReply) -> str | None:
    """What to do about a redirect.

    Only the host is shown: the rest of the URL may be signed, and so a secret.
    """
    if reply.status_code not in REDIRECTS or "location" not in reply.headers:
        return None
    from urllib.parse import urlsplit  # 0.4 MB that most clients never need

    try:
        address = urlsplit(reply.headers["location"])
        place = f"{address.scheme}://{address.hostname}" if address.hostname else "another path"
        port = f":{address.port}" if address.port else ""
    except ValueError:
        return None
    return f"it redirects to {e.shown(place + port)}: check that the base URL is the service's"


def reply_from_error(error: BaseException) -> HttpReply:
    """The response for an error: its status, `{"detail": …}`, and `Retry-After` if it has a delay.

    The body is never empty: clients take an empty 400 for a broken connection. An error that is not
    ours is a 500 without details.
    """
    status = status_of(error)
    detail = _sendable(_public_message(error))
    headers = {"Content-Type": "application/json"}
    delay_s = getattr(error, "retry_after_s", _RETRY_AFTER_S.get(type(error)))
    if delay_s is not None:
        headers.update(format_retry_after(delay_s))
    body = json_format.encode({"detail": detail or type(error).__name__})
    headers["Content-Length"] = str(len(body))
    return HttpReply(status, headers, [body])


def status_of(error: BaseException) -> int:
    """The status of an error; 500 if it is not ours."""
    if isinstance(error, e.APIStatusError):
        return error.status_code
    for cls in type(error).__mro__:
        if cls in _STATUSES:
            return _STATUSES[cls]
    return 500


def error_from_failed(plain: dict[str, Any], request_id: str) -> e.RequestFailedError:
    """The error for a request that the server accepted but could not complete."""
    failed = RequestFailedResponse.from_plain(plain)
    return e.RequestFailedError(failed.error, request_id, failed.category)


def failed_from_error(error: BaseException) -> RequestFailedResponse:
    """The result of a request that failed with this error.

    Errors that the caller can fix have the category `user`. An error that is not ours has no
    details.
    """
    if isinstance(error, e.RequestFailedError):
        return RequestFailedResponse(error=_sendable(error.message), category=error.category)
    is_users = isinstance(error, e.TinkerError) and status_of(error) < 500
    category = e.RequestErrorCategory.User if is_users else e.RequestErrorCategory.Server
    return RequestFailedResponse(error=_sendable(_public_message(error)), category=category)


def _public_message(error: BaseException) -> str:
    """The message for clients, without internals such as the server's folders."""
    if isinstance(error, MemoryError):
        return "the service is out of memory; retry later"
    if not isinstance(error, e.TinkerError):
        return "internal server error"
    if isinstance(error, e.CheckpointDamagedError):
        return (
            "the checkpoint is corrupt; load another one, or ask the service's operator to restore "
            "it"
        )
    if isinstance(error, e.CheckpointUnavailableError):
        why = error.reason or "it does not respond"
        return f"the checkpoint store is unavailable: {why}; retry later"
    if isinstance(error, e.CheckpointError) and status_of(error) >= 500:
        return "checkpoints cannot be read or written at the moment"
    if isinstance(error, e.LedgerUnavailableError):
        why = error.reason or "it does not respond"
        return f"the service cannot use its ledger: {why}; retry later"
    if isinstance(error, e.BaseModelError):
        return "the files of the base model cannot be used; ask the service's operator"
    if isinstance(error, e.LedgerDamagedError | e.LedgerVersionError):
        return "the service cannot read its ledger; ask its operator"
    return str(error)


def _sendable(text: str) -> str:
    """The text without lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _readable(status: int, body: Memory) -> tuple[str, Any]:
    """The message of an error response, and its body: parsed if it is JSON, else text."""
    try:
        plain = json_format.decode_any(body, DecodeLimits(memory_bytes=64 * _SHOWN_BYTES))
    except e.DecodeError:
        text = bytes(body[:_SHOWN_BYTES]).decode("utf-8", "replace").strip()
        return text or f"Error code: {status}", text
    said = detail_in(plain)
    shown = e.shown(plain, most=_SHOWN_BYTES) if said is None else said[:_SHOWN_BYTES]
    return f"Error code: {status} - {shown}", plain


def detail_in(body: object) -> str | None:
    """The message in the JSON body of an error response, if it has one."""
    fields = body if isinstance(body, dict) else {}
    said = fields.get("detail") or fields.get("error") or fields.get("message")
    return said if isinstance(said, str) else None
