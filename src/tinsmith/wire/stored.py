"""Commands and their results as the ledger keeps them: the wire's own bytes behind one letter.

A command is kept as it came, so that nothing is written anew on the way in: `J` and its JSON, or
`P` and its protobuf. A sample may come in two forms, alone or among others; it is kept as `K` and
its packed form, which takes the least to write and to read. A result is kept in the format that
current clients ask for, and is written in the other one for old ones.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from tinsmith.errors import DecodeError
from tinsmith.types.buffers import Memory
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.types.record import Frozen, Record
from tinsmith.types.requests import SampleRequest, SaveWeightsForSamplerRequest
from tinsmith.wire import json_format, packed_format
from tinsmith.wire.content import PACKED_TYPE
from tinsmith.wire.endpoint_types import Format, FutureResult
from tinsmith.wire.endpoints import ENDPOINTS, FUTURE_RESULTS
from tinsmith.wire.exchange import decode_body, encode_body, read_request
from tinsmith.wire.limits import DEFAULT_LIMITS, DecodeLimits

_LETTERS = {Format.JSON: b"J", Format.PROTOBUF: b"P"}
_FORMATS = {letter: format for format, letter in _LETTERS.items()}  # noqa: A001
_PACKED = b"K"


def stored_body(body: Memory, format: Format) -> bytes:  # noqa: A002
    """A command's payload, from the body that it came as."""
    return b"".join((_LETTERS[format], body))


def stored_request(request: Record | Frozen) -> bytes:
    """A command's payload for a request that did not come as a body of its own."""
    return b"".join((b"J", *json_format.encode_parts(request)))


def read_stored(kind: str, payload: Memory, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """The request that a command's payload holds; raises `DecodeError` if it holds none.

    Args:
        kind: The name of its endpoint.
        payload: What `stored_body`, `stored_request` or `stored_sample` made.
        limits: How much memory decoding may take.
    """
    body: Memory = memoryview(payload)[1:]
    content_type = PACKED_TYPE
    if bytes(payload[:1]) != _PACKED:
        format, body = _opened(payload)  # noqa: A001
        content_type = format.value
    return read_request(ENDPOINTS[kind], {}, {}, {"content-type": content_type}, body, limits)


def fingerprint(kind: str, request: Any, payload: Memory) -> bytes:
    """Equal for a command and its retries, and for no other command.

    A sample is told by what it says, whichever way it came. A save for a new sampler is retried
    under another number of that sampler, which is left out.
    """
    if isinstance(request, SaveWeightsForSamplerRequest):
        request = msgspec.structs.replace(request, sampling_session_seq_id=None)
        payload = stored_request(request)
    elif isinstance(request, SampleRequest):
        return stored_sample(request)[1]
    return _digest(kind, payload)


def stored_sample(request: SampleRequest) -> tuple[bytes, bytes]:
    """A sample's payload and fingerprint, for one writing of it."""
    payload = b"".join((_PACKED, *packed_format.encode(request).body()))
    return payload, _digest("asample", payload)


def _digest(kind: str, payload: Memory) -> bytes:
    digest = hashlib.blake2b(kind.encode() + b"\0", digest_size=32)
    digest.update(payload)
    return digest.digest()


def stored_result(kind: str, value: Record | Frozen) -> bytes:
    """What is kept of a result, in the format that current clients ask for."""
    format = result_format(kind)  # noqa: A001
    return b"".join((_LETTERS[format], *encode_body(value, format)))


def stored_failure(failure: RequestFailedResponse) -> bytes:
    """What is kept of a failure."""
    return b"".join((b"J", *json_format.encode_parts(failure)))


def result_body(kind: str, payload: Memory, format: Format) -> tuple[Format, Memory]:  # noqa: A002
    """A kept result as a reply's body, and which format it has: the one asked for if it may."""
    kept, body = _opened(payload)
    if kept is format or kept is Format.JSON:
        return kept, body
    value = decode_body(body, _result(kind).type, kept)
    return format, b"".join(encode_body(value, format))


def result_format(kind: str) -> Format:
    """The format in which current clients take a command's result."""
    return _result(kind).format


def read_result(kind: str, payload: Memory) -> Any:
    """A kept result as a value."""
    format, body = _opened(payload)  # noqa: A001
    return decode_body(body, _result(kind).type, format)


def read_failure(payload: Memory) -> RequestFailedResponse:
    """A kept failure."""
    failure: RequestFailedResponse = json_format.decode(_opened(payload)[1], RequestFailedResponse)
    return failure


def _result(kind: str) -> FutureResult:
    return FUTURE_RESULTS[ENDPOINTS[kind].result or ""]


def _opened(payload: Memory) -> tuple[Format, Memory]:
    letter = bytes(payload[:1])
    if letter not in _FORMATS:
        raise DecodeError(f"a kept payload begins with {letter!r}, which names no format")
    return _FORMATS[letter], memoryview(payload)[1:]
