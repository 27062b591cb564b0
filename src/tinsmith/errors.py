"""Every error that tinsmith raises, as one tree branched by who can act on it.

    TinkerError                          (also named TinsmithError)
    ├── ValidationError                  an argument is invalid (a ValueError)
    │   └── UnknownFieldError            the type has no such field (also a TypeError)
    ├── DecodeError                      received bytes are malformed (a ValueError)
    │   └── BodyTooLargeError            decoding them would take too much memory
    ├── ClosedError                      the client is closed (a RuntimeError)
    │   └── EngineLostError              the engine's process has exited
    ├── ReplicaError                     a part of the engine cannot do its work (a RuntimeError)
    │   ├── AdapterLostError             what it held is lost with it, and is rebuilt elsewhere
    │   └── NoReplicaError               no replica has room now
    ├── TokenizerError                   a model's tokenizer was not found (a RuntimeError)
    ├── LedgerError                      the service's ledger refused or failed
    │   ├── CommandConflictError         the command's number belongs to another request
    │   ├── CommandPassedError           the command's number was skipped
    │   ├── UnknownEntryError            no entry has this id
    │   ├── ResultGoneError              the result was acknowledged or has expired
    │   ├── LedgerUnavailableError       temporarily unusable: disk full, locked, unreachable
    │   ├── LeaseHeldError               another scheduler holds the lease
    │   ├── LeaseLostError               this scheduler lost its lease; nothing was written
    │   ├── LedgerVersionError           this version cannot use the schema
    │   └── LedgerDamagedError           stored bytes are corrupt
    ├── CheckpointError                  a checkpoint could not be written, found or read
    │   ├── CheckpointNotFoundError      no checkpoint has this path
    │   ├── CheckpointExistsError        a checkpoint has this path already
    │   ├── CheckpointUnavailableError   the store is temporarily unusable
    │   │   └── StorageFullError         the store is full
    │   ├── CheckpointFormatError        the files are not weights we can read (a ValueError)
    │   └── CheckpointDamagedError       stored bytes are corrupt
    ├── BaseModelError                   a base model could not be fetched, found or read
    │   ├── BaseModelNotFoundError       no model has this name
    │   ├── BaseModelUnavailableError    the model is temporarily unavailable
    │   │   └── BaseModelNoRoomError     the disk is full
    │   ├── BaseModelFormatError         the files are not a model we can read (a ValueError)
    │   └── BaseModelDamagedError        fetched or stored bytes are corrupt
    ├── RequestFailedError               the service accepted the request, but it failed
    └── APIError                         an HTTP request failed
        ├── APIResponseValidationError   the response could not be understood
        │   ├── UnreadableResultError    the result of a call is malformed (a ValueError)
        │   └── IncompleteResultError    the result of a call is incomplete (a RuntimeError)
        ├── APIConnectionError           no response arrived
        │   ├── APITimeoutError          no response arrived in time (a TimeoutError)
        │   └── CertificateError         the server's TLS certificate is not trusted
        └── APIStatusError               the response has an error status
            ├── BadRequestError          400
            ├── AuthenticationError      401
            ├── BillingError             402
            ├── PermissionDeniedError    403
            ├── NotFoundError            404
            ├── ConflictError            409
            ├── UnprocessableEntityError 422
            ├── RateLimitError           429
            ├── InternalServerError      500 and above
            └── ResultRefusedError       4xx for a result (a ValueError)
                └── ResultExpiredError   410: the service no longer has the result

A 4xx for a result has two classes: a 404 is a `NotFoundError` and a `ResultRefusedError`. The
official SDK raises `ValueError` for these, and `TimeoutError` when a wait takes too long, so
programs written for it catch ours.

The names under `APIError`, and `RequestFailedError`, are those of the official SDK. Errors can be
pickled and carry the request id, the status and a remedy where they are known. `request` and
`response` are small records of the transport; no HTTP library is involved here.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class RequestErrorCategory(enum.StrEnum):
    """Who can fix a failed request: the user, the server, or unknown."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def parse(cls, text: object) -> RequestErrorCategory:
        """Parse a category from the wire, case-insensitively; anything else is `Unknown`."""
        try:
            return cls(text.strip().lower()) if isinstance(text, str) else cls.Unknown
        except ValueError:
            return cls.Unknown


def shown(value: object, most: int = 80) -> str:
    """The `repr` of a value for an error message, cut to `most` characters. Never raises.

    A value from the wire may be nested too deeply for `repr`, or have more digits than Python is
    willing to print.
    """
    try:
        return repr(value)[:most]
    except (RecursionError, ValueError):
        return f"<{type(value).__name__} that cannot be printed>"


