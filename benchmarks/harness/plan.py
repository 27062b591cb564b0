"""What can be measured: benchmarks, their contestants, and what they are meant to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Metric: TypeAlias = Literal[
    "cpu_s",
    "wall_s",
    "resident_peak_bytes",
    "traced_peak_bytes",
    "resident_bytes",
    "installed_bytes",
    "packages",
    "added_p50_s",
    "added_p99_s",
    "latency_p50_s",
    "latency_p99_s",
    "slowest_s",
    "server_share",
    "slowdown",
    "threads",
    "tokens_per_cpu_s",
    "tokens_per_s",
    "first_token_s",
    "matmul_share",
    "difference",
]

MORE_IS_BETTER: frozenset[Metric] = frozenset({"tokens_per_cpu_s", "tokens_per_s", "matmul_share"})
"""Of all others less is."""


@dataclass(frozen=True)
class Call:
    """A function, called again and again in a fresh process.

    `target` is `module:function`; the function takes `parameters` and returns `Work`. It is first
    tried with small parameters, so each of them must be a size.
    """

    target: str
    parameters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """A function that returns figures by itself, called once in a fresh process."""

    target: str
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Turns:
    """Work that takes seconds: prepared once in a fresh process, then done once for each turn.

    `target` is `module:function`; the function takes `parameters`, prepares and warms up, and
    returns a function that does the work once and returns figures, `cpu_s` among them.
    """

    target: str
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A program of the environment with its arguments, measured from its start to its end."""

    program: str
    arguments: tuple[str, ...]


Job: TypeAlias = Call | Figures | Turns | Command


@dataclass(frozen=True)
class Contestant:
    """Who does the work, in which environment, and how.

    A yardstick is not ours: the least that the work can cost, or a further rival. It has no aims.
    """

    name: str
    environment: str
    job: Job
    is_yardstick: bool = False


@dataclass(frozen=True)
class Aim:
    """A bound on a figure.

    Against `"rival"` it is a ratio to the rival's figure, the median of the rounds. Against
    `"itself"` it is the figure, not a ratio. A peak can be held against the size of the body in two
    readings. `"input and body"` is about all the memory there is: the input, which the caller holds
    all the while, and the peak beyond it, over input and body together. `"body"` is the strict
    one: the peak beyond the input over the body alone.
    """

    metric: Metric
    at_most: float
    against: Literal["rival", "body", "input and body", "itself"] = "rival"
    of: str | None = None
    """Whose aim it is; everybody's but the rival's and the yardsticks' if None."""
    beside: str | None = None
    """The rival, if it is another than the last; no aim where that one did not run."""


@dataclass(frozen=True)
class Benchmark:
    """A workload with contestants. The last of them is the rival that the others are held against.

    `shown` are the metrics that the table shows, the most telling first.
    """

    name: str
    group: str
    title: str
    contestants: tuple[Contestant, ...]
    aims: tuple[Aim, ...] = ()
    shown: tuple[Metric, ...] = ("cpu_s", "traced_peak_bytes", "resident_peak_bytes")
    note: str = ""
    most_rounds: int | None = None
    """For what takes long: how many rounds are enough."""


@dataclass(frozen=True)
class Page:
    """Benchmarks that are run and published together."""

    name: str
    """Of the files under `results/`."""
    published: str
    """The file under `docs/`."""
    title: str
    benchmarks: tuple[Benchmark, ...]
    introduction: str = ""
    """Instead of the usual one."""
