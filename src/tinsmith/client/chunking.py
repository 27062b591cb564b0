"""One training call as several requests, and their results as one.

A call with more data than the server takes at once is cut into chunks; losses are sums, so the
gradients add up to the same. `split` cuts, `join` puts outputs and metrics together again.

Metrics are named `name:reduction`. Every key is kept that every chunk has, whatever its name: one
without a reduction, or with more than one colon and no reduction that is known after the last, is
averaged. One colon and an unknown reduction is dropped, as in the official SDK.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tinsmith.types.inputs import Datum, DmelChunk, EncodedTextChunk, ImageChunk, ModelInputChunk
from tinsmith.types.training import ForwardBackwardOutput

if TYPE_CHECKING:
    from fractions import Fraction

_log = logging.getLogger(__name__)

_TOKEN_BYTES = 4

Reduction = Callable[[Sequence[float], Sequence[int]], float]


def split(data: Sequence[Datum], *, max_datums: int, max_bytes: int) -> list[list[Datum]]:
    """Cut data into chunks of at most so many datums and bytes, in order.

    No chunk is empty, and a datum that is larger than `max_bytes` travels alone.
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
    """About what a datum takes in a request: its tokens, media and tensors."""
    inputs = sum(map(_chunk_bytes, datum.model_input.chunks))
    return inputs + sum(tensor.nbytes for tensor in datum.loss_fn_inputs.values())


def _chunk_bytes(chunk: ModelInputChunk) -> int:
    if isinstance(chunk, EncodedTextChunk):
        return _TOKEN_BYTES * chunk.length
    if isinstance(chunk, ImageChunk):
        return len(chunk.data)
    return len(chunk.dmel) if isinstance(chunk, DmelChunk) else len(chunk.location)


def join(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """The outputs of a call's chunks, in the chunks' order, as one output."""
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
            _log.debug("metric %r is dropped: its reduction is not known", name)
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
