"""The protobuf wire format, as far as our messages need it, without copying arrays.

Our messages are a few small numbers around large arrays. The protobuf library copies each array
into a message, and again into the body. Here an array's memory is one of the buffers of the body,
and a decoded array is a view of the body. `docs/dependencies.md` has the figures.

`proto_format.py` defines the messages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

from tinsmith.errors import BodyTooLargeError, DecodeError, ValidationError
from tinsmith.types.buffers import Memory
from tinsmith.wire.decode_limits import FIELDS_PER_MESSAGE, DecodeLimits

T = TypeVar("T")

Parts: TypeAlias = list[Memory]
"""A body as a list of buffers; the large ones are the arrays themselves."""

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
_BEGIN_WITH_VARINT = (VARINT, LENGTH_DELIMITED)
ITEM_BYTES = 512
"""An upper bound on the size of one decoded message as Python objects, without arrays."""

_TEXT_FACTOR = 4
"""Python stores a string with four bytes per character if one of them needs it."""
_MOST_HELD = 8
"""An array may share the body's memory if the body is at most this many times as large."""
_SMALL_BYTES = 4096
_UINT64 = 1 << 64
_ONE_BYTE = [bytes((number,)) for number in range(0x80)]


# Encoding: each function appends to `out` and returns the number of bytes.


def varint(number: int) -> bytes:
    """An integer of up to 64 bits; negative ones take ten bytes, as in the protobuf library."""
    if 0 <= number < 0x80:
        return _ONE_BYTE[number]
    number %= _UINT64
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def header(tag: int, size: int) -> bytes:
    """The header of a field of `size` bytes."""
    if size < 0x80:
        return bytes((tag, size))
    if size < 0x4000:  # the varint, inlined for the common sizes
        return bytes((tag, size & 0x7F | 0x80, size >> 7))
    return bytes((tag,)) + varint(size)


def put_int(out: Parts, tag: int, number: int) -> int:
    """Append a number; 0 is omitted, since a missing field means 0."""
    if not number:
        return 0
    part = bytes((tag,)) + varint(number)
    out.append(part)
    return len(part)


def put_int32(out: Parts, tag: int, number: int, what: str, *, even_if_0: bool = False) -> int:
    """Append a 32-bit number; 0 too if its presence matters."""
    if not -(1 << 31) <= number < 1 << 31:
        raise ValidationError(f"{what} is {number}, which does not fit in 32 bits")
    if number == 0 and even_if_0:
        out.append(bytes((tag, 0)))
        return 2
    return put_int(out, tag, number)


def put_double(out: Parts, tag: int, number: float) -> int:
    """Append a floating-point number, even 0."""
    part = bytes((tag,)) + struct.pack("<d", number)
    out.append(part)
    return len(part)


def put_bytes(out: Parts, tag: int, memory: Memory) -> int:
    """Append bytes without copying them, even if there are none."""
    head = header(tag, len(memory))
    out += (head, memory)
    return len(head) + len(memory)


def put_pieces(out: Parts, tag: int, memories: list[Memory]) -> int:
    """Append one field of bytes from several buffers, without copying them."""
    size = sum(map(len, memories))
    head = header(tag, size)
    out += (head, *memories)
    return len(head) + size


def put_text(out: Parts, tag: int, text: str) -> int:
    """Append text; empty text is omitted, since a missing field means empty."""
    if not text:
        return 0
    try:
        encoded = text.encode()
    except UnicodeEncodeError as exc:
        raise ValidationError(f"{text!r:.80} cannot be encoded as UTF-8: {exc.reason}") from exc
    part = header(tag, len(encoded)) + encoded
    out.append(part)
    return len(part)


def put_packed_ints(out: Parts, tag: int, numbers: list[int]) -> int:
    """Append a list of numbers; an empty one is omitted."""
    if not numbers:
        return 0
    return put_bytes(out, tag, b"".join(map(varint, numbers)))


def put_message(out: Parts, tag: int, write: Callable[[Parts, T], int], value: T) -> int:
    """Append a nested message, whose fields `write` appends."""
    place = len(out)
    out.append(b"")  # for the header, whose size is known after the message is encoded
    size = write(out, value)
    out[place] = head = header(tag, size)
    return len(head) + size


def put_map_entry(
    out: Parts, tag: int, key: str, write: Callable[[Parts, T], int], value: T
) -> int:
    """Append an entry of a map; `write` appends its value as field 2."""
    place = len(out)
    out.append(b"")
    size = put_text(out, _KEY_TAG, key) + write(out, value)
    out[place] = head = header(tag, size)
    return len(head) + size


_KEY_TAG = 0x0A


def merged(parts: Parts) -> Parts:
    """The body with adjacent small buffers joined, so that it takes few writes."""
    merged_parts: Parts = []
    run: Parts = []
    for part in parts:
        if len(part) < _SMALL_BYTES:
            run.append(part)
            continue
        if run:
            merged_parts.append(b"".join(run))
            run = []
        merged_parts.append(part)
    if run:
        merged_parts.append(b"".join(run))
    return merged_parts


# Decoding


