"""Every error tinsmith raises, one tree, branched by who can act on it.

    TinkerError                          (also named TinsmithError)
    ├── ValidationError                  a value does not fit its field (a ValueError)
    │   └── UnknownFieldError            the type has no such field (also a TypeError)
    ├── DecodeError                      bytes are not what they claim to be (a ValueError)
    │   └── BodyTooLargeError            they would take more memory than allowed
    ├── ClosedError                      the client was closed (a RuntimeError)
    │   └── EngineLostError              the process in which an engine computed has ended
    ├── TokenizerError                   no tokenizer was found for a model (a RuntimeError)
    ├── LedgerError                      the service's durable record says no
    │   ├── CommandConflictError         a number was used for another request
    │   ├── CommandPassedError           the turn of a number is over
    │   ├── UnknownEntryError            nothing is kept under this id
    │   ├── ResultGoneError              the result was acknowledged or has expired
    │   ├── LedgerUnavailableError       it cannot write or read now: disk full, locked, gone
    │   ├── LeaseHeldError               another server's scheduler works from it
    │   ├── LeaseLostError               ... since this one's lease ended: nothing was written
    │   ├── LedgerVersionError           its schema is not one that this version can use
    │   └── LedgerDamagedError           kept bytes are not what was written
    ├── CheckpointError                  saved weights say no
    │   ├── CheckpointNotFoundError      nothing is saved under this path
    │   ├── CheckpointExistsError        something else is
    │   ├── CheckpointUnavailableError   the store cannot write or read now
    │   │   └── StorageFullError         ... because there is no room
    │   ├── CheckpointFormatError        the files are not weights as we know them (a ValueError)
    │   └── CheckpointDamagedError       kept bytes are not what was written
    ├── BaseModelError                   the files of a base model say no
    │   ├── BaseModelNotFoundError       no model of this name is here, or known where it was sought
    │   ├── BaseModelUnavailableError    it cannot be fetched, written or read now
    │   │   └── BaseModelNoRoomError     ... because the disk has no room
    │   ├── BaseModelFormatError         the files are not a model as we know them (a ValueError)
    │   └── BaseModelDamagedError        fetched or kept bytes are not what they should be
    ├── RequestFailedError               the server accepted the work and could not finish it
    └── APIError                         an HTTP exchange went wrong
        ├── APIResponseValidationError   the reply arrived and could not be understood
        │   ├── UnreadableResultError    ... and was the result of a call (a ValueError)
        │   └── IncompleteResultError    ... and is not what was asked for (a RuntimeError)
        ├── APIConnectionError           no reply arrived
        │   ├── APITimeoutError          ... within the time allowed (a TimeoutError)
        │   └── CertificateError         the server could not prove who it is
        └── APIStatusError               the reply was a refusal
            ├── BadRequestError          400
            ├── AuthenticationError      401
            ├── BillingError             402
            ├── PermissionDeniedError    403
            ├── NotFoundError            404
            ├── ConflictError            409
            ├── UnprocessableEntityError 422
            ├── RateLimitError           429
            ├── InternalServerError      500 and above
            └── ResultRefusedError       4xx when asked for a result (a ValueError)
                └── ResultExpiredError   410: the server no longer has it

A refusal to give out a result is of both classes that fit: a 404 is a `NotFoundError` and a
`ResultRefusedError`. Programs catch it as a `ValueError`, which is what the official SDK raises,
and a wait that took too long as a `TimeoutError`.

The names that Tinker programs catch are the API's own. Each error can be pickled, so that it
crosses process boundaries, and carries the request id, the status and the remedy where they are
known.

Knows nothing of HTTP libraries: `request` and `response` are whatever small records the transport
made.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class RequestErrorCategory(enum.StrEnum):
    """Who can mend a failed request: its sender, the server, or it is not known."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def parse(cls, text: object) -> RequestErrorCategory:
        """Read a category as it came over the wire, in any case; what is not known is `Unknown`."""
        try:
            return cls(text.strip().lower()) if isinstance(text, str) else cls.Unknown
        except ValueError:
            return cls.Unknown


def shown(value: object, most: int = 80) -> str:
    """A value for a message: cut to `most` characters, and never itself a reason to fail.

    What came over the wire may be nested deeper than `repr` can go, or have more digits than Python
    agrees to print.
    """
    try:
        return repr(value)[:most]
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} that cannot be shown"


