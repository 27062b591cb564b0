"""Round after round, every benchmark in each.

Rounds are the outer loop: a spell of load on the machine then falls on every benchmark a little,
not on one of them fully. Every second round goes through the contestants in reverse order, so that
none of them always comes first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.contest import run_round
from benchmarks.harness.plan import Benchmark
from benchmarks.harness.results import Measured

_DIGITS = 6


@dataclass(frozen=True)
class Settings:
    """How much to measure."""

    rounds: int = 5
    batches: int = 5
    batch_s: float = 0.05
    budget_s: float = 840.0
    """No round is begun that would probably end later than this."""


QUICK = Settings(rounds=2, batches=1, batch_s=0.005)


def run_rounds(
    benchmarks: Sequence[Benchmark],
    pythons: Mapping[str, Path],
    settings: Settings,
    say: Callable[[str], None],
) -> list[Measured]:
    """Measure every benchmark in each round.

    Args:
        benchmarks: What to measure.
        pythons: The interpreter of each environment.
        settings: How much.
        say: Takes a line about how far it is.

    Raises:
        RuntimeError: A contestant failed; the message has what it said.
    """
    measured = [_empty(benchmark) for benchmark in benchmarks]
    start = time.monotonic()
    for number in range(settings.rounds):
        for benchmark, found in zip(benchmarks, measured, strict=True):
            if benchmark.most_rounds is not None and number >= benchmark.most_rounds:
                continue
            order = benchmark.contestants[:: -1 if number % 2 else 1]
            figures = run_round(order, pythons, batch_s=settings.batch_s, batches=settings.batches)
            for name, samples in found.samples.items():
                samples.append({key: _shortened(value) for key, value in figures[name].items()})
        done, taken_s = number + 1, time.monotonic() - start
        say(f"round {done} of {settings.rounds} done after {taken_s:.0f} s")
        if done < settings.rounds and taken_s / done * (done + 1) > settings.budget_s:
            say(f"stopping here: another round would take longer than {settings.budget_s:g} s")
            break
    return measured


def _empty(benchmark: Benchmark) -> Measured:
    return Measured(
        name=benchmark.name,
        group=benchmark.group,
        title=benchmark.title,
        note=benchmark.note,
        shown=benchmark.shown,
        aims=benchmark.aims,
        samples={contestant.name: [] for contestant in benchmark.contestants},
        yardsticks=tuple(one.name for one in benchmark.contestants if one.is_yardstick),
    )


def _shortened(value: float) -> float:
    """As many digits as mean something, so that the kept file stays small."""
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
