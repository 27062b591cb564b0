"""The least that Python itself needs for what a user asks for: a yardstick, and nobody's product.

Nothing is decoded, named or checked here: the numbers lie in memory already, and are made into
Python objects by the fastest ways that the standard library has.
"""

from __future__ import annotations

import struct
from typing import Any

from benchmarks.harness.work import Work
from benchmarks.workloads import data


def topk_read(tokens: int, k: int) -> Work:
    """Each cell once, and no rows at all: two flat lists of numbers and a loop over both."""
    ids, logprobs = _matrices(tokens, k)

    def run() -> float:
        total = 0.0
        tokens, values = memoryview(ids).cast("i").tolist(), memoryview(logprobs).cast("f").tolist()
        for token, logprob in zip(tokens, values, strict=True):
            total += token * logprob
        return total

    return Work(run, [ids, logprobs], lambda _: len(ids) + len(logprobs))


def topk_lists(tokens: int, k: int) -> Work:
    """A list of rows of pairs."""
    ids, logprobs = _matrices(tokens, k)

    def run() -> Any:
        id_rows = struct.iter_unpack(f"{k}i", ids)
        logprob_rows = struct.iter_unpack(f"{k}f", logprobs)
        return list(map(list, map(zip, id_rows, logprob_rows)))

    return Work(run, [ids, logprobs], lambda _: len(ids) + len(logprobs))


def _matrices(tokens: int, k: int) -> tuple[bytes, bytes]:
    ids, logprobs = data.answer(tokens * k)
    return struct.pack(f"{len(ids)}i", *ids), struct.pack(f"{len(logprobs)}f", *logprobs)
