"""A run as Markdown: the aims, where we lose, every figure, and the machine."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from itertools import groupby

from benchmarks.harness.plan import Metric
from benchmarks.harness.results import Machine, Measured, Run
from benchmarks.harness.summary import (
    Comparison,
    Spread,
    Verdict,
    compare,
    losses,
    rival_of,
    spread,
    verdicts,
)

INTRODUCTION = """\
For readers who want every figure; [how fast is it?](performance.md) has the short answers. This
page is written by `scripts/bench`.

Each contestant runs in fresh processes, alternating with the others. Figures are medians over the
rounds. A ratio is ours divided by the rival's: the median, with the smallest and the largest round
in brackets. **Below 1, tinsmith needs less.**

- *CPU* is the time of all threads, with the garbage collector on.
- *Python peak* is the most that Python's allocators held beyond the input (`tracemalloc`, in a run
  of its own). It omits memory that C libraries allocate themselves and includes memory that is
  never touched.
- *Resident peak* is the growth of the process's physical memory. It omits memory that was already
  free within the process.
- *Body* is what is sent or received.
"""

READINGS = """\
Memory is compared with the body in two ways. *Whole*: the input and the peak beyond it, divided by
the input and the body. *Strict*: the peak beyond the input, divided by the body alone."""

LABELS = {
    "cpu_s": "CPU",
    "wall_s": "wall time",
    "resident_peak_bytes": "resident peak",
    "traced_peak_bytes": "Python peak",
    "resident_bytes": "resident memory",
    "installed_bytes": "installed size",
    "packages": "packages",
    "added_p50_s": "added latency, median",
    "added_p99_s": "added latency, 99th percentile",
    "latency_p50_s": "latency, median",
    "latency_p99_s": "latency, 99th percentile",
    "slowest_s": "slowest heartbeat",
    "server_share": "server's share of a core",
    "slowdown": "time beside a busy thread / alone",
    "threads": "threads",
    "tokens_per_cpu_s": "tokens per CPU second",
    "tokens_per_s": "tokens per second",
    "first_token_s": "time to the first token",
    "matmul_share": "share of the machine's matmul rate",
    "difference": "largest difference",
}
_RATES: dict[Metric, str] = {
    "tokens_per_s": "tokens/s",
    "matmul_share": "of matmul",
    "first_token_s": "first token",
    "resident_bytes": "resident",
}
"""Shown beside the tokens per CPU second."""


def markdown(run: Run, plot: str, title: str = "Benchmarks", introduction: str = "") -> str:
    """The whole page; `plot` is the picture's place beside it."""
    rounds = max(len(next(iter(found.samples.values()))) for found in run.benchmarks)
    parts = [
        f"# {title}",
        introduction or INTRODUCTION,
        _machine(run.machine, rounds, run.took_s),
        f"![CPU time and peak memory compared with the rival]({plot})",
        "## Aims",
        _aims(verdicts(run)),
        "## Where we lose",
        _losses(losses(run)),
    ]
    for group, members in groupby(run.benchmarks, key=lambda found: found.group):
        parts += [f"## {group}", *_group(list(members))]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _machine(machine: Machine, rounds: int, took_s: float) -> str:
    lines = [
        f"- {machine.date}, commit {machine.commit}; {rounds} rounds in {took_s:.0f} s",
        f"- {machine.cpu}, {machine.cores} cores, {machine.memory_gb:g} GB, {machine.system}",
        f"- load average {machine.load_before:g} before, {machine.load_after:g} after",
    ]
    for name, versions in machine.environments.items():
        lines.append(f"- environment *{name}*: {', '.join(map(' '.join, versions.items()))}")
    return "\n".join(map(_wrapped, lines))


