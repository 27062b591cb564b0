"""Server-sent events, in the WHATWG event-stream format.

The server writes events with `encode_event` and keeps idle connections open with `encode_comment`.
The client feeds chunks of bytes to an `EventDecoder`, which returns complete events in order.

As the standard requires, invalid UTF-8 becomes U+FFFD. In addition, the size of an event is
limited. The `retry` field is ignored: the delay before a reconnection is the client's choice.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from tinsmith.errors import BodyTooLargeError, ValidationError
from tinsmith.wire.decode_limits import DEFAULT_LIMITS, DecodeLimits

DEFAULT_EVENT_NAME: Final = "message"

_BOM = b"\xef\xbb\xbf"
_LONGEST_FIELD_NAME = 5  # "event"

# Not str.splitlines, which also splits at other characters, such as U+2028.
_LINE_END = re.compile(r"\r\n|\r|\n")
_LINE_END_BYTES = re.compile(rb"\r\n|\r|\n")


class ServerSentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One server-sent event."""

    data: str
    """The payload; lines are separated by LF."""

    event: str = DEFAULT_EVENT_NAME
    """The name of the event."""

    id: str | None = None
    """The id that it sets; `None` keeps the previous id."""


def encode_event(event: ServerSentEvent) -> bytes:
    """Encode an event. All kinds of line ends in the data become LF.

    Raises:
        ValidationError: A field cannot be encoded: a line end in `event` or `id`, NUL in `id`, an
            empty name, or a lone surrogate.
    """
    _check_fields(event)
    lines = [] if event.event == DEFAULT_EVENT_NAME else [f"event: {event.event}\n"]
    if event.id is not None:
        lines.append(f"id: {event.id}\n")
    lines.extend(f"data: {line}\n" for line in _LINE_END.split(event.data))
    try:
        return ("".join(lines) + "\n").encode()
    except UnicodeEncodeError as exc:
        raise ValidationError(f"an event has text that UTF-8 cannot encode: {exc.reason}") from exc


def encode_comment() -> bytes:
    """A comment, which decoders ignore; sent to keep an idle connection open."""
    return b": \n\n"


class EventDecoder:
    """Decodes the bytes of one stream into events.

    The result does not depend on how the stream is split into chunks. The work is linear in the
    number of bytes, even if they are fed one at a time.

    Buffers at most `limits.event_bytes` of one event: its data, name, id and incomplete line. The
    decoded `str` may take four times that if it has characters outside the Basic Multilingual
    Plane.
    """

    def __init__(self, limits: DecodeLimits = DEFAULT_LIMITS) -> None:
        self._limit_bytes = limits.event_bytes
        self._line = bytearray()  # the incomplete line
        self._data = bytearray()  # the data lines so far, each with LF
        self._name = b""
        self._id: bytes | None = None
        self._is_first_line = True
        self._ended_in_cr = False
        self._error: BodyTooLargeError | None = None

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Decode the next bytes and return the events that they complete.

        Raises:
            BodyTooLargeError: An event exceeds the limit; later bytes are ignored. Events completed
                earlier in the same chunk are returned first, and the next call raises.
        """
        events: list[ServerSentEvent] = []
        if self._error is None:
            try:
                self._take(chunk, events)
            except BodyTooLargeError as exc:
                self._error = exc
                self._reset_event()
        if self._error and not events:
            raise self._error
        return events

    def _take(self, chunk: bytes, events: list[ServerSentEvent]) -> None:
        if not chunk:
            return
        # A CR ends its line at once; an LF that follows belongs to the same line end.
        start = 1 if self._ended_in_cr and chunk.startswith(b"\n") else 0
        self._ended_in_cr = chunk.endswith(b"\r")
        for line_end in _LINE_END_BYTES.finditer(chunk, start):
            self._check_room(line_end.start() - start)
            self._line += memoryview(chunk)[start : line_end.start()]
            line, self._line = self._line, bytearray()
            event = self._end_line(line)
            if event:
                events.append(event)
            start = line_end.end()
        self._check_room(len(chunk) - start)
        self._line += memoryview(chunk)[start:]

    def _check_room(self, more_bytes: int) -> None:
        if self._held_bytes() + more_bytes > self._limit_bytes:
            raise BodyTooLargeError(
                f"a server-sent event is larger than the limit of {self._limit_bytes} bytes; "
                "raise limits.event_bytes if the sender can be trusted"
            )

    def _held_bytes(self) -> int:
        return len(self._line) + len(self._data) + len(self._name) + len(self._id or b"")

    def _end_line(self, line: bytearray) -> ServerSentEvent | None:
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._end_event()
        colon = line.find(b":", 0, _LONGEST_FIELD_NAME + 1)
        if colon >= 0:
            value_start = colon + 2 if line[colon + 1 : colon + 2] == b" " else colon + 1
            self._set_field(line[:colon], memoryview(line)[value_start:])
        elif len(line) <= _LONGEST_FIELD_NAME:
            self._set_field(line, memoryview(b""))
        return None

    def _set_field(self, name: bytearray, value: memoryview) -> None:
        """Set a field of the current event; a comment has an empty name and is ignored."""
        if name == b"data":
            self._data += value
            self._data += b"\n"
        elif name == b"event":
            self._name = bytes(value)
        elif name == b"id":
            new_id = bytes(value)
            self._id = self._id if b"\0" in new_id else new_id

    def _end_event(self) -> ServerSentEvent | None:
        data, name, event_id = self._data, self._name, self._id
        self._reset_event()
        if not data:
            return None
        del data[-1]
        return ServerSentEvent(
            data=_from_utf8(data),
            event=_from_utf8(name) or DEFAULT_EVENT_NAME,
            id=None if event_id is None else _from_utf8(event_id),
        )

    def _reset_event(self) -> None:
        self._line, self._data = bytearray(), bytearray()
        self._name, self._id = b"", None


def _check_fields(event: ServerSentEvent) -> None:
    if not event.event or _LINE_END.search(event.event):
        raise ValidationError(f"invalid event name {event.event[:80]!r}: expected one line")
    if event.id is not None and (_LINE_END.search(event.id) or "\0" in event.id):
        raise ValidationError(f"invalid event id {event.id[:80]!r}: expected one line without NUL")


def _from_utf8(text: bytes | bytearray) -> str:
    # Each line can be decoded alone: no UTF-8 sequence spans a line end.
    return text.decode("utf-8", "replace")
