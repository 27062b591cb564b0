"""Types to JSON and back.

What is written follows one rule (S26): None is left out, every other value is written. Arrays go
from memory to text without a Python list in between where orjson and numpy are installed, and
through one list where they are not.

JSON has no NaN and no infinity. In arrays and logprobs an infinite number is written as the
largest float32 of its sign; a NaN is an error in an array, null in prompt logprobs, and left out
of metrics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from tinsmith.errors import BodyTooLargeError, DecodeError, ValidationError
from tinsmith.types.buffers import Memory, Numbers
from tinsmith.types.record import (
    Frozen,
    Record,
    convert_custom,
    foreign_to_plain,
    to_plain,
)
from tinsmith.wire.limits import DEFAULT_LIMITS, DecodeLimits

T = TypeVar("T")

FLOAT32_MAX = 3.4028234663852886e38
_VALUE_BYTES = 96
"""A bound on what one JSON value takes as a Python object, its text aside."""
_TEXT_FACTOR = 4
"""One character outside Latin-1 makes Python hold the whole string with four bytes a character."""
_MOST_PER_BYTE = _TEXT_FACTOR + _VALUE_BYTES // 2
"""No body decodes to more than this for each of its bytes: a value takes at least two."""


def encode(value: Record | Frozen | dict[str, Any]) -> bytes:
    """The JSON body that stands for `value`."""
    plain = to_plain(value, write_array=array_writer())
    if isinstance(plain, dict) and isinstance(plain.get("metrics"), dict):
        plain["metrics"] = finite_metrics(plain["metrics"])
    return msgspec.json.encode(plain, enc_hook=foreign_to_plain)


def decode(body: Memory | str, as_type: type[T], limits: DecodeLimits = DEFAULT_LIMITS) -> T:
    """Read a JSON body. Fields that the type does not know are ignored.

    Raises:
        BodyTooLargeError: It could take more memory than `limits` allows.
        DecodeError: It is not JSON, or not of this type; the message names the place.
    """
    _check_size(body, limits)
    try:
        value: T = _decoder(as_type).decode(body)  # type: ignore[arg-type]  # types are hashable
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise DecodeError(f"not a valid {as_type.__name__}: {exc}") from exc
    return value


def decode_any(body: Memory | str, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """Read a JSON body of unknown shape into dicts and lists; raises as `decode`."""
    _check_size(body, limits)
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as exc:
        raise DecodeError(f"not valid JSON: {exc}") from exc


def unknown_fields(body: Memory, as_type: type[Record]) -> list[str]:
    """The top-level keys of a body that the type does not know; for a log line, so never raises."""
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return []
    known = {*as_type.__struct_fields__, as_type.__struct_config__.tag_field}
    return [name for name in given if name not in known]


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
    if len(body) * _MOST_PER_BYTE <= limits.memory_bytes:
        return
    text = body.encode() if isinstance(body, str) else bytes(body)
    marks = sum(text.count(mark) for mark in (b",", b":", b"[", b"{"))
    needed = _TEXT_FACTOR * len(text) + _VALUE_BYTES * marks
    if needed > limits.memory_bytes:
        raise BodyTooLargeError(
            f"a JSON body of {len(text)} bytes and {marks} values could take {needed} bytes; "
            f"the limit is {limits.memory_bytes}"
        )


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


def _write_list(numbers: Numbers) -> list[Any]:
    values = numbers.tolist()
    # A sum is finite only if each number is.
    if numbers.kind != "float32" or math.isfinite(sum(values)):
        return values
    if any(map(math.isnan, values)):
        raise ValidationError(
            "an array holds NaN, which JSON cannot hold", remedy="ask for protobuf instead"
        )
    return [json_number(value) for value in values]


def json_number(value: float) -> float:
    """The number, or the largest float32 of its sign where it is infinite."""
    return max(-FLOAT32_MAX, min(FLOAT32_MAX, value))