def without_frames(error: _Error) -> _Error:
    """Drop an error's traceback, and those of its causes and contexts; call it before storing one.

    A traceback references the frames that the error passed through, and with them whatever they
    hold: request bodies, and often the object that stores the error, which makes a reference cycle.

    For an error that is not ours, and so may be a bug, the traceback is kept as text in a note.
    """
    if error.__traceback__ is not None and not isinstance(error, TinkerError | MemoryError):
        import traceback

        where = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        error.add_note(f"Traceback:\n{where}")
    found: list[BaseException | None] = [error]
    seen: set[int] = set()
    while found:
        one = found.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        found += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            found += one.exceptions
    return error


class TinkerError(Exception):
    """The base class of all errors that tinsmith raises.

    `request_id` identifies the request in the server's log, and `remedy` says what to do, where
    they are known.
    """

    def __init__(
        self, *args: object, request_id: str | None = None, remedy: str | None = None
    ) -> None:
        super().__init__(*args)
        self.request_id = request_id
        self.remedy = remedy

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}; {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class with `args` alone, without its keyword arguments.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(
    cls: type[TinkerError], args: tuple[object, ...], state: dict[str, object]
) -> TinkerError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


TinsmithError = TinkerError


class ValidationError(TinkerError, ValueError):
    """An argument is invalid; nothing was sent.

    Correct the value that the message names.
    """


class UnknownFieldError(ValidationError, TypeError):
    """A type was constructed with a field that it does not have.

    Correct the name of the field; the message suggests the nearest one.
    """


class DecodeError(TinkerError, ValueError):
    """Received bytes are malformed.

    Check for a proxy in between, another service at this address, or a newer release there.
    """


class BodyTooLargeError(DecodeError):
    """Decoding would take more memory than the receiver allows.

    Send less per request, or raise `limits.decoded_bytes` if you run the service.
    """


class ClosedError(TinkerError, RuntimeError):
    """The client is closed, or belongs to the parent of this forked process.

    Create a new client; a forked child needs its own.
    """


class EngineLostError(ClosedError):
    """The engine's process has exited, and its state is lost.

    Usually nothing: the service restarts the engine and repeats the work that was running.
    """


class ReplicaError(TinkerError, RuntimeError):
    """A replica of the engine cannot do its work now. Only inside the service.

    Nothing: the service repeats the work.
    """


class AdapterLostError(ReplicaError):
    """A replica was lost, and with it the adapter, weights or sample that a work needs.

    Nothing: the service rebuilds what was lost from the ledger, and repeats the work.
    """


class NoReplicaError(ReplicaError):
    """No replica that serves the base model is running and has room for another adapter.

    Usually nothing: the work waits. `tinsmith fleet` shows the replicas.
    """


class TokenizerError(TinkerError, RuntimeError):
    """A model's tokenizer was not found or could not be loaded.

    Follow the message: install the extra `tokenizers`, or name a folder to load from.
    """


class LedgerError(TinkerError):
    """The service's ledger refused an operation or failed.

    See the subclasses; commands accepted earlier are safe.
    """


class CommandConflictError(LedgerError):
    """A command's number was already used for another request.

    Use one client per model, and retry with the same body.
    """


class CommandPassedError(LedgerError):
    """A command arrived after its number had been skipped.

    Repeat the call; it gets a new number.
    """


class UnknownEntryError(LedgerError):
    """The ledger has no entry with this id.

    Check the id and the API key: other tenants' entries are not visible.
    """


class ResultGoneError(LedgerError):
    """A result was deleted: its client acknowledged it, or it expired.

    Repeat the call; `retention.result_s` sets how long results are kept.
    """


class LedgerUnavailableError(LedgerError):
    """The ledger is temporarily unusable; nothing was accepted.

    Check that the disk has free space and the database responds; clients retry automatically.
    """

    def __init__(
        self,
        *args: object,
        request_id: str | None = None,
        remedy: str | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(*args, request_id=request_id, remedy=remedy)
        self.reason = reason
        """The cause, in words that may be shown to clients."""


class LeaseHeldError(LedgerError):
    """Another server's scheduler holds the ledger's lease.

    Stop that server, or give this one its own database.
    """


class LeaseLostError(LedgerError):
    """A scheduler's write was refused because it no longer holds the ledger's lease.

    Nothing was written. The scheduler that holds the lease continues the work.
    """


class LedgerVersionError(LedgerError):
    """The ledger's schema is newer than this version, half migrated, or not a ledger's.

    Use the release that wrote it or a newer one, or another data folder.
    """


class LedgerDamagedError(LedgerError):
    """Data in the ledger is corrupt.

    Restore the data folder from a backup, and check the disk.
    """


class CheckpointError(TinkerError):
    """A checkpoint could not be written, found or read.

    See the subclasses.
    """


class CheckpointNotFoundError(CheckpointError):
    """No checkpoint has this path.

    Check the path with `tinsmith checkpoint list`; it may have expired or been deleted.
    """


class CheckpointExistsError(CheckpointError):
    """A checkpoint has this path already, and overwriting was not requested.

    Choose another name, or overwrite it where the call allows that.
    """


class CheckpointUnavailableError(CheckpointError):
    """The checkpoint store is temporarily unusable; nothing was changed.

    Retry; check that the store responds and is writable.
    """

    def __init__(
        self,
        *args: object,
        request_id: str | None = None,
        remedy: str | None = None,
        reason: str | None = None,
        is_lasting: bool = False,
    ) -> None:
        super().__init__(*args, request_id=request_id, remedy=remedy)
        self.reason = reason
        """The cause, in words that may be shown to clients."""
        self.is_lasting = is_lasting
        """Whether a setting has to be changed, so that retrying does not help."""


class StorageFullError(CheckpointUnavailableError):
    """The store is full, or the quota is used up.

    Delete checkpoints that are no longer needed, or add storage.
    """


class CheckpointFormatError(CheckpointError, ValueError):
    """The files are not weights in a format that this version can read.

    Use a plain LoRA adapter as saved by PEFT; the message says what is unsupported.
    """


class CheckpointDamagedError(CheckpointError):
    """A stored checkpoint is corrupt.

    Delete it or restore it from a backup, and check the disk.
    """


class BaseModelError(TinkerError):
    """A base model could not be fetched, found or read.

    See the subclasses.
    """


class BaseModelNotFoundError(BaseModelError):
    """No base model has this name, here or at the source that was asked.

    Check the name with `tinsmith model local`, or fetch the model with `tinsmith model pull`.
    """


class BaseModelUnavailableError(BaseModelError):
    """A base model is temporarily unavailable: it could not be fetched, written or read.

    Retry; the message says what did not respond.
    """


class BaseModelNoRoomError(BaseModelUnavailableError):
    """The disk is too full for a base model.

    Free disk space, or set `TINSMITH_HOME` to another disk.
    """


class BaseModelFormatError(BaseModelError, ValueError):
    """The files are not a model in a format that this version can read.

    Choose a supported model; see docs/models.md.
    """


class BaseModelDamagedError(BaseModelError):
    """A base model's files are corrupt.

    Fetch it again with `tinsmith model pull`.
    """


class RequestFailedError(TinkerError):
    """The service accepted the request, but it failed.

    Correct the request if `category` is `user`; if it is `server`, retry or see the service's log.
    """

    def __init__(
        self,
        message: str,
        request_id: str | None = None,
        category: RequestErrorCategory = RequestErrorCategory.Unknown,
        *,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id, remedy=remedy)
        self.message = message
        self.category = category


class APIError(TinkerError):
    """An HTTP request to the service failed.

    See the subclasses.
    """

    def __init__(
        self,
        message: str,
        request: Any = None,
        *,
        body: object = None,
        request_id: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id, remedy=remedy)
        self.message = message
        self.request = request
        self.body = body


class APIResponseValidationError(APIError):
    """A response has a content type or structure that the API does not define.

    Check that the address is that of a Tinker service, and that no proxy alters responses.
    """

    def __init__(
        self,
        response: Any = None,
        body: object = None,
        *,
        message: str = "the response does not match the API's schema",
        request_id: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(
            message,
            getattr(response, "request", None),
            body=body,
            request_id=request_id,
            remedy=remedy,
        )
        self.response = response
        self.status_code: int | None = getattr(response, "status_code", None)


class APIConnectionError(APIError):
    """The connection failed before a complete response arrived, after all retries.

    Check that the service is running and reachable.
    """

    def __init__(
        self,
        message: str = "Connection error.",
        request: Any = None,
        *,
        request_id: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, request, request_id=request_id, remedy=remedy)


class APITimeoutError(APIConnectionError, TimeoutError):
    """No complete response arrived in time.

    Pass a longer `timeout`, or find out why the service is slow.
    """

    # The official SDK raises `TimeoutError` from `result_async(timeout)`, so programs catch that.
    # Python's `TimeoutError` is also an `OSError`: catch this class before `OSError`.

    def __init__(
        self,
        message: str = "Request timed out.",
        request: Any = None,
        *,
        request_id: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, request, request_id=request_id, remedy=remedy)


class CertificateError(APIConnectionError):
    """The server's TLS certificate has expired, or is for another name or by an unknown authority.

    Set `ca_file` to the authority to trust. Nothing was sent; a retry would fail in the same way.
    """


class APIStatusError(APIError):
    """The service responded with an error status.

    See the subclasses; `status_code` and `body` are those of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        response: Any = None,
        body: object = None,
        status_code: int | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(
            message,
            getattr(response, "request", None),
            body=body,
            request_id=request_id,
            remedy=remedy,
        )
        self.response = response
        given = status_code if status_code is not None else getattr(response, "status_code", None)
        self.status_code: int = given if given is not None else self.default_status
        self.retry_after_s = retry_after_s

    default_status = 400


class BadRequestError(APIStatusError):
    """400: the request is malformed or cannot be fulfilled.

    Correct the request; the message says what is wrong.
    """


class AuthenticationError(APIStatusError):
    """401: the API key is missing or invalid.

    Check `TINKER_API_KEY`, or run `tinsmith auth login`.
    """

    default_status = 401


class BillingError(APIStatusError):
    """402: the account has a billing problem, and its work is paused.

    Resolve it with the hosted service; a tinsmith service never responds with 402.
    """

    default_status = 402


class PermissionDeniedError(APIStatusError):
    """403: the API key is valid but lacks permission.

    Use a key whose role has the permission.
    """

    default_status = 403


class NotFoundError(APIStatusError):
    """404: it does not exist, or belongs to someone else.

    Check the id and whose API key is used.
    """

    default_status = 404


class ConflictError(APIStatusError):
    """409: the current state does not allow the request.

    Retry later; the client has already retried for as long as its retry budget allows.
    """

    default_status = 409


class UnprocessableEntityError(APIStatusError):
    """422: the request is well-formed, but a value is invalid.

    Correct the value that the message names.
    """

    default_status = 422


class RateLimitError(APIStatusError):
    """429: too many requests; `retry_after_s` is the delay that the server asked for, if any.

    Send fewer requests at once, or ask for a higher quota; the client has already waited.
    """

    default_status = 429


class InternalServerError(APIStatusError):
    """500 and above: the service failed, after all retries.

    Look up the request id in the service's log.
    """

    default_status = 500


class UnreadableResultError(APIResponseValidationError, ValueError):
    """The result of a call is malformed.

    Repeat the call with a client and a service of the same release.
    """


class IncompleteResultError(APIResponseValidationError, RuntimeError):
    """The result of a call lacks something that was requested, or has too much.

    Drop the option, or use a service whose release supports it.
    """


class ResultRefusedError(APIStatusError, ValueError):
    """The service accepted a request but refuses to return its result.

    See the error's other class, such as `NotFoundError`.
    """


class ResultExpiredError(ResultRefusedError):
    """410: the service no longer has the result.

    Repeat the call.
    """

    default_status = 410


def refused_result(error: APIStatusError) -> APIStatusError:
    """Convert a 4xx for a result into an error that is also a `ResultRefusedError`.

    The new error has the attributes of the given one. Other errors are returned unchanged.
    """
    if not 400 <= error.status_code < 500 or isinstance(error, ResultRefusedError):
        return error
    plain = ResultExpiredError if error.status_code == 410 else type(error)
    return _rebuild_refused(plain, error.args, error.__dict__.copy())


def _rebuild_refused(
    plain: type[APIStatusError], args: tuple[object, ...], state: dict[str, object]
) -> APIStatusError:
    error = _rebuild(_refused_class(plain), args, state)  # type: ignore[arg-type]  # classes do hash
    assert isinstance(error, APIStatusError)
    return error


@functools.cache
def _refused_class(plain: type[APIStatusError]) -> type[APIStatusError]:
    """The class derived from both; cached, so that `type()` is the same every time."""
    if issubclass(plain, ResultRefusedError):
        return plain
    if plain is APIStatusError:
        return ResultRefusedError

    def reduce(error: APIStatusError) -> tuple[object, ...]:
        # Pickle cannot find a class that was created at run time by its name.
        return _rebuild_refused, (plain, error.args, error.__dict__.copy())

    members = {"__module__": __name__, "__doc__": plain.__doc__, "__reduce__": reduce}
    return type(f"Result{plain.__name__}", (plain, ResultRefusedError), members)


class ExperimentalWarning(FutureWarning):
    """The feature works, but may change in a future release."""
