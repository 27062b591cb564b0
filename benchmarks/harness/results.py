"""What a run found, as it is kept in JSON: every sample, and where it was taken."""

from __future__ import annotations

import msgspec

from benchmarks.harness.plan import Aim, Metric


class Machine(msgspec.Struct, frozen=True):
    """Where and when a run took place."""

    date: str
    cpu: str
    cores: int
    memory_gb: float
    system: str
    commit: str
    environments: dict[str, dict[str, str]]
    """For each environment its Python and the versions of what is compared."""
    load_before: float
    load_after: float = 0.0


class Measured(msgspec.Struct, frozen=True):
    """One benchmark: what each contestant showed in each round."""

    name: str
    group: str
    title: str
    note: str
    shown: tuple[Metric, ...]
    aims: tuple[Aim, ...]
    samples: dict[str, list[dict[str, float]]]
    """For each contestant, in their order, its figures round by round; the rival comes last."""
    yardsticks: tuple[str, ...] = ()
    """Those contestants that only show the least that the work can cost."""


class Run(msgspec.Struct, frozen=True):
    """A whole run."""

    machine: Machine
    took_s: float
    benchmarks: list[Measured]


def dump(run: Run) -> bytes:
    """The run as JSON, a line for each benchmark, so that two runs can be compared."""
    head = msgspec.json.encode({"machine": run.machine, "took_s": round(run.took_s)})
    lines = [msgspec.json.encode(benchmark) for benchmark in run.benchmarks]
    return b"%s,\n" % head[:-1] + b'"benchmarks":[\n%s\n]}\n' % b",\n".join(lines)


def load(text: bytes) -> Run:
    """The run that `dump` wrote."""
    return msgspec.json.decode(text, type=Run)