def without_frames(error: _Error) -> _Error:
    """The same error without its traceback: call it on every error that is stored.

    A traceback references the frames that the error passed through. They hold what was at hand,
    such as the body of a request, and often what the error is stored in, so that only the garbage
    collector could free them. This clears the causes and contexts of the error too.

    Where an error that is not ours was raised is kept as text, in a note: it may be a bug.
    """
    if error.__traceback__ is not None and not isinstance(error, TinkerError | MemoryError):
        import traceback

        where = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        error.add_note(f"It was raised in:\n{where}")
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
    """Root of everything that tinsmith raises on purpose.

    `request_id` names the server-side request and `remedy` says what to do, where they are known.
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
        # The default calls the class with `args` alone, which fails wherever a keyword is required.
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
    """A value given by the caller does not fit its field.

    Mend the value that the message names; nothing was sent.
    """


class UnknownFieldError(ValidationError, TypeError):
    """A type was made with a field that it does not have.

    Mend the name of the field; the message lists the nearest.
    """


class DecodeError(TinkerError, ValueError):
    """Bytes from the other side are not what they claim to be.

    Look at what stands between: a proxy, another service at this address, a release too new.
    """


class BodyTooLargeError(DecodeError):
    """Decoding would take more memory than the receiver allows.

    Ask for less at once, or raise `limits.decoded_bytes` of a service of your own.
    """


class ClosedError(TinkerError, RuntimeError):
    """The client was closed, or belongs to the process that this one was forked from.

    Make a new client, in a forked child too.
    """


class EngineLostError(ClosedError):
    """The process in which an engine computed has ended; what the engine held is gone.

    Nothing, as a rule: the service starts the engine anew and runs again what was under way.
    """


class TokenizerError(TinkerError, RuntimeError):
    """The tokenizer of a model could not be found or loaded.

    Do what the message says: install the extra `tokenizers`, or name a folder to load from.
    """


class LedgerError(TinkerError):
    """The durable record of the service refused something or failed.

    See the classes below; what was accepted before is kept.
    """


class CommandConflictError(LedgerError):
    """A command's number was used before, for another request.

    Let one client number the calls of a model, and send the same body when trying again.
    """


class CommandPassedError(LedgerError):
    """A command came after its number had been passed over.

    Make the call again; it gets a new number.
    """


class UnknownEntryError(LedgerError):
    """The ledger keeps nothing under this id.

    Look at the id, and at whose key is used: what belongs to others does not exist for you.
    """


class ResultGoneError(LedgerError):
    """A result is no longer kept: its client has it, or it expired.

    Ask for the work again; `retention.result_s` says how long results are kept.
    """


class LedgerUnavailableError(LedgerError):
    """The ledger cannot write or read now; nothing was promised, and trying again may help.

    Clients try again by themselves; see that the disk has room and the database answers.
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
        """What is wrong, for clients: nothing of the server's inside."""


class LeaseHeldError(LedgerError):
    """Another server's scheduler holds the ledger's lease.

    Stop that server, or give this one a database of its own.
    """


class LeaseLostError(LedgerError):
    """A scheduler's write was refused, because it does not hold the ledger's newest lease.

    Nothing was written. The scheduler that holds the lease now goes on with the work.
    """


class LedgerVersionError(LedgerError):
    """The ledger's schema is newer than this version, half-changed, or not a ledger's.

    Use the release that wrote it or a newer one, or another data folder.
    """


class LedgerDamagedError(LedgerError):
    """Bytes that the ledger keeps are not those that were written.

    Restore the data folder from a backup; see that the disk is sound.
    """


class CheckpointError(TinkerError):
    """Saved weights could not be written, found or read.

    See the classes below.
    """


class CheckpointNotFoundError(CheckpointError):
    """Nothing is saved under this path.

    Look at the path with `tinsmith checkpoint list`; it may have expired or been deleted.
    """


class CheckpointExistsError(CheckpointError):
    """The path is taken, and what is there was not to be overwritten.

    Choose another name, or overwrite it where the call allows that.
    """


class CheckpointUnavailableError(CheckpointError):
    """The store cannot write or read now; nothing was changed, and trying again may help.

    Try again; see that the store answers and may be written to.
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
        """What is wrong, for clients: nothing of the server's inside."""
        self.is_lasting = is_lasting
        """Whether it stays until somebody changes a setting, so that waiting does not help."""


class StorageFullError(CheckpointUnavailableError):
    """There is no room to write, or the quota is used up.

    Delete checkpoints that are no longer needed, or give the store more room.
    """


class CheckpointFormatError(CheckpointError, ValueError):
    """The files are not weights in a form that this version can read.

    Give a folder with plain LoRA as PEFT saves it; the message says what does not fit.
    """


class CheckpointDamagedError(CheckpointError):
    """Bytes that a store keeps are not those that were written.

    Delete it, or restore it from a backup; see that the disk is sound.
    """


class BaseModelError(TinkerError):
    """The files of a base model could not be fetched, found or read.

    See the classes below.
    """


class BaseModelNotFoundError(BaseModelError):
    """No model of this name is here, or is known where it was looked for.

    Look at the name with `tinsmith model local`, or fetch it with `tinsmith model pull`.
    """


class BaseModelUnavailableError(BaseModelError):
    """A model cannot be fetched, written or read now; trying again may help.

    Try again; the message says what did not answer.
    """


