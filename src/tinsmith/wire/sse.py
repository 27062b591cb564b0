"""Server-sent events: events to bytes, and bytes, however they were cut, back to events.

Framing is that of the WHATWG event-stream format. The server writes each event with `encode_event`
and keeps idle connections open with `encode_comment`; the client feeds what the socket gives it to
an `EventDecoder`, which hands on whole events in order.

As the standard asks, bytes that are not UTF-8 become U+FFFD instead of an error, and an event that
the stream breaks off is dropped. Beyond the standard, an event has a size limit.

Knows nothing of HTTP, of reconnecting, or of what the data of an event means.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from tinsmith.errors import BodyTooLargeError, ValidationError
from tinsmith.wire.limits import DEFAULT_LIMITS, DecodeLimits

DEFAULT_EVENT_NAME: Final = "message"

_BOM = b"\xef\xbb\xbf"
_LONGEST_FIELD_NAME = 5  # "event", "retry"
_LONGEST_RETRY = 15  # digits: 30 million years; int() refuses or crawls on thousands of them

# Written out because str.splitlines also cuts at characters that end no line here, such as U+2028.
_LINE_END = re.compile(r"\r\n|\r|\n")
_LINE_END_BYTES = re.compile(rb"\r\n|\r|\n")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One server-sent event."""

    data: str
    """Its payload; lines are divided by LF."""

    event: str = DEFAULT_EVENT_NAME
    """Its name."""

    id: str | None = None
    """The id it set; `None` if it set none, in which case an earlier one stays in force."""

    retry_ms: int | None = None
    """The reconnection delay it set, if any."""


def encode_event(event: Event) -> bytes:
    """Write one event. Line ends in the data, of any kind, arrive as LF.

    Raises:
        ValidationError: A field holds what the format cannot carry: a line end in `event` or `id`,
            NUL in `id`, an empty name, a retry delay that is negative or beyond 15 digits, or a
            lone surrogate.
    """
    _check_fields(event)
    lines = [] if event.event == DEFAULT_EVENT_NAME else [f"event: {event.event}\n"]
    if event.id is not None:
        lines.append(f"id: {event.id}\n")
    if event.retry_ms is not None:
        lines.append(f"retry: {event.retry_ms}\n")
    lines.extend(f"data: {line}\n" for line in _LINE_END.split(event.data))
    return _to_utf8("".join(lines) + "\n")


def encode_comment(text: str = "") -> bytes:
    """Write a comment, which decoders skip: something to send while there is nothing to say.

    Raises:
        ValidationError: The text holds a lone surrogate.
    """
    return _to_utf8("".join(f": {line}\n" for line in _LINE_END.split(text)) + "\n")


class EventDecoder:
    """Turns the bytes of one stream into events.

    Where the stream is cut into chunks makes no difference to the events, nor to whether and where
    it is refused. Work is linear in the bytes fed, even one at a time.

    At most `limits.event_bytes` of one event are held: its data, name and id, and the line that has
    not ended yet. The `str` made of the data may take four times that, if any of it is outside the
    Basic Multilingual Plane.
    """

    def __init__(self, limits: DecodeLimits = DEFAULT_LIMITS) -> None:
        self._limit_bytes = limits.event_bytes
        self._line = bytearray()  # the line that has not ended
        self._data = bytearray()  # every data line so far, each with its line end
        self._name = b""
        self._id: bytes | None = None
        self._retry_ms: int | None = None
        self._last_event_id = ""
        self._is_first_line = True
        self._ended_in_cr = False
        self._refusal: BodyTooLargeError | None = None
        self._is_refusal_told = False
        self._is_closed = False

    @property
    def last_event_id(self) -> str:
        """The latest id of a finished event, to resume from; empty if there was none."""
        return self._last_event_id

    def feed(self, chunk: bytes) -> list[Event]:
        """Take the next bytes and return the events that they finish.

        Raises:
            BodyTooLargeError: An event is larger than the limit, and nothing is taken after it.
                Events finished before it in the same chunk are returned first, and the error then
                comes from the next call.
        """
        assert not self._is_closed, "feed() after close()"
        events: list[Event] = []
        if self._refusal is None:
            try:
                self._take(chunk, events)
            except BodyTooLargeError as exc:
                self._refusal = exc
                self._forget_event()
        if self._refusal and not events:
            self._is_refusal_told = True
            raise self._refusal
        return events

    def close(self) -> bool:
        """End the stream; an event that was not finished by an empty line is dropped.

        Returns:
            Whether anything was dropped: the stream was cut in the middle of an event or line.

        Raises:
            BodyTooLargeError: The last call of `feed` met an event that is too large and returned
                the ones before it.
        """
        if self._is_closed:
            return False
        self._is_closed = True
        is_cut = self._held_bytes() > 0 or self._id is not None or self._retry_ms is not None
        self._forget_event()
        if self._refusal and not self._is_refusal_told:
            raise self._refusal
        return is_cut

    def _take(self, chunk: bytes, events: list[Event]) -> None:
        if not chunk:
            return
        # A CR ended its line at once, without waiting; an LF now is the rest of that line end.
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
                "raise limits.event_bytes if the sender is to be trusted"
            )

    def _held_bytes(self) -> int:
        return len(self._line) + len(self._data) + len(self._name) + len(self._id or b"")

    def _end_line(self, line: bytearray) -> Event | None:
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
        """Keep a field of the event under way; a comment has an empty name and is not kept."""
        if name == b"data":
            self._data += value
            self._data += b"\n"
        elif name == b"event":
            self._name = bytes(value)
        elif name == b"id":
            new_id = bytes(value)
            self._id = self._id if b"\0" in new_id else new_id
        elif name == b"retry":
            digits = bytes(value[: _LONGEST_RETRY + 1])
            if digits.isdigit() and len(digits) <= _LONGEST_RETRY:
                self._retry_ms = int(digits)

    def _end_event(self) -> Event | None:
        data, name, event_id, retry_ms = self._data, self._name, self._id, self._retry_ms
        self._forget_event()
        # Id and delay count even where there are no data lines, which make the event.
        if event_id is not None:
            self._last_event_id = _from_utf8(event_id)
        if not data:
            return None
        del data[-1]
        return Event(
            data=_from_utf8(data),
            event=_from_utf8(name) or DEFAULT_EVENT_NAME,
            id=None if event_id is None else self._last_event_id,
            retry_ms=retry_ms,
        )

    def _forget_event(self) -> None:
        self._line, self._data = bytearray(), bytearray()
        self._name, self._id, self._retry_ms = b"", None, None


def _check_fields(event: Event) -> None:
    if not event.event or _LINE_END.search(event.event):
        raise ValidationError(f"event name {event.event[:80]!r} is empty or has more than one line")
    if event.id is not None and (_LINE_END.search(event.id) or "\0" in event.id):
        raise ValidationError(f"event id {event.id[:80]!r} has more than one line, or holds NUL")
    if event.retry_ms is not None and not 0 <= event.retry_ms < 10**_LONGEST_RETRY:
        raise ValidationError(
            f"retry_ms must be from 0 to below 10**{_LONGEST_RETRY}, not {event.retry_ms}"
        )


def _to_utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        raise ValidationError(f"an event holds text that UTF-8 cannot carry: {exc.reason}") from exc


def _from_utf8(text: bytes | bytearray) -> str:
    # Decoding each piece alone equals decoding the stream: no UTF-8 sequence spans a line end.
    return text.decode("utf-8", "replace")
