"""Types of telemetry that a client may send to the service."""

from __future__ import annotations

import datetime
from typing import Any, ClassVar, Literal, TypeAlias

from tinsmith.types.record import Record

EventType: TypeAlias = Literal[
    "SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"
]
Severity: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class _Event(Record, tag_field="event"):
    event: ClassVar[str]
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime.datetime


class SessionStartEvent(_Event, tag="SESSION_START"):
    """A session started."""


class SessionEndEvent(_Event, tag="SESSION_END"):
    """A session ended after `duration`."""

    duration: str


class UnhandledExceptionEvent(_Event, tag="UNHANDLED_EXCEPTION"):
    """An exception was not handled."""

    error_message: str
    error_type: str
    traceback: str | None = None


class GenericEvent(_Event, tag="GENERIC_EVENT"):
    """Any other event, by name."""

    event_name: str
    event_data: dict[str, Any] = {}


TelemetryEvent: TypeAlias = (
    SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent
)


class TelemetryBatch(Record):
    """Events of one session, from one process."""

    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str | None = None


class TelemetryResponse(Record):
    """The events were accepted."""

    status: Literal["accepted"]
