"""The JSON format. None is omitted; every other value is written (S26).

A body is a list of buffers: the text of a long array has its own, so that it is not copied. Arrays
are encoded block by block, with orjson directly from their memory if orjson and numpy are
installed.

JSON has no NaN and no infinities. In arrays and logprobs an infinity becomes the largest float32 of
its sign. A NaN is null in prompt logprobs, omitted from metrics, and an error in any other array.
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
from tinsmith.wire.decode_limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.protobuf import Parts

T = TypeVar("T")

_VALUE_BYTES = 96
"""An upper bound on the size of one JSON value as a Python object, without its text."""
_TEXT_FACTOR = 4
"""Python stores a string with four bytes per character if one of them needs it."""
_LONG_ARRAY = 4096
_SMALLEST_BLOCK = 192
_MARK = b"\0"  # not in any JSON text: in strings it is escaped
_SET_ASIDE = msgspec.Raw(_MARK)
_MARKS_OF_OTHERS = (b"e", b"l", b".", b"-", b'"', b"{")  # e: true, false, 1e9; l: null
_SMALLEST_OBJECT = 2
_SLICE_BYTES = 32 * 1024
_MOST_PER_BYTE = _TEXT_FACTOR + _VALUE_BYTES // 2
"""The largest decoded size per byte of a body: a value takes at least two bytes of text."""


def encode(value: Record | Frozen | dict[str, Any]) -> bytes:
    """Encode a value."""
    return b"".join(encode_parts(value))


def encode_parts(value: Record | Frozen | dict[str, Any]) -> Parts:
    """Encode a value as a list of buffers, which are sent without joining them."""
    writer = BodyWriter()
    return writer.parts(to_plain(value, write_array=writer.write_array))


class BodyWriter:
    """Encodes one body; long arrays are encoded separately from the rest."""

    def __init__(self) -> None:
        self._texts: list[Parts] = []

    def write_array(self, numbers: Numbers) -> Any:
        """The placeholder of an array in plain data, for `to_plain`."""
        if len(numbers) < _LONG_ARRAY:
            return _written(numbers)
        self._texts.append(array_text(numbers))
        return _SET_ASIDE

    def parts(self, plain: Any) -> Parts:
        """The body, for plain data that was created with `write_array`."""
        if isinstance(plain, dict) and isinstance(plain.get("metrics"), dict):
            plain["metrics"] = finite_metrics(plain["metrics"])
        try:
            text = msgspec.json.encode(plain, enc_hook=foreign_to_plain)
        except UnicodeEncodeError as exc:
            raise ValidationError(f"{shown(exc.object)} cannot be encoded as UTF-8") from exc
        if not self._texts:
            return [text]
        first, *rest = text.split(_MARK)
        parts: Parts = [first]
        for array, after in zip(self._texts, rest, strict=True):
            parts += [*array, after]
        return parts


def decode(body: Memory | str, as_type: type[T], limits: DecodeLimits = DEFAULT_LIMITS) -> T:
    """Decode a JSON body. Unknown fields are ignored.

    Raises:
        BodyTooLargeError: It could take more memory than `limits` allows.
        DecodeError: It is not JSON, or not of this type; the message names the place.
    """
    _check_size(body, limits)
    try:
        value: T = _decoder(as_type).decode(body)  # type: ignore[arg-type]  # types are hashable
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
        name = getattr(as_type, "__name__", str(as_type))  # a union has no name
        raise DecodeError(f"not a valid {name}: {exc}") from exc
    return value


def decode_any(body: Memory | str, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """Decode any JSON body to dicts and lists; raises the errors of `decode`."""
    _check_size(body, limits)
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
        raise DecodeError(f"not valid JSON: {exc}") from exc


def text_limits(limits: DecodeLimits) -> DecodeLimits:
    """The longest text that could be within `limits`; longer ones are refused unread."""
    return msgspec.structs.replace(limits, memory_bytes=limits.memory_bytes // _TEXT_FACTOR)


def finite_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics for JSON: without NaN, and infinities as the largest double."""
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
    """Refuse a body that could be too large when decoded, estimated from its punctuation."""
    needed = _TEXT_FACTOR * len(body)
    if needed <= limits.memory_bytes:  # the common case: no need to count
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
    """How many of its characters are in `marks`."""
    if isinstance(body, str):
        return sum(map(body.count, marks.decode()))
    if isinstance(body, bytes):
        return sum(map(body.count, marks))
    # A memoryview has no count(); it is copied slice by slice.
    slices = (bytes(body[at : at + _SLICE_BYTES]) for at in range(0, len(body), _SLICE_BYTES))
    return sum(piece.count(mark) for piece in slices for mark in marks)


@functools.cache
def array_writer() -> Callable[[Numbers], Any]:
    """The function that encodes arrays: with orjson and numpy if installed, else as lists."""
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
    """Token ids as JSON text; None if one of them is negative or not a plain int.

    Args:
        values: What was packed as integers without an error.
    """
    try:
        text = msgspec.json.encode(values)
    except (TypeError, ValueError, OverflowError):  # such as a number of an array library
        return None
    # Every other JSON value contains one of these characters. Searching for them takes a tenth of
    # the time of encoding; checking the values would take longer than encoding.
    is_plain = not any(mark in text for mark in _MARKS_OF_OTHERS) and text.rfind(b"[") == 0
    return text if is_plain else None


def numbers_text(numbers: Numbers) -> Parts:
    """An array as JSON text, in several buffers if it is long."""
    return [_text(numbers)] if len(numbers) < _LONG_ARRAY else array_text(numbers)


def array_text(numbers: Numbers) -> Parts:
    """A long array as JSON text, block by block, so that it is never one large list.

    Writing a block takes up to eight times its text for a moment: orjson alone sets aside five
    times what it writes. So each block is an eighth of what is still to come, and the whole never
    takes more than its text.
    """
    parts: Parts = []
    view, is_list = numbers.view(), numbers.kind != "float32" and "numpy" not in sys.modules
    start, count = 0, len(view)
    while start < count:
        stop = min(count, start + max(_SMALLEST_BLOCK, (count - start) // 8))
        if is_list:  # like `_text`
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
    # Importing numpy takes 0.1 s and 16 MB, and saves half a millisecond per array of 32,768.
    return array_writer()(numbers) if "numpy" in sys.modules else _write_list(numbers)


def _write_list(numbers: Numbers) -> list[Any]:
    values = numbers.tolist()
    # A sum is finite only if all numbers are.
    if numbers.kind != "float32" or math.isfinite(sum(values)):
        return values
    return [finite(value) for value in values]
