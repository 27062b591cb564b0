"""Limits on the memory and time of decoding one body.

Every decoder of this package takes a `DecodeLimits` and raises `BodyTooLargeError` for input whose
decoded form could exceed `memory_bytes`. It computes an upper bound from the bytes, so a hostile
body is refused before anything is allocated for it. The number of messages is limited too, because
an empty message of two bytes takes as long to decode as one with a thousand numbers.
"""

from __future__ import annotations

import msgspec

MIB = 1024 * 1024


class DecodeLimits(msgspec.Struct, frozen=True):
    """Limits for one body."""

    memory_bytes: int = 256 * MIB
    """The largest size of the decompressed body, and of the values decoded from it."""

    messages: int = 512 * 1024
    """The largest number of protobuf messages or JSON objects; a few µs each."""

    event_bytes: int = 16 * MIB
    """The largest size of one server-sent event."""


FIELDS_PER_MESSAGE = 4
"""The largest number of protobuf fields of a body, as a multiple of `messages`."""

DEFAULT_LIMITS = DecodeLimits()
