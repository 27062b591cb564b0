"""CPU and wall time of a call, repeated for long enough to be measured.

The garbage collector is on, as in a user's program: collections that a call causes are part of
what it costs. What imports and set-up made is kept from it (`gc.freeze`), so that a collection
costs what the call's own objects cost, however much else is loaded.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_MOST_REPETITIONS = 1_000_000
_LARGE_BLOCK_BYTES = 31 << 20


class Times(NamedTuple):
    """Of one repetition, in seconds."""

    cpu_s: float
    wall_s: float


def settle() -> None:
    """Bring the process into the state of a program that has run for a while."""
    gc.collect()
    gc.freeze()
    # glibc gives memory back to the system after each use until it has once seen a large block
    # freed. Whoever frees large blocks by chance would be spared the page faults of the others.
    _ = bytes(_LARGE_BLOCK_BYTES)


def calibrate(run: Callable[[], Any], batch_s: float) -> int:
    """How many repetitions take about `batch_s` seconds of CPU time."""
    repetitions = 1
    while True:
        taken_s = batch(run, repetitions).cpu_s * repetitions
        if taken_s >= batch_s / 2 or repetitions >= _MOST_REPETITIONS:
            return max(1, round(repetitions * batch_s / max(taken_s, 1e-9)))
        # From a short trial the aim is overshot, so approach it in steps.
        repetitions *= min(10, max(2, int(batch_s / 2 / max(taken_s, 1e-9))))


def batch(run: Callable[[], Any], repetitions: int) -> Times:
    """One batch of repetitions."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repetitions):
        run()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Times(cpu / repetitions, wall / repetitions)