def _wrapped(item: str) -> str:
    """An item of a list, in lines of at most 100 columns."""
    return textwrap.fill(
        item, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _aims(found: list[Verdict]) -> str:
    if not found:
        return "No aims were set for these benchmarks."
    missed = sum(not verdict.is_reached for verdict in found)
    summary = f"{len(found) - missed} of {len(found)} reached."
    rows = [
        (
            verdict.benchmark.title,
            verdict.contestant,
            _aim(verdict),
            f"≤ {verdict.aim.at_most:.3g}",
            _ratio(verdict.found, bold_above=verdict.aim.at_most),
            "reached" if verdict.is_reached else "**NOT reached**",
        )
        for verdict in found
    ]
    table = _table(("what", "who", "ratio", "aim", "found", ""), rows)
    has_bodies = any("body" in verdict.aim.against for verdict in found)
    return "\n\n".join((summary, *([READINGS] if has_bodies else []), table))


def _aim(verdict: Verdict) -> str:
    figure, against = LABELS[verdict.aim.metric], verdict.aim.against
    if against == "itself":
        return figure
    if against == "rival":
        return f"{figure} / that of {rival_of(verdict.benchmark, verdict.aim)}"
    if against == "input and body":
        return f"whole: (input + {figure}) / (input + body)"
    return f"strict: {figure} / body"


def _losses(found: list[Comparison]) -> str:
    if not found:
        return "Nowhere in this run."
    rows = [
        (
            loss.benchmark.title,
            loss.contestant,
            LABELS[loss.metric],
            value(loss.metric, loss.ours.middle),
            f"{value(loss.metric, loss.theirs.middle)} ({loss.rival})",
            _ratio(loss.ratio),
        )
        for loss in found
    ]
    return _table(("what", "who", "figure", "ours", "rival", "ratio"), rows)


def _group(members: list[Measured]) -> list[str]:
    if all("tokens_per_cpu_s" in found.shown for found in members):
        parts = [_rates(members)]
    elif all("traced_peak_bytes" in found.shown for found in members):
        parts = [_calls(members)]
    else:
        parts = [_others(members)]
    notes = dict.fromkeys(found.note for found in members if found.note)
    return parts + [_wrapped(f"- {note}") for note in notes]


def _calls(members: list[Measured]) -> str:
    """A line for each workload and contestant; time and both peaks beside each other."""
    rows = []
    for found in members:
        *others, rival = found.samples
        for name in others:
            cpu, traced, resident = (
                compare(found, name, rival, metric)
                for metric in ("cpu_s", "traced_peak_bytes", "resident_peak_bytes")
            )
            rows.append(
                (
                    found.title,
                    f"{name} / {rival}",
                    _pair(cpu),
                    _ratio(cpu.ratio),
                    _pair(traced),
                    _ratio(traced.ratio),
                    _pair(resident),
                    _payload(found, name),
                )
            )
    head = ("what", "who", "CPU", "ratio", "Python peak", "ratio", "resident peak", "input, body")
    return _table(head, rows)


def _rates(members: list[Measured]) -> str:
    """A line for each contestant, the rivals too; the first of each has all ratios to the others.

    Here more is better, and ratios are those of rates.
    """
    rows = []
    for found in members:
        ours = next(iter(found.samples))
        for name, samples in found.samples.items():
            rate = spread([figures["tokens_per_cpu_s"] for figures in samples])
            times = "" if name == ours else _times(compare(found, ours, name, "cpu_s").ratio)
            further = (
                value(metric, spread([figures[metric] for figures in samples]).middle)
                if all(metric in figures for figures in samples)
                else "–"
                for metric in _RATES
            )
            title = found.title if name == ours else ""
            rows.append((title, name, value("tokens_per_cpu_s", rate.middle), times, *further))
    head = ("what", "who", "tokens/CPU-s", "ours is", *_RATES.values())
    return _table(head, rows)


def _times(ratio: Spread | None) -> str:
    """How many times as fast ours is, from the ratio of what is needed."""
    if ratio is None or not ratio.low:
        return "–"
    middle, least, most = 1 / ratio.middle, 1 / ratio.high, 1 / ratio.low
    spread_too = f" ({least:.2g}…{most:.2g})" if least < most else ""
    return f"{'**' if middle < 1 else ''}{middle:.3g}×{'**' if middle < 1 else ''}{spread_too}"


def _others(members: list[Measured]) -> str:
    rows = []
    for found in members:
        *others, rival = found.samples
        for name in others:
            for metric in found.shown:
                compared = compare(found, name, rival, metric)
                rows.append(
                    (
                        found.title,
                        LABELS[metric],
                        f"{name} / {rival}",
                        _pair(compared),
                        _ratio(compared.ratio),
                    )
                )
    return _table(("what", "figure", "who", "ours / rival", "ratio"), rows)


def _pair(compared: Comparison) -> str:
    ours, theirs = (
        value(compared.metric, side.middle) for side in (compared.ours, compared.theirs)
    )
    return f"{ours} / {theirs}"


def _payload(found: Measured, contestant: str) -> str:
    figures = found.samples[contestant][0]
    names = ("input_bytes", "payload_bytes")
    return ", ".join(value(name, figures[name]) for name in names)


def _ratio(ratio: Spread | None, *, bold_above: float = 1) -> str:
    if ratio is None:
        return "–"
    bold = "**" if ratio.middle > bold_above else ""
    return f"{bold}{ratio.middle:.2g}{bold} ({ratio.low:.2g}…{ratio.high:.2g})"


def value(metric: str, number: float) -> str:
    """A figure with its unit."""
    if metric in ("server_share", "slowdown"):
        return f"{number:.2f}"
    if metric == "matmul_share":
        return f"{100 * number:.0f} %"
    if metric.startswith("tokens_per"):
        return f"{number:,.1f}" if number < 100 else f"{number:,.0f}"
    if metric == "difference":
        return f"{number:.1e}"
    if metric.endswith("_s"):
        unit, per_second = ("µs", 1e6) if number < 1e-3 else ("ms", 1e3) if number < 1 else ("s", 1)
        return f"{number * per_second:.3g} {unit}"
    if metric.endswith("_bytes"):
        return f"{number / 1e3:,.0f} kB" if number < 1e7 else f"{number / 1e6:,.0f} MB"
    return f"{number:g}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
