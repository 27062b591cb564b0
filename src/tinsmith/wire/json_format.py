"""Types to JSON and back.

What is written follows one rule (S26): None is left out, every other value is written.

A body is made in parts: the text of a long array stands in parts of its own, so that it is not
copied into the rest. It is written a block at a time, by orjson from the array's memory where
orjson and numpy are installed.

JSON has no NaN and no infinity. In arrays and logprobs an infinite number is written as the
largest float32 of its sign; a NaN is null in prompt logprobs, left out of metrics, and an error in
any other array.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from tinsmith.errors import BodyTooLargeError, DecodeError, ValidationError, shown
from tinsmith.types.buffers import Memory, Numbers, finite
from tinsmith.types.record import (
    Frozen,
    Record,
    convert_custom,
    foreign_to_plain,
    to_plain,
)
from tinsmith.wire.limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.protobuf import Parts

T = TypeVar("T")

_VALUE_BYTES = 96
"""A bound on what one JSON value takes as a Python object, its text aside."""
_TEXT_FACTOR = 4
"""One character outside Latin-1 makes Python hold the whole string with four bytes a character."""
_LONG_ARRAY = 4096
_SMALLEST_BLOCK = 192
_MARK = b"\0"  # stands in no JSON text: inside a string it would be escaped
_SET_ASIDE = msgspec.Raw(_MARK)
_MARKS_OF_OTHERS = (b"e", b"l", b".", b"-", b'"', b"{")  # e: true, false, 1e9; l: null
_SMALLEST_OBJECT = 2
_SLICE_BYTES = 32 * 1024
_MOST_PER_BYTE = _TEXT_FACTOR + _VALUE_BYTES // 2
"""No body decodes to more than this for each of its bytes: a value takes at least two."""


def encode(value: Record | Frozen | dict[str, Any]) -> bytes:
    """The JSON body that stands for `value`."""
    return b"".join(encode_parts(value))


def encode_parts(value: Record | Frozen | dict[str, Any]) -> Parts:
    """The JSON body that stands for `value`, in parts that need not be joined to be sent."""
    writer = BodyWriter()
    return writer.parts(to_plain(value, write_array=writer.write_array))


class BodyWriter:
    """Makes one body: long arrays are set aside while the rest is encoded."""

    def __init__(self) -> None:
        self._texts: list[Parts] = []

    def write_array(self, numbers: Numbers) -> Any:
        """What stands for an array in plain data, for `to_plain`."""
        if len(numbers) < _LONG_ARRAY:
            return _written(numbers)
        self._texts.append(array_text(numbers))
        return _SET_ASIDE

    def parts(self, plain: Any) -> Parts:
        """The body, from plain data that was made with `write_array`."""
        if isinstance(plain, dict) and isinstance(plain.get("metrics"), dict):
            plain["metrics"] = finite_metrics(plain["metrics"])
        try:
            text = msgspec.json.encode(plain, enc_hook=foreign_to_plain)
        except UnicodeEncodeError as exc:
            raise ValidationError(f"{shown(exc.object)} is no text that can be sent") from exc
        if not self._texts:
            return [text]
        first, *rest = text.split(_MARK)
        parts: Parts = [first]
        for array, after in zip(self._texts, rest, strict=True):
            parts += [*array, after]
        return parts


def decode(body: Memory | str, as_type: type[T], limits: DecodeLimits = DEFAULT_LIMITS) -> T:
    """Read a JSON body. Fields that the type does not know are ignored.

    Raises:
        BodyTooLargeError: It could take more memory than `limits` allows.
        DecodeError: It is not JSON, or not of this type; the message names the place.
    """
    _check_size(body, limits)
    try:
        value: T = _decoder(as_type).decode(body)  # type: ignore[arg-type]  # types are hashable
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
        name = getattr(as_type, "__name__", str(as_type))  # a union has no name of its own
        raise DecodeError(f"not a valid {name}: {exc}") from exc
    return value


def decode_any(body: Memory | str, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """Read a JSON body of unknown shape into dicts and lists; raises as `decode`."""
    _check_size(body, limits)
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
        raise DecodeError(f"not valid JSON: {exc}") from exc


def text_limits(limits: DecodeLimits) -> DecodeLimits:
    """As `limits`, for the text of a body: one that is longer is refused without a look into it."""
    return msgspec.structs.replace(limits, memory_bytes=limits.memory_bytes // _TEXT_FACTOR)


def finite_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that JSON can hold: without NaN, infinities cut to the largest double."""
    largest = 1.7976931348623157e308
    return {
        name: max(-largest, min(largest, value))
        for name, value in metrics.items()
        if not math.isnan(value)
    }


