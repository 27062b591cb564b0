"""The one table between errors and what stands for them on the wire; both ends read it.

The client turns a refusal into the error that user code catches (`error_from_reply`), the server
turns an error into the reply that stands for it (`reply_from_error`). A failed operation is not a
refusal: it is answered with 200 and `RequestFailedResponse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith import errors as e
from tinsmith.types.buffers import Memory
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.wire import json_format
from tinsmith.wire.exchange import HttpReply
from tinsmith.wire.limits import DecodeLimits
from tinsmith.wire.retry_after import format_retry_after, retry_after_s

_SHOWN_BYTES = 64 * 1024
"""How much of an error's body is kept."""

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
    # Of the ledger. None of the permanent ones is retried; see `is_retried`.
    e.CommandConflictError: 400,
    e.CommandPassedError: 400,
    e.UnknownEntryError: 404,
    e.ResultGoneError: 410,
    e.LedgerUnavailableError: 503,
    # Of saved weights.
    e.CheckpointNotFoundError: 404,
    e.CheckpointExistsError: 400,
    e.CheckpointFormatError: 422,
    e.CheckpointUnavailableError: 503,
    # Whoever sent the request that met it need not be who took the memory.
    MemoryError: 503,
}
_RETRY_AFTER_S: dict[type[BaseException], float] = {
    e.LedgerUnavailableError: 1.0,
    e.CheckpointUnavailableError: 5.0,
    e.StorageFullError: 30.0,
    MemoryError: 1.0,
}
"""When to come back after an error that does not say so itself."""
_RETRIED = frozenset({408, 409, 429})
REDIRECTS = frozenset({301, 302, 303, 307, 308})
"""The answer, or the service, is elsewhere."""


class ReplyHeaders(dict[str, str]):
    """Headers of a reply; a name is found in any case. Cookies are left out."""

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
    """A reply that refuses, as far as an error keeps it."""

    __slots__ = ("headers", "status_code")

    def __init__(self, status_code: int, headers: Mapping[str, str]) -> None:
        self.status_code = status_code
        self.headers = ReplyHeaders(headers)

    def __repr__(self) -> str:
        return f"FailedReply({self.status_code})"


def status_class(status: int) -> type[e.APIStatusError]:
    """The error that a status stands for."""
    if status >= 500:
        return e.InternalServerError
    return _CLASSES.get(status, e.APIStatusError)


def is_retried(status: int) -> bool:
    """Whether Tinker clients try again after this status: 408, 409, 429 and 500 and above.

    A permanent refusal must have another one, or every client spins on it for minutes.
    """
    return status in _RETRIED or status >= 500


