"""The command behind `scripts/bench`."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.harness import machine, plot, report, results
from benchmarks.harness.contest import ROOT
from benchmarks.harness.plan import Benchmark
from benchmarks.harness.rounds import QUICK, Settings, run_rounds
from benchmarks.suite import BENCHMARKS, PYTHONS

RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/benchmarks.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    wanted = _parser().parse_args(arguments)
    if wanted.list:
        print("\n".join(f"{found.name:32} {found.group}: {found.title}" for found in BENCHMARKS))
        return 0
    if wanted.redraw:
        write(results.load((RESULTS / "latest.json").read_bytes()), RESULTS, PAGE)
        return 0
    chosen = _chosen(wanted.names)
    settings = QUICK if wanted.quick else Settings()
    if wanted.rounds:
        settings = replace(settings, rounds=wanted.rounds)
    run = measure(chosen, settings)
    is_whole = len(chosen) == len(BENCHMARKS) and not wanted.quick
    # A part of the whole, or a hurried look at it, must not replace what is published.
    write(run, RESULTS if is_whole else RESULTS / "scratch", PAGE if is_whole else None)
    return 0


def measure(chosen: Sequence[Benchmark], settings: Settings) -> results.Run:
    """Measure on this machine, in the environments that `scripts/bench` has made."""
    needed = {one.environment for found in chosen for one in found.contestants}
    pythons = {name: python for name, python in PYTHONS.items() if name in needed}
    start = time.monotonic()
    here = machine.describe(pythons, ROOT)
    found = run_rounds(chosen, pythons, settings, say)
    here = msgspec.structs.replace(here, load_after=machine.load())
    return results.Run(here, time.monotonic() - start, found)


def write(run: results.Run, folder: Path, page: Path | None) -> None:
    """Keep the run as JSON, Markdown and a picture, publish it, and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest.json").write_bytes(results.dump(run))
    (folder / "latest.md").write_text(report.markdown(run, "latest.png"), encoding="utf-8")
    plot.draw(run, folder / "latest.png")
    if page is not None:
        picture = page.with_suffix(".png")
        page.write_text(report.markdown(run, picture.name), encoding="utf-8")
        picture.write_bytes((folder / "latest.png").read_bytes())
    print((folder / "latest.md").read_text(encoding="utf-8"))
    say(f"written to {folder}")


def say(line: str) -> None:
    """Tell how it goes, beside what is printed as the result."""
    print(f"==> {line}", file=sys.stderr, flush=True)


def _chosen(patterns: list[str]) -> list[Benchmark]:
    chosen = [
        found
        for found in BENCHMARKS
        if not patterns or any(fnmatch.fnmatch(found.name, pattern) for pattern in patterns)
    ]
    if not chosen:
        raise SystemExit(f"no benchmark is named {' or '.join(patterns)}; see scripts/bench --list")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("names", nargs="*", help="which to run, as patterns; all by default")
    parser.add_argument("--rounds", type=int, help=f"how many rounds, {Settings.rounds} by default")
    parser.add_argument("--quick", action="store_true", help="only see whether everything runs")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and stop")
    parser.add_argument("--redraw", action="store_true", help="report the kept JSON anew and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
