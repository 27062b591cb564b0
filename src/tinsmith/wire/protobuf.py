"""The protobuf wire format, as far as our messages need it, without copying what they carry.

Our messages are a few small numbers around large arrays. The protobuf library copies each array
into a message and again into the body; here an array's own memory becomes a part of the body, and
a decoded array is a view of the body it came in. `docs/dependencies.md` has the figures.

Knows the wire format and no message; `proto_format.py` knows the messages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

from tinsmith.errors import BodyTooLargeError, DecodeError, ValidationError
from tinsmith.types.buffers import Memory
from tinsmith.wire.limits import FIELDS_PER_MESSAGE, DecodeLimits

T = TypeVar("T")

Parts: TypeAlias = list[Memory]
"""A body in pieces, in order; the large ones are the arrays' own memory."""

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
_BEGIN_WITH_VARINT = (VARINT, LENGTH_DELIMITED)
ITEM_BYTES = 512
"""A generous bound on what one decoded message takes as Python objects, its arrays aside."""

_TEXT_FACTOR = 4
"""One character outside Latin-1 makes Python hold the whole string with four bytes a character."""
_MOST_HELD = 8
"""How many times its own size an array may keep in memory by sharing that of the body."""
_SMALL_BYTES = 4096
_UINT64 = 1 << 64
_ONE_BYTE = [bytes((number,)) for number in range(0x80)]


# Writing: each function adds to `out` and returns how many bytes it added.


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
    """What begins a field of `size` bytes."""
    if size < 0x80:
        return bytes((tag, size))
    if size < 0x4000:  # the varint, spelt out: nearly every message is one of these two
        return bytes((tag, size & 0x7F | 0x80, size >> 7))
    return bytes((tag,)) + varint(size)


def put_int(out: Parts, tag: int, number: int) -> int:
    """Add a number; one that is 0 is left out, as absent means 0."""
    if not number:
        return 0
    part = bytes((tag,)) + varint(number)
    out.append(part)
    return len(part)


def put_int32(out: Parts, tag: int, number: int, what: str, *, even_if_0: bool = False) -> int:
    """Add a number that must fit in 32 bits; 0 too if its presence says something."""
    if not -(1 << 31) <= number < 1 << 31:
        raise ValidationError(f"{what} is {number}, which does not fit in 32 bits")
    if number == 0 and even_if_0:
        out.append(bytes((tag, 0)))
        return 2
    return put_int(out, tag, number)


def put_double(out: Parts, tag: int, number: float) -> int:
    """Add a floating-point number, 0 as well."""
    part = bytes((tag,)) + struct.pack("<d", number)
    out.append(part)
    return len(part)


def put_bytes(out: Parts, tag: int, memory: Memory) -> int:
    """Add bytes, without copying them; also if there are none."""
    head = header(tag, len(memory))
    out += (head, memory)
    return len(head) + len(memory)


def put_pieces(out: Parts, tag: int, memories: list[Memory]) -> int:
    """Add one field of bytes that lie in several places, without copying them."""
    size = sum(map(len, memories))
    head = header(tag, size)
    out += (head, *memories)
    return len(head) + size


def put_text(out: Parts, tag: int, text: str) -> int:
    """Add text; empty text is left out, as absent means empty."""
    if not text:
        return 0
    try:
        encoded = text.encode()
    except UnicodeEncodeError as exc:
        raise ValidationError(f"{text!r:.80} is no text that can be sent: {exc.reason}") from exc
    part = header(tag, len(encoded)) + encoded
    out.append(part)
    return len(part)


def put_packed_ints(out: Parts, tag: int, numbers: list[int]) -> int:
    """Add a list of numbers; an empty one is left out."""
    if not numbers:
        return 0
    return put_bytes(out, tag, b"".join(map(varint, numbers)))


def put_message(out: Parts, tag: int, write: Callable[[Parts, T], int], value: T) -> int:
    """Add a nested message, which `write` adds to `out` in turn."""
    place = len(out)
    out.append(b"")  # the header holds the size, which is known once the message is written
    size = write(out, value)
    out[place] = head = header(tag, size)
    return len(head) + size