class Reader:
    """A body and the remaining limits of its decoding."""

    __slots__ = ("_bytes_left", "_fields_left", "_given", "_limits", "_messages_left", "body")

    def __init__(self, body: Memory, limits: DecodeLimits) -> None:
        if len(body) > limits.memory_bytes:
            raise BodyTooLargeError(
                f"the body has {len(body)} bytes, the limit is {limits.memory_bytes}"
            )
        self._given = memoryview(body)
        # A read-only view: decoded values must not change later.
        self.body = self._given.toreadonly()
        self._limits = limits
        self._bytes_left = limits.memory_bytes
        self._messages_left = limits.messages
        self._fields_left = FIELDS_PER_MESSAGE * limits.messages

    def take_items(self, count: int) -> None:
        """Count messages; raises `BodyTooLargeError` beyond the limit."""
        self._messages_left -= count
        if self._messages_left < 0:
            raise BodyTooLargeError(
                f"a body of {len(self.body)} bytes has more than {self._limits.messages} messages; "
                "send it in parts"
            )
        self.take_bytes(count * ITEM_BYTES)

    def _take_fields(self, count: int) -> None:
        """Count fields, and numbers in lists; raises `BodyTooLargeError` beyond the limit."""
        self._fields_left -= count
        if self._fields_left < 0:
            most = FIELDS_PER_MESSAGE * self._limits.messages
            raise BodyTooLargeError(
                f"a body of {len(self.body)} bytes has more than {most} fields; send it in parts"
            )

    def take_bytes(self, count: int) -> None:
        """Count memory beyond that of the body, before it is allocated.

        Raises:
            BodyTooLargeError: It would be more than allowed.
        """
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise BodyTooLargeError(
                f"a body of {len(self.body)} bytes decodes to more than "
                f"{self._limits.memory_bytes} bytes"
            )

    def fields(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The fields of the message in the bytes `start` to `stop`.

        Each is its tag and two numbers: of a number its value and 0, of anything else where it
        lies. What a field means is for the caller; unknown ones are simply not taken.
        """
        body = self.body
        position = start
        while position < stop:
            self._take_fields(1)
            tag = body[position]
            position += 1
            if tag >= 0x80:
                tag, position = self._varint(position - 1, stop)
            if tag < 8:
                raise DecodeError("field number 0 is not allowed")
            wire_type = tag & 7
            if wire_type in _BEGIN_WITH_VARINT:
                number = body[position] if position < stop else 0x80
                position += 1
                if number >= 0x80:
                    number, position = self._varint(position - 1, stop)
                if wire_type == VARINT:
                    yield tag, number, 0
                    continue
                end = position + number
                if end > stop:
                    raise DecodeError(f"the field at byte {position} exceeds its message")
                yield tag, position, end
                position = end
            elif wire_type in (FIXED64, FIXED32):
                end = position + (8 if wire_type == FIXED64 else 4)
                if end > stop:
                    raise DecodeError(f"the number at byte {position} exceeds its message")
                yield tag, position, end
                position = end
            else:
                raise DecodeError(f"unknown wire type {wire_type} at byte {position - 1}")

    def _varint(self, position: int, stop: int) -> tuple[int, int]:
        body = self.body
        number = shift = 0
        while position < stop:
            byte = body[position]
            position += 1
            if byte < 0x80:
                return (number | byte << shift) % _UINT64, position
            number |= (byte & 0x7F) << shift
            shift += 7
            if shift == 70:
                raise DecodeError(f"the number before byte {position} has more than 64 bits")
        raise DecodeError(f"the message is truncated in a number, at byte {position}")

    def message(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Like `fields`, for a message that is decoded to an object, which is counted."""
        self.take_items(1)
        return self.fields(start, stop)

    def memory(self, start: int, stop: int) -> memoryview:
        """The bytes `start` to `stop`, sharing the body's memory."""
        return self.body[start:stop]

    def array(self, start: int, stop: int) -> memoryview:
        """Like `memory`, but writable if the body is, for arrays that the caller may change.

        Whoever holds such an array holds the whole body. So one that is a small part of the body
        is a read-only view all the same, and gets memory of its own when it is asked for.
        """
        is_small = (stop - start) * _MOST_HELD < len(self.body)
        return self.body[start:stop] if is_small else self._given[start:stop]

    def copied(self, start: int, stop: int) -> bytes:
        """A copy of the bytes `start` to `stop`."""
        self.take_bytes(stop - start)
        return bytes(self.body[start:stop])

    def text(self, start: int, stop: int) -> str:
        """The text in the bytes `start` to `stop`."""
        self.take_bytes(_TEXT_FACTOR * (stop - start))
        try:
            return str(self.body[start:stop], "utf-8")
        except UnicodeDecodeError as exc:
            raise DecodeError(f"text at byte {start + exc.start} is not UTF-8") from exc

    def double(self, start: int) -> float:
        """The floating-point number at `start`."""
        number: float = struct.unpack_from("<d", self.body, start)[0]
        return number

    def packed_ints(self, start: int, stop: int) -> list[int]:
        """The numbers of a packed list."""
        numbers = []
        while start < stop:
            self._take_fields(1)
            number, start = self._varint(start, stop)
            numbers.append(signed(number))
        return numbers


def signed(number: int) -> int:
    """Convert an unsigned 64-bit number to a signed one."""
    return number - _UINT64 if number >= _UINT64 >> 1 else number


def signed32(number: int) -> int:
    """Convert a number to a signed 32-bit one; higher bits are dropped, as in protobuf."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number
