"""Commands and results as the ledger stores them: one letter for the format, then the bytes.

A command is stored as it was received, without encoding it again: `J` and its JSON, or `P` and its
protobuf. A sample can arrive alone or in a batch; it is stored as `K` and its packed form, which is
the fastest to write and read. A result is stored in the format that current clients request, and
converted for old ones.
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
from tinsmith.wire.decode_limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.endpoint_types import Format, FutureResult
from tinsmith.wire.endpoints import ENDPOINTS, FUTURE_RESULTS
from tinsmith.wire.exchange import decode_body, encode_body, read_request

_LETTERS = {Format.JSON: b"J", Format.PROTOBUF: b"P"}
_FORMATS = {letter: format for format, letter in _LETTERS.items()}  # noqa: A001
_PACKED = b"K"


def stored_body(body: Memory, format: Format) -> bytes:  # noqa: A002
    """The payload of a command, from the body of its request."""
    return b"".join((_LETTERS[format], body))


def stored_request(request: Record | Frozen) -> bytes:
    """The payload of a command whose request had no body of its own."""
    return b"".join((b"J", *json_format.encode_parts(request)))


def read_stored(kind: str, payload: Memory, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """Decode the request in a command's payload; raises `DecodeError` if it is malformed.

    Args:
        kind: The name of the endpoint.
        payload: The result of `stored_body`, `stored_request` or `stored_sample`.
        limits: Limits of the decoder.
    """
    body: Memory = memoryview(payload)[1:]
    content_type = PACKED_TYPE
    if bytes(payload[:1]) != _PACKED:
        format, body = _opened(payload)  # noqa: A001
        content_type = format.value
    return read_request(ENDPOINTS[kind], {}, {}, {"content-type": content_type}, body, limits)


def fingerprint(kind: str, request: Any, payload: Memory) -> bytes:
    """A hash that is equal for a command and its retries only.

    For a sample it does not depend on the format it arrived in. A save for a new sampler omits the
    sampler's number, which changes when it is retried.
    """
    if isinstance(request, SaveWeightsForSamplerRequest):
        request = msgspec.structs.replace(request, sampling_session_seq_id=None)
        payload = stored_request(request)
    elif isinstance(request, SampleRequest):
        return stored_sample(request)[1]
    return _digest(kind, payload)


def stored_sample(request: SampleRequest) -> tuple[bytes, bytes]:
    """The payload and the fingerprint of a sample, encoded once."""
    payload = b"".join((_PACKED, *packed_format.encode(request).body()))
    return payload, _digest("asample", payload)


def _digest(kind: str, payload: Memory) -> bytes:
    digest = hashlib.blake2b(kind.encode() + b"\0", digest_size=32)
    digest.update(payload)
    return digest.digest()


def stored_result(kind: str, value: Record | Frozen) -> bytes:
    """The payload of a result, in the format that current clients request."""
    format = result_format(kind)  # noqa: A001
    return b"".join((_LETTERS[format], *encode_body(value, format)))


def stored_failure(failure: RequestFailedResponse) -> bytes:
    """The payload of a failure."""
    return b"".join((b"J", *json_format.encode_parts(failure)))


def result_body(kind: str, payload: Memory, format: Format) -> tuple[Format, Memory]:  # noqa: A002
    """The response body for a stored result, and its format: the requested one if possible."""
    kept, body = _opened(payload)
    if kept is format or kept is Format.JSON:
        return kept, body
    value = decode_body(body, _result(kind).type, kept)
    return format, b"".join(encode_body(value, format))


def result_format(kind: str) -> Format:
    """The format in which current clients request a command's result."""
    return _result(kind).format


def read_result(kind: str, payload: Memory) -> Any:
    """Decode a stored result."""
    format, body = _opened(payload)  # noqa: A001
    return decode_body(body, _result(kind).type, format)


def read_failure(payload: Memory) -> RequestFailedResponse:
    """Decode a stored failure."""
    failure: RequestFailedResponse = json_format.decode(_opened(payload)[1], RequestFailedResponse)
    return failure


def _result(kind: str) -> FutureResult:
    return FUTURE_RESULTS[ENDPOINTS[kind].result or ""]


def _opened(payload: Memory) -> tuple[Format, Memory]:
    letter = bytes(payload[:1])
    if letter not in _FORMATS:
        raise DecodeError(f"unknown format {letter!r} of a stored payload")
    return _FORMATS[letter], memoryview(payload)[1:]