def put_map_entry(
    out: Parts, tag: int, key: str, write: Callable[[Parts, T], int], value: T
) -> int:
    """Add one entry of a map; `write` adds its value as field 2 of the entry."""
    place = len(out)
    out.append(b"")
    size = put_text(out, _KEY_TAG, key) + write(out, value)
    out[place] = head = header(tag, size)
    return len(head) + size


_KEY_TAG = 0x0A


def merged(parts: Parts) -> Parts:
    """The same body with neighbouring small parts joined, so that few writes send it."""
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


# Reading


class Reader:
    """A body being decoded, and how much memory and time may still be taken for it."""

    __slots__ = ("_bytes_left", "_fields_left", "_given", "_limits", "_messages_left", "body")

    def __init__(self, body: Memory, limits: DecodeLimits) -> None:
        if len(body) > limits.memory_bytes:
            raise BodyTooLargeError(
                f"the body has {len(body)} bytes, the limit is {limits.memory_bytes}"
            )
        self._given = memoryview(body)
        # A view of unchanging memory: what is decoded must not change under its holder.
        self.body = self._given.toreadonly()
        self._limits = limits
        self._bytes_left = limits.memory_bytes
        self._messages_left = limits.messages
        self._fields_left = FIELDS_PER_MESSAGE * limits.messages

    def take_items(self, count: int) -> None:
        """Count messages about to be made; raises as `take_bytes`."""
        self._messages_left -= count
        if self._messages_left < 0:
            raise BodyTooLargeError(
                f"a body of {len(self.body)} bytes has more than {self._limits.messages} messages; "
                "send it in parts"
            )
        self.take_bytes(count * ITEM_BYTES)

    def _take_fields(self, count: int) -> None:
        """Count fields, known or not, and numbers in lists; raises as `take_bytes`."""
        self._fields_left -= count
        if self._fields_left < 0:
            most = FIELDS_PER_MESSAGE * self._limits.messages
            raise BodyTooLargeError(
                f"a body of {len(self.body)} bytes has more than {most} fields; send it in parts"
            )

    def take_bytes(self, count: int) -> None:
        """Count memory about to be taken, beyond that of the body itself.

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
        """The fields of the message that lies in `start…stop`.

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
                    raise DecodeError(f"a field at byte {position} runs past its message's end")
                yield tag, position, end
                position = end
            elif wire_type in (FIXED64, FIXED32):
                end = position + (8 if wire_type == FIXED64 else 4)
                if end > stop:
                    raise DecodeError(f"a number at byte {position} runs past its message's end")
                yield tag, position, end
                position = end
            else:
                raise DecodeError(f"no field begins at byte {position - 1}: wire type {wire_type}")

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
                raise DecodeError(f"a number before byte {position} has more than 64 bits")
        raise DecodeError(f"the message ends inside a number, at byte {position}")

    def message(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """As `fields`, for a message that something is made of."""
        self.take_items(1)
        return self.fields(start, stop)

    def memory(self, start: int, stop: int) -> memoryview:
        """The bytes in `start…stop`, sharing the body's memory."""
        return self.body[start:stop]

    def array(self, start: int, stop: int) -> memoryview:
        """As `memory`, but writable where the body is: for arrays that are the reader's to change.

        Whoever holds such an array holds the whole body. So one that is a small part of the body
        is a read-only view all the same, and gets memory of its own when it is asked for.
        """
        is_small = (stop - start) * _MOST_HELD < len(self.body)
        return self.body[start:stop] if is_small else self._given[start:stop]

    def copied(self, start: int, stop: int) -> bytes:
        """The bytes in `start…stop`, in memory of their own."""
        self.take_bytes(stop - start)
        return bytes(self.body[start:stop])

    def text(self, start: int, stop: int) -> str:
        """The text in `start…stop`."""
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
    """A 64-bit number as the signed one it stands for."""
    return number - _UINT64 if number >= _UINT64 >> 1 else number


def signed32(number: int) -> int:
    """A number as the signed 32-bit one it stands for; higher bits are cut, as protobuf does."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number
