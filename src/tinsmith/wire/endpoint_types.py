"""The words in which `endpoints.py` describes a route: what is sent, answered, retried, and how."""

from __future__ import annotations

import enum
import functools
import re
from typing import Any

import msgspec

from tinsmith.wire.content import JSON_TYPE, PROTOBUF_TYPE

API_PREFIX = "/api/v1"


class Format(enum.Enum):
    """How a body is written."""

    JSON = JSON_TYPE
    PROTOBUF = PROTOBUF_TYPE


class Answer(enum.Enum):
    """What the reply to a call is."""

    DIRECT = "direct"
    """The result itself."""
    FUTURE = "future"
    """A request id, under which the result is fetched with `retrieve_future`."""
    RESULT = "result"
    """Whatever the awaited request gave; see `FUTURE_RESULTS` of `endpoints.py`."""
    NOTHING = "nothing"
    """A status; a body is ignored."""
    EVENTS = "events"
    """A stream of server-sent events, whose names and data are of `types/extensions.py`."""


class RetryClass(enum.Enum):
    """Which failures are tried again, and by whom."""

    PATIENT = "patient"
    """The exchange is retried, and then the call as a whole: reads, and training submissions."""
    CALL = "call"
    """Only the call as a whole is retried, keeping its number: samples and saves."""
    EXCHANGE = "exchange"
    """Only the exchange is retried: what makes sessions, models and samplers."""
    OWN = "own"
    """The caller has a loop of its own: polls, heartbeats, telemetry."""


class Pool(enum.Enum):
    """Which connections carry a call, so that slow ones never hold up others (S22)."""

    __hash__ = object.__hash__  # an enum's own is Python code, and pools are looked up by it

    SESSION = "session"
    SAMPLE = "sample"
    TRAIN = "train"
    RETRIEVE = "retrieve"
    REST = "rest"
    TELEMETRY = "telemetry"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One route."""

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
    """Fields that tell whether two submissions are the same; without any, the idempotency key
    does."""
    result: str | None = None
    """What a future's result is called in `X-Tinker-Request-Type`."""
    header_fields: dict[str, str] = {}
    headers: dict[str, str] = {}
    takes_bytes: bool = False
    """Whether the body is bytes of no form, and the fields are in the path and the query alone."""
    is_management: bool = False
    """Whether the call names its SDK version and method in headers."""
    follows_redirects: bool = False
    until: str | None = None
    """The last SDK release that calls it, if it is no longer called."""
    is_extension: bool = False
    """Whether it is ours: called only where a service's flags offer it; see
    `docs/extensions.md`."""

    @property
    def path_fields(self) -> tuple[str, ...]:
        """The request's fields that stand in the path."""
        return _path_fields(self.path)


@functools.cache
def _path_fields(path: str) -> tuple[str, ...]:
    return tuple(name for name, _ in re.findall(r"{(\w+)(:path)?}", path))


class FutureResult(msgspec.Struct, frozen=True):
    """What `retrieve_future` gives for one kind of request."""

    type: Any
    format: Format = Format.JSON
