"""How much memory and time a decoder may take, said once and checked before they are taken.

Every decoder of this package takes a `DecodeLimits`. It refuses, with `BodyTooLargeError`, input
whose decoded form could exceed `memory_bytes`; what it counts is an upper bound worked out from
the bytes, so a hostile body is refused before anything is built from it. Time is bounded by a
count as well: an empty message is two bytes long, and takes as long to decode as one with a
thousand numbers in it.
"""

from __future__ import annotations

import msgspec

MIB = 1024 * 1024


class DecodeLimits(msgspec.Struct, frozen=True):
    """Bounds for one decoded body."""

    memory_bytes: int = 256 * MIB
    """The most that the decompressed body and what is built from it may take, each."""

    messages: int = 512 * 1024
    """The most protobuf messages, or JSON objects, that one body may hold; a few µs each."""

    event_bytes: int = 16 * MIB
    """The most that one server-sent event may hold."""


FIELDS_PER_MESSAGE = 4
"""The most protobuf fields that a body may have on average, in multiples of `messages`."""

DEFAULT_LIMITS = DecodeLimits()
