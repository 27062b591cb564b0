"""How a model's calls become requests: their order, their sequence ids, and chunks.

A call takes a **ticket** when it is made, on the caller's thread: calls are sent in the order in
which they were made. It takes its **sequence ids** when it is first in the queue, just before it is
sent: a call that is cancelled while it waits has none, so that none is missing on the wire. The
next call is first as soon as the service has acknowledged this one, or it has failed; results are
awaited separately.

A ticket may also be taken for a call that is not ready yet, such as the second half of a custom
loss: later calls wait for it.

`split` divides a training call into several requests, and `join` joins their results. A call with
more data than the server takes at once is split into chunks; losses are sums, so the gradients add
up to the same.

Metrics are named `name:reduction`. A metric is kept if every chunk has it. One without a reduction,
or with several colons and an unknown reduction, is averaged; one with a single colon and an unknown
reduction is dropped, as in the official SDK.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from tinsmith.client.waits import say
from tinsmith.types.inputs import Datum, DmelChunk, EncodedTextChunk, ImageChunk, ModelInputChunk
from tinsmith.types.training import ForwardBackwardOutput

if TYPE_CHECKING:
    from fractions import Fraction


FIRST_SEQ_ID = 1
"""0 is the creation of the model."""


class Ticket:
    """A call's position in its queue."""

    __slots__ = ("_queue", "position")

    def __init__(self, queue: DispatchQueue, position: int) -> None:
        self._queue = queue
        self.position = position

    @contextlib.asynccontextmanager
    async def first(self) -> AsyncIterator[DispatchQueue]:
        """Wait until this call is the first in the queue; leave it when the block ends."""
        try:
            await self._queue.wait_until_first(self.position)
            yield self._queue
        finally:
            self.leave()

    def leave(self) -> None:
        """Give the position up, so that later calls do not wait for it. On the event loop."""
        self._queue.leave(self.position)


class DispatchQueue:
    """The calls of one model that have not been sent yet.

    Tickets are taken on any thread; all the rest happens on one event loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_position = 0
        self._first = 0
        self._left: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._next_seq_id = FIRST_SEQ_ID

    def take_ticket(self) -> Ticket:
        """The next position; call it on the thread and at the moment whose order counts."""
        return self.take_tickets(1)[0]

    def take_tickets(self, count: int) -> list[Ticket]:
        """Consecutive positions."""
        with self._lock:
            first = self._next_position
            self._next_position += count
        return [Ticket(self, first + index) for index in range(count)]

    async def wait_until_first(self, position: int) -> None:
        """Return when all calls before this position have left the queue."""
        if self._first == position:
            return
        ahead = position - self._first
        say(f"queued behind {ahead} call{'s' if ahead > 1 else ''}")
        is_first = self._waiting[position] = asyncio.get_running_loop().create_future()
        try:
            await is_first
        finally:
            self._waiting.pop(position, None)
        say("")

    def leave(self, position: int) -> None:
        """Take a call out of the queue and wake the next. Doing it again changes nothing."""
        if position < self._first:
            return
        self._left.add(position)
        while self._first in self._left:
            self._left.discard(self._first)
            self._first += 1
        is_first = self._waiting.get(self._first)
        if is_first is not None and not is_first.done():
            is_first.set_result(None)

    def take_seq_ids(self, count: int) -> range:
        """The model's next sequence ids, without a gap; for the call that is first."""
        first = self._next_seq_id
        self._next_seq_id += count
        return range(first, self._next_seq_id)

    def return_seq_ids(self, first: int) -> None:
        """Have the ids from `first` on given out again; for the call that is first."""
        self._next_seq_id = first

    @property
    def length(self) -> int:
        """How many calls have not left."""
        return self._next_position - self._first - len(self._left)


_log = logging.getLogger(__name__)

_TOKEN_BYTES = 4

Reduction = Callable[[Sequence[float], Sequence[int]], float]


