"""From a received body to a typed request: decompressed, then decoded, each once.

Small bodies are handled on the event loop, large ones on a thread, so that others are answered
meanwhile. A few bytes may decompress to very many, so what the loop handles is bounded by the
decompressed size and by the number of messages; what exceeds that goes to a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from tinsmith.errors import BadRequestError, BodyTooLargeError, without_frames
from tinsmith.service.api.api_settings import ApiSettings
from tinsmith.service.api.incoming import IncomingRequest
from tinsmith.types.buffers import Memory
from tinsmith.wire.content import decompress, is_protobuf
from tinsmith.wire.decode_limits import DecodeLimits
from tinsmith.wire.endpoint_types import Endpoint, Format
from tinsmith.wire.exchange import read_request
from tinsmith.wire.json_format import text_limits

_log = logging.getLogger(__name__)

T = TypeVar("T")

ON_THREAD_BYTES = 512 * 1024
"""Bodies of this size and above are handled on a thread."""
_MESSAGES_PER_DATUM = 64
"""On average, in the largest request: two for each chunk of its input and two for each tensor."""
_LOOP_MESSAGES = 16 * 1024
"""The most messages that are decoded on the event loop, in however few bytes."""
_LOOP_LIMITS = DecodeLimits(memory_bytes=ON_THREAD_BYTES)
_MAX_ON_THREADS = 4
"""Large bodies at a time: how large one becomes is not known before it is decompressed."""
_MAX_QUERY_FIELDS = 64
_MAX_LOGGED_FIELDS = 1000


class RequestDecoder:
    """Decompresses and decodes requests. For one event loop."""

    def __init__(self, settings: ApiSettings) -> None:
        self._limits = DecodeLimits(
            memory_bytes=settings.decoded_bytes,
            messages=_MESSAGES_PER_DATUM * settings.most_datums,
        )
        self._loop_limits = msgspec.structs.replace(self._limits, messages=_LOOP_MESSAGES)
        self._threads = asyncio.Semaphore(_MAX_ON_THREADS)
        self._logged_fields: set[tuple[str, str]] = set()

    async def decompress(self, incoming: IncomingRequest, raw: Memory) -> Memory:
        """The body without its content encoding, charged with its size if it is large.

        Raises:
            BodyTooLargeError: It becomes larger than allowed.
            RateLimitError: Bodies take too much memory at the moment.
            DecodeError: It is not what its encoding says.
        """
        encoding = incoming.headers.get("content-encoding")
        if len(raw) < ON_THREAD_BYTES:
            with contextlib.suppress(BodyTooLargeError):
                return decompress(raw, encoding, _LOOP_LIMITS)
        body = raw
        if encoding:
            is_json = body_format(incoming.headers) is Format.JSON
            limits = text_limits(self._limits) if is_json else self._limits
            async with self._threads:
                body = await run_on_thread(functools.partial(decompress, raw, encoding, limits))
        incoming.hold_body(len(body))
        return body

    async def decode(
        self, endpoint: Endpoint, fields: dict[str, str], incoming: IncomingRequest, body: Memory
    ) -> Any:
        """The request, of the endpoint's type.

        Raises:
            TinkerError: It cannot be decoded, or becomes too large.
        """
        decode = functools.partial(
            read_request,
            endpoint,
            fields,
            _query(incoming.query),
            incoming.headers,
            body,
            on_unknown=lambda names: self._log_unknown(endpoint, names),
        )
        if len(body) < ON_THREAD_BYTES:
            with contextlib.suppress(BodyTooLargeError):
                return decode(self._loop_limits)
        async with self._threads:
            return await run_on_thread(functools.partial(decode, self._limits))

    def _log_unknown(self, endpoint: Endpoint, names: set[str]) -> None:
        """Log an unknown field once: a newer client may mean something by it."""
        for name in sorted(names):
            key = (endpoint.name, name[:80])
            if key not in self._logged_fields and len(self._logged_fields) < _MAX_LOGGED_FIELDS:
                self._logged_fields.add(key)
                _log.info("%s: ignoring the unknown request field %r", *key)


def body_format(headers: Mapping[str, str]) -> Format:
    """The format that a request's body is in."""
    return Format.PROTOBUF if is_protobuf(headers.get("content-type")) else Format.JSON


async def run_on_thread(work: Callable[[], T]) -> T:
    """Run work on a thread that keeps no reference to it once this returns or raises.

    A pool's thread keeps its last arguments and result until its next job. The request may be
    answered by then, and its body would still be in memory.
    """
    given = [work]
    values: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            values.append(given.pop()())
        except Exception as exc:  # noqa: BLE001 - raised below
            errors.append(without_frames(exc))

    await asyncio.to_thread(run)
    if errors:
        raise errors.pop()
    return values.pop()


def _query(text: str) -> dict[str, str]:
    if not text:
        return {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError as exc:
        raise BadRequestError(f"the query has more than {_MAX_QUERY_FIELDS} fields") from exc
    return dict(pairs)
