"""From samples to figures: medians, ratios with their spread, and whether an aim was reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from benchmarks.harness.plan import MORE_IS_BETTER, Aim, Metric
from benchmarks.harness.results import Measured, Run

_NOTABLE = 1.01


class Spread(NamedTuple):
    """The median of some samples, the least and the largest."""

    middle: float
    low: float
    high: float


class Comparison(NamedTuple):
    """One figure of one contestant beside the rival's."""

    benchmark: Measured
    contestant: str
    rival: str
    metric: Metric
    ours: Spread
    theirs: Spread
    ratio: Spread | None
    """Of the ratios of the rounds; None where the rival's figure was 0."""


class Verdict(NamedTuple):
    """An aim, and how close a contestant came."""

    benchmark: Measured
    contestant: str
    aim: Aim
    found: Spread
    is_reached: bool


def spread(samples: Sequence[float]) -> Spread:
    """Of at least one sample."""
    return Spread(median(samples), min(samples), max(samples))


def comparisons(benchmark: Measured) -> Iterator[Comparison]:
    """Every shown figure of everybody but the rival and the yardsticks."""
    rival = list(benchmark.samples)[-1]
    for contestant in competitors(benchmark):
        for metric in benchmark.shown:
            if metric in benchmark.samples[contestant][0] and metric in benchmark.samples[rival][0]:
                yield compare(benchmark, contestant, rival, metric)


def compare(benchmark: Measured, contestant: str, rival: str, metric: Metric) -> Comparison:
    """One figure of two contestants."""
    ours = [figures[metric] for figures in benchmark.samples[contestant]]
    theirs = [figures[metric] for figures in benchmark.samples[rival]]
    ratio = None
    if all(theirs):
        ratio = spread([mine / other for mine, other in zip(ours, theirs, strict=True)])
    return Comparison(benchmark, contestant, rival, metric, spread(ours), spread(theirs), ratio)


def verdicts(run: Run) -> list[Verdict]:
    """Every aim of every benchmark, for those whose aim it is."""
    return [
        _verdict(benchmark, contestant, aim)
        for benchmark in run.benchmarks
        for aim in benchmark.aims
        for contestant in competitors(benchmark)
        if aim.of in (None, contestant) and aim.beside in (None, *benchmark.samples)
    ]


def competitors(benchmark: Measured) -> list[str]:
    """The contestants that are neither the rival nor a yardstick."""
    *others, _ = benchmark.samples
    return [name for name in others if name not in benchmark.yardsticks]


def rival_of(benchmark: Measured, aim: Aim) -> str:
    """Whom a contestant is held against."""
    return aim.beside or list(benchmark.samples)[-1]


def _verdict(benchmark: Measured, contestant: str, aim: Aim) -> Verdict:
    if aim.against == "rival":
        ratio = compare(benchmark, contestant, rival_of(benchmark, aim), aim.metric).ratio
        found = ratio or Spread(0, 0, 0)
    elif aim.against == "itself":
        found = spread([figures[aim.metric] for figures in benchmark.samples[contestant]])
    else:
        found = spread([_to_body(figures, aim) for figures in benchmark.samples[contestant]])
    return Verdict(benchmark, contestant, aim, found, found.middle <= aim.at_most)


def _to_body(figures: dict[str, float], aim: Aim) -> float:
    held = figures["input_bytes"] if aim.against == "input and body" else 0
    return (held + figures[aim.metric]) / (held + figures["payload_bytes"])


def losses(run: Run) -> list[Comparison]:
    """Where a contestant needed more than its rival, by a hundredth or more, the worst first."""
    found = [
        comparison
        for benchmark in run.benchmarks
        for comparison in comparisons(benchmark)
        if comparison.ratio is not None
        and comparison.ratio.middle > _NOTABLE
        # What it says backwards, another figure says.
        and comparison.metric not in MORE_IS_BETTER
    ]
    return sorted(found, key=lambda loss: -(loss.ratio.middle if loss.ratio else 0))
