"""How much memory a decoder may take, said once and checked before the memory is taken.

Every decoder of this package takes a `DecodeLimits`. It refuses, with `BodyTooLargeError`, input
whose decoded form could exceed `memory_bytes`; what it counts is an upper bound worked out from
the bytes, so a hostile body is refused before anything is built from it.
"""

from __future__ import annotations

import msgspec

MIB = 1024 * 1024


class DecodeLimits(msgspec.Struct, frozen=True):
    """Bounds for one decoded body."""

    memory_bytes: int = 256 * MIB
    """The most that the decompressed body and what is built from it may take, each."""

    event_bytes: int = 16 * MIB
    """The most that one server-sent event may hold."""


DEFAULT_LIMITS = DecodeLimits()