@functools.cache
def _decoder(as_type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(as_type, dec_hook=convert_custom)


def _check_size(body: Memory | str, limits: DecodeLimits) -> None:
    """Refuse a body by what it could become, counted from the marks between its values."""
    needed = _TEXT_FACTOR * len(body)
    if needed <= limits.memory_bytes:  # else there is no need to look into it
        if len(body) > _SMALLEST_OBJECT * limits.messages:
            _check_objects(_count(body, b"{"), limits)
        if len(body) * _MOST_PER_BYTE <= limits.memory_bytes:
            return
        needed += _VALUE_BYTES * _count(body, b",:[{")
    if needed > limits.memory_bytes:
        raise BodyTooLargeError(
            f"a JSON body of {len(body)} bytes could take {needed} bytes or more; "
            f"the limit is {limits.memory_bytes}"
        )


def _check_objects(count: int, limits: DecodeLimits) -> None:
    if count > limits.messages:
        raise BodyTooLargeError(
            f"a JSON body has {count} objects, the limit is {limits.messages}; send it in parts"
        )


def _count(body: Memory | str, marks: bytes) -> int:
    """How many of its characters are one of the marks."""
    if isinstance(body, str):
        return sum(map(body.count, marks.decode()))
    if isinstance(body, bytes):
        return sum(map(body.count, marks))
    # A memoryview cannot count; one slice of it at a time is copied.
    slices = (bytes(body[at : at + _SLICE_BYTES]) for at in range(0, len(body), _SLICE_BYTES))
    return sum(piece.count(mark) for piece in slices for mark in marks)


@functools.cache
def array_writer() -> Callable[[Numbers], Any]:
    """What writes arrays into JSON on this machine; see the top of the module."""
    try:
        import numpy
        import orjson
    except ImportError:
        return _write_list

    def write_raw(numbers: Numbers) -> Any:
        array = numpy.frombuffer(numbers.memory, dtype=numbers.kind)
        if numbers.kind == "float32" and not numpy.isfinite(array).all():
            return _write_list(numbers)
        return msgspec.Raw(orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY))

    return write_raw


def ids_text(values: Sequence[Any]) -> bytes | None:
    """Token ids as JSON text; None if one of them is no plain int, or negative.

    Args:
        values: What was packed as integers without an error.
    """
    try:
        text = msgspec.json.encode(values)
    except (TypeError, ValueError, OverflowError):  # an array's own number, say
        return None
    # By JSON's grammar every other value has one of these in it. To look for them takes a tenth of
    # the writing, to look at the values themselves more than all of it.
    is_plain = not any(mark in text for mark in _MARKS_OF_OTHERS) and text.rfind(b"[") == 0
    return text if is_plain else None


def numbers_text(numbers: Numbers) -> Parts:
    """An array as JSON text, in parts if it is long."""
    return [_text(numbers)] if len(numbers) < _LONG_ARRAY else array_text(numbers)


def array_text(numbers: Numbers) -> Parts:
    """A long array as JSON text, a block at a time, so that never a list of it all is made.

    Writing a block takes up to eight times its text for a moment: orjson alone sets aside five
    times what it writes. So each block is an eighth of what is still to come, and the whole never
    takes more than its text.
    """
    parts: Parts = []
    view, is_list = numbers.view(), numbers.kind != "float32" and "numpy" not in sys.modules
    start, count = 0, len(view)
    while start < count:
        stop = min(count, start + max(_SMALLEST_BLOCK, (count - start) // 8))
        if is_list:  # as `_text` does in the end
            text = msgspec.json.encode(view[start:stop].tolist())
        else:
            text = _text(numbers.slice(start, stop))
        parts.append(b"".join((b"," if parts else b"[", memoryview(text)[1:-1])))
        start = stop
    return [*parts, b"]"]


def _text(numbers: Numbers) -> bytes:
    written = _written(numbers)
    return bytes(written) if isinstance(written, msgspec.Raw) else msgspec.json.encode(written)


def _written(numbers: Numbers) -> Any:
    # To load numpy takes 0.1 s and 16 MB; it saves half a millisecond on an array of 32,768.
    return array_writer()(numbers) if "numpy" in sys.modules else _write_list(numbers)


def _write_list(numbers: Numbers) -> list[Any]:
    values = numbers.tolist()
    # A sum is finite only if each number is.
    if numbers.kind != "float32" or math.isfinite(sum(values)):
        return values
    return [finite(value) for value in values]