def split(data: Sequence[Datum], *, max_datums: int, max_bytes: int) -> list[list[Datum]]:
    """Split data into chunks of at most so many datums and bytes, in order.

    No chunk is empty; a datum larger than `max_bytes` is a chunk by itself.
    """
    chunks: list[list[Datum]] = []
    room = -1
    for datum in data:
        size = datum_bytes(datum)
        if not chunks or size > room or len(chunks[-1]) >= max_datums:
            chunks.append([])
            room = max_bytes
        chunks[-1].append(datum)
        room -= size
    return chunks


def datum_bytes(datum: Datum) -> int:
    """The approximate size of a datum in a request: its tokens, media and tensors."""
    inputs = sum(map(_chunk_bytes, datum.model_input.chunks))
    return inputs + sum(tensor.nbytes for tensor in datum.loss_fn_inputs.values())


def _chunk_bytes(chunk: ModelInputChunk) -> int:
    if isinstance(chunk, EncodedTextChunk):
        return _TOKEN_BYTES * chunk.length
    if isinstance(chunk, ImageChunk):
        return len(chunk.data)
    return len(chunk.dmel) if isinstance(chunk, DmelChunk) else len(chunk.location)


def join(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """The outputs of a call's chunks, joined in order."""
    if not outputs:
        return ForwardBackwardOutput("", [])
    return ForwardBackwardOutput(
        outputs[0].loss_fn_output_type,
        [datum for output in outputs for datum in output.loss_fn_outputs],
        join_metrics(
            [output.metrics for output in outputs],
            [len(output.loss_fn_outputs) for output in outputs],
        ),
    )


def join_metrics(metrics: Sequence[dict[str, float]], weights: Sequence[int]) -> dict[str, float]:
    """One value for each metric that every chunk reports.

    Args:
        metrics: Each chunk's metrics.
        weights: How many outputs each chunk has; means are weighted by it. If it is 0 everywhere,
            each chunk counts the same.
    """
    joined: dict[str, float] = {}
    for name in metrics[0]:
        if not all(name in chunk for chunk in metrics):
            continue
        values = [chunk[name] for chunk in metrics]
        reduction = _reduction(name)
        if reduction == "unique":
            joined[name] = values[0]
            joined.update({f"{name}_{i}": value for i, value in enumerate(values[1:], start=1)})
        elif reduction is None:
            _log.debug("metric %r is dropped: unknown reduction", name)
        else:
            joined[name] = _REDUCTIONS[reduction](values, weights)
    return joined


def _reduction(name: str) -> str | None:
    _, _, suffix = name.rpartition(":")
    if suffix in _REDUCTIONS or suffix == "unique":
        return suffix if ":" in name else "mean"
    return None if name.count(":") == 1 else "mean"


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    if not any(weights):
        weights = [1] * len(values)
    used = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    return _sum([value * weight for value, weight in used], weights) / sum(weights)


def _sum(values: Sequence[float], _: Sequence[int]) -> float:
    # Exact at every step, so that the order of chunks does not matter.
    endless = [value for value in values if not math.isfinite(value)]
    if endless:
        return sum(endless)
    try:
        return math.fsum(values)
    except OverflowError:  # on the way, though perhaps not in the end
        from fractions import Fraction

        return _rounded(sum(map(Fraction, values)))


def _rounded(exact: Fraction | int) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _min(values: Sequence[float], _: Sequence[int]) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)


def _max(values: Sequence[float], _: Sequence[int]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _slack(values: Sequence[float], weights: Sequence[int]) -> float:
    largest = _max(values, weights)
    slack = largest - _mean(values, weights)
    return slack if math.isnan(slack) else max(0.0, slack)  # rounding must not make it negative


def _hash2(values: Sequence[float], _: Sequence[int]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    return sum(int(value) % (1 << 64) for value in values) % (1 << 64)


_REDUCTIONS: dict[str, Reduction] = {
    "mean": _mean,
    "sum": _sum,
    "min": _min,
    "max": _max,
    "slack": _slack,
    "hash2": _hash2,
}
