"""The types that describe an endpoint in `endpoints.py`: request, response, retries, format."""

from __future__ import annotations

import enum
import functools
import re
from typing import Any

import msgspec

from tinsmith.wire.content import JSON_TYPE, PROTOBUF_TYPE

API_PREFIX = "/api/v1"


class Format(enum.Enum):
    """The format of a body."""

    JSON = JSON_TYPE
    PROTOBUF = PROTOBUF_TYPE


class Answer(enum.Enum):
    """What the response to a call contains."""

    DIRECT = "direct"
    """The result itself."""
    FUTURE = "future"
    """A request id; `retrieve_future` returns the result."""
    RESULT = "result"
    """The result of an earlier request; see `FUTURE_RESULTS` in `endpoints.py`."""
    NOTHING = "nothing"
    """A status only; a body is ignored."""
    EVENTS = "events"
    """A stream of server-sent events, defined in `types/extensions.py`."""


class RetryClass(enum.Enum):
    """What is retried after a failure."""

    PATIENT = "patient"
    """The HTTP request, then the whole call: reads, and training submissions."""
    CALL = "call"
    """Only the whole call, keeping its number: samples and saves."""
    EXCHANGE = "exchange"
    """Only the HTTP request: creating sessions, models and samplers."""
    OWN = "own"
    """Nothing; the caller has its own loop: polls, heartbeats, telemetry."""


class Pool(enum.Enum):
    """The connection pool of a call; slow calls must not block others (S22)."""

    __hash__ = object.__hash__  # faster than the enum's own, which is Python code

    SESSION = "session"
    SAMPLE = "sample"
    TRAIN = "train"
    RETRIEVE = "retrieve"
    REST = "rest"
    TELEMETRY = "telemetry"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint of the API."""

    name: str
    method: str
    path: str
    request: Any
    response: Any = None
    answer: Answer = Answer.DIRECT
    request_format: Format = Format.JSON
    retry: RetryClass = RetryClass.PATIENT
    pool: Pool = Pool.REST
    timeout_s: float = 60.0
    identity: tuple[str, ...] = ()
    """Fields that identify a submission, so that a retry is recognized; if empty, the idempotency
    key does."""
    result: str | None = None
    """The name of a future's result in `X-Tinker-Request-Type`."""
    header_fields: dict[str, str] = {}
    headers: dict[str, str] = {}
    takes_stream: bool = False
    """Whether the body is raw bytes, which the handler reads as they arrive; the fields are then in
    the path and the query."""
    is_management: bool = False
    """Whether the call sends its SDK version and method in headers."""
    follows_redirects: bool = False
    until: str | None = None
    """The last SDK release that calls it, if newer ones do not."""
    is_extension: bool = False
    """Whether it is a tinsmith extension, used only if the service offers it; see
    `docs/extensions.md`."""

    is_for_operators: bool = False
    """Whether it needs the key of an operator; to all other keys it does not exist."""

    @property
    def path_fields(self) -> tuple[str, ...]:
        """The request's fields that are part of the path."""
        return _path_fields(self.path)


@functools.cache
def _path_fields(path: str) -> tuple[str, ...]:
    return tuple(name for name, _ in re.findall(r"{(\w+)(:path)?}", path))


class FutureResult(msgspec.Struct, frozen=True):
    """What `retrieve_future` returns for one kind of request."""

    type: Any
    format: Format = Format.JSON