def error_from_reply(
    status: int, headers: Mapping[str, str], body: Memory, *, request_id: str | None = None
) -> e.APIStatusError:
    """The error for a refusal.

    The message is `Error code: <status> - <what the service says>`: the `detail` of a JSON body, or
    all of it if it has none. A body that is no JSON is the message itself, and without a body it
    is the status alone. What the server asks for by `Retry-After` is kept
    as it is: how much of that is honoured is for whoever tries again to say.
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
        remedy=_way_on(reply),
    )


def _way_on(reply: FailedReply) -> str | None:
    """What to do about a reply that sends us elsewhere.

    Of its address the host alone is told: the rest may be signed, and so a secret.
    """
    if reply.status_code not in REDIRECTS or "location" not in reply.headers:
        return None
    from urllib.parse import urlsplit  # 0.4 MB, which most clients never need

    try:
        address = urlsplit(reply.headers["location"])
        place = f"{address.scheme}://{address.hostname}" if address.hostname else "another path"
        port = f":{address.port}" if address.port else ""
    except ValueError:
        return None
    return f"the service sends us to {e.shown(place + port)}: see that the base URL is its address"


def reply_from_error(error: BaseException) -> HttpReply:
    """The reply for an error: its status, `{"detail": …}`, and when to come back if it says so.

    Never an empty body: clients take an empty 400 for a broken connection. An error that is not
    ours is a 500 that tells nothing of the server's inside.
    """
    status = status_of(error)
    detail = _sendable(_told(error))
    headers = {"Content-Type": "application/json"}
    delay_s = getattr(error, "retry_after_s", _RETRY_AFTER_S.get(type(error)))
    if delay_s is not None:
        headers.update(format_retry_after(delay_s))
    body = json_format.encode({"detail": detail or type(error).__name__})
    headers["Content-Length"] = str(len(body))
    return HttpReply(status, headers, [body])


def status_of(error: BaseException) -> int:
    """The status that stands for an error; 500 for one that is not ours."""
    if isinstance(error, e.APIStatusError):
        return error.status_code
    for cls in type(error).__mro__:
        if cls in _STATUSES:
            return _STATUSES[cls]
    return 500


def error_from_failed(plain: dict[str, Any], request_id: str) -> e.RequestFailedError:
    """The error for an operation that the server accepted and could not finish."""
    failed = RequestFailedResponse.from_plain(plain)
    return e.RequestFailedError(failed.error, request_id, failed.category)


def failed_from_error(error: BaseException) -> RequestFailedResponse:
    """How an operation that ended with this error is answered.

    The caller's own mistakes are of category `user`; anything that is not ours tells nothing of the
    server's inside.
    """
    if isinstance(error, e.RequestFailedError):
        return RequestFailedResponse(error=_sendable(error.message), category=error.category)
    is_users = isinstance(error, e.TinkerError) and status_of(error) < 500
    category = e.RequestErrorCategory.User if is_users else e.RequestErrorCategory.Server
    return RequestFailedResponse(error=_sendable(_told(error)), category=category)


def _told(error: BaseException) -> str:
    """What a client is told of an error: nothing of the server's inside, such as its folders."""
    if isinstance(error, MemoryError):
        return "the service is short of memory; send the request again later"
    if not isinstance(error, e.TinkerError):
        return "internal server error"
    if isinstance(error, e.CheckpointDamagedError):
        return (
            "the saved weights are damaged; load another checkpoint, or have this one restored by "
            "the service's operator"
        )
    if isinstance(error, e.CheckpointUnavailableError):
        why = error.reason or "it does not answer"
        return f"the checkpoint store is unavailable: {why}; retry later"
    if isinstance(error, e.CheckpointError) and status_of(error) >= 500:
        return "saved weights cannot be read or written now"
    if isinstance(error, e.LedgerUnavailableError):
        why = error.reason or "it does not answer"
        return f"the service cannot use its ledger: {why}; retry later"
    if isinstance(error, e.BaseModelError):
        return "the files of the base model cannot be used; ask the service's operator"
    if isinstance(error, e.LedgerDamagedError | e.LedgerVersionError):
        return "the service's record cannot be read; ask its operator"
    return str(error)


def _sendable(text: str) -> str:
    """The text without what UTF-8 cannot hold: an answer must not fail for what it quotes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _readable(status: int, body: Memory) -> tuple[str, Any]:
    """An error's message, and its body as JSON if it is that, else as text."""
    try:
        plain = json_format.decode_any(body, DecodeLimits(memory_bytes=64 * _SHOWN_BYTES))
    except e.DecodeError:
        text = bytes(body[:_SHOWN_BYTES]).decode("utf-8", "replace").strip()
        return text or f"Error code: {status}", text
    said = said_in(plain)
    shown = e.shown(plain, most=_SHOWN_BYTES) if said is None else said[:_SHOWN_BYTES]
    return f"Error code: {status} - {shown}", plain


def said_in(body: object) -> str | None:
    """The sentence in an error's body, if it is one of the forms that services use."""
    fields = body if isinstance(body, dict) else {}
    said = fields.get("detail") or fields.get("error") or fields.get("message")
    return said if isinstance(said, str) else None
