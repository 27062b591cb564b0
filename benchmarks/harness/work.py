"""What a workload hands to the worker: something to run, and what was there before it ran.

Imported in every contestant's environment, so it needs nothing but the standard library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Work(NamedTuple):
    """A prepared workload."""

    run: Callable[[], Any]
    """One repetition. What it returns is what its caller would go on to hold."""

    inputs: Any
    """What the caller holds before: lists, arrays or a body."""

    payload_bytes: Callable[[Any], int]
    """From what `run` returned to the size of the body that was made or read."""


def held_bytes(value: Any) -> int:
    """What a caller's inputs take in memory: lists with their numbers, arrays, bodies."""
    if hasattr(value, "nbytes"):  # a numpy array or a memoryview
        return int(value.nbytes)
    if not isinstance(value, list | tuple):
        return sys.getsizeof(value)
    are_numbers = bool(value) and isinstance(value[0], int | float)
    return sys.getsizeof(value) + sum(map(sys.getsizeof if are_numbers else held_bytes, value))