class BaseModelNoRoomError(BaseModelUnavailableError):
    """The disk has no room for a model.

    Free room on the disk, or move `TINSMITH_HOME` to one that has it.
    """


class BaseModelFormatError(BaseModelError, ValueError):
    """The files are not a model in a form that this version can read.

    Choose a model that can be run; docs/models.md says which.
    """


class BaseModelDamagedError(BaseModelError):
    """Bytes that were fetched or kept are not those that they should be.

    Fetch it again with `tinsmith model pull`.
    """


class RequestFailedError(TinkerError):
    """The server accepted the request and finished it in a failed state.

    Mend the request if `category` is `user`; if it is `server`, try again or read its log.
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
    """An HTTP exchange with the service went wrong.

    See the classes below.
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
    """A reply arrived whose content type or shape is not that of the API.

    See that the address is a Tinker service's, and what a proxy before it changes.
    """

    def __init__(
        self,
        response: Any = None,
        body: object = None,
        *,
        message: str = "the reply is not of the shape that the API promises",
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
    """The connection failed before a whole reply arrived.

    See that the service runs and can be reached; calls were tried again already.
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
    """No whole reply arrived within the time allowed.

    Give the call a longer `timeout`, or look at why the service is slow.
    """

    # Programs catch it as a `TimeoutError` around `result_async(timeout)`, which is what the
    # official SDK raises there. Python's own is an `OSError` too: catch this one before those.

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
    """The server's certificate is for another name, expired, or of an unknown authority.

    Nothing was sent, and another try would end the same way. Give `ca_file` the authority to trust.
    """


class APIStatusError(APIError):
    """The service answered with a status that refuses the request.

    See the classes below; `status_code` and `body` are the answer.
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
    """400: the request is malformed or asks for something that cannot be.

    Mend the request; the message says what is wrong with it.
    """


class AuthenticationError(APIStatusError):
    """401: no credential was sent, or it is not accepted.

    Look at `TINKER_API_KEY`, or run `tinsmith auth login`.
    """

    default_status = 401


class BillingError(APIStatusError):
    """402: the account cannot pay; the service pauses its work.

    Settle the account of the hosted service; ours never answers so.
    """

    default_status = 402


class PermissionDeniedError(APIStatusError):
    """403: the credential is good and does not allow this.

    Use a credential whose role allows it.
    """

    default_status = 403


class NotFoundError(APIStatusError):
    """404: there is no such thing, or it belongs to somebody else.

    Look at the id, and at whose key is used.
    """

    default_status = 404


class ConflictError(APIStatusError):
    """409: the state of the thing does not allow this now; clients retry it.

    Nothing, as a rule: clients have tried again for as long as their budget says.
    """

    default_status = 409


class UnprocessableEntityError(APIStatusError):
    """422: the request is well-formed and its values do not fit.

    Mend the value that the message names.
    """

    default_status = 422


class RateLimitError(APIStatusError):
    """429: too many requests; `retry_after_s` says when to come back, if the server did.

    Send less at once, or have the quota raised; clients wait by themselves before this is raised.
    """

    default_status = 429


class InternalServerError(APIStatusError):
    """500 and above: the service failed.

    Look at the service's log under the request id; clients have tried again already.
    """

    default_status = 500


class UnreadableResultError(APIResponseValidationError, ValueError):
    """The server gave a result that cannot be read.

    Make the call again, with a client and a service of the same release.
    """


class IncompleteResultError(APIResponseValidationError, RuntimeError):
    """The result lacks something that was asked for, or has more than that.

    Ask without it, or use a service of a release that knows it.
    """


class ResultRefusedError(APIStatusError, ValueError):
    """The server accepted the work and does not give out its result.

    See the other class that it is of, such as `NotFoundError`.
    """


class ResultExpiredError(ResultRefusedError):
    """410: the server no longer has the result.

    Ask for the work again.
    """

    default_status = 410


def refused_result(error: APIStatusError) -> APIStatusError:
    """The error for a 4xx that came when a result was asked for; others are returned as they are.

    It is what the given one is and a `ResultRefusedError` too, and carries all that it carries.
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
    """The class that is both: made once, so that `except` and `type()` agree everywhere."""
    if issubclass(plain, ResultRefusedError):
        return plain
    if plain is APIStatusError:
        return ResultRefusedError

    def reduce(error: APIStatusError) -> tuple[object, ...]:
        # A class that was made here cannot be found by its name in another process.
        return _rebuild_refused, (plain, error.args, error.__dict__.copy())

    members = {"__module__": __name__, "__doc__": plain.__doc__, "__reduce__": reduce}
    return type(f"Result{plain.__name__}", (plain, ResultRefusedError), members)


class ExperimentalWarning(FutureWarning):
    """The call works and may change in a coming release."""
