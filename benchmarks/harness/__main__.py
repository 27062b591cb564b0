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

from benchmarks.engine_suite import ENGINE_PAGE
from benchmarks.harness import machine, plot, report, results
from benchmarks.harness.contest import ROOT
from benchmarks.harness.plan import Benchmark, Page
from benchmarks.harness.rounds import QUICK, Settings, run_rounds
from benchmarks.suite import BENCHMARKS, MAIN_PAGE, OPTIONAL, PAGES, PYTHONS

RESULTS = ROOT / "benchmarks/results"
DOCS = ROOT / "docs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    wanted = _parser().parse_args(arguments)
    if wanted.list:
        print("\n".join(f"{found.name:32} {found.group}: {found.title}" for found in BENCHMARKS))
        return 0
    if wanted.redraw:
        for page in PAGES:
            if (kept := RESULTS / f"{page.name}.json").exists():
                write(results.load(kept.read_bytes()), RESULTS, page, DOCS)
        return 0
    chosen = [_with(benchmark, wanted.optional or ()) for benchmark in _chosen(wanted.names)]
    settings = QUICK if wanted.quick else Settings()
    if wanted.rounds:
        settings = replace(settings, rounds=wanted.rounds)
    run = measure(chosen, settings)
    names = {benchmark.name for benchmark in chosen}
    whole = next((p for p in PAGES if {one.name for one in p.benchmarks} == names), None)
    # A part of a page, or a hurried look at it, must not replace what is published.
    if whole is None or wanted.quick:
        is_engine = names <= {one.name for one in ENGINE_PAGE.benchmarks}
        write(run, RESULTS / "scratch", ENGINE_PAGE if is_engine else MAIN_PAGE, None)
    else:
        write(run, RESULTS, whole, DOCS)
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


def write(run: results.Run, folder: Path, page: Page, docs: Path | None) -> None:
    """Keep the run as JSON, Markdown and a picture, publish it, and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    kept, picture = folder / f"{page.name}.md", folder / f"{page.name}.png"
    kept.with_suffix(".json").write_bytes(results.dump(run))
    kept.write_text(
        report.markdown(run, picture.name, page.title, page.introduction), encoding="utf-8"
    )
    plot.draw(run, picture)
    if docs is not None:
        published = docs / page.published
        drawn = published.with_suffix(".png")
        text = report.markdown(run, drawn.name, page.title, page.introduction)
        published.write_text(text, encoding="utf-8")
        drawn.write_bytes(picture.read_bytes())
    print(kept.read_text(encoding="utf-8"))
    say(f"written to {folder}")


def say(line: str) -> None:
    """Tell how it goes, beside what is printed as the result."""
    print(f"==> {line}", file=sys.stderr, flush=True)


def _chosen(patterns: list[str]) -> list[Benchmark]:
    if not patterns:
        return list(MAIN_PAGE.benchmarks)
    # A bare word stands for all that begin with it, where none is called that.
    names = {found.name for found in BENCHMARKS}
    wanted = [one if one in names or "*" in one else f"{one}-*" for one in patterns]
    chosen = [one for one in BENCHMARKS if any(fnmatch.fnmatch(one.name, w) for w in wanted)]
    if not chosen:
        raise SystemExit(f"no benchmark is named {' or '.join(patterns)}; see scripts/bench --list")
    return chosen


def _with(benchmark: Benchmark, environments: Sequence[str]) -> Benchmark:
    """Without the contestants of environments that were not asked for."""
    left_out = OPTIONAL - set(environments)
    kept = tuple(one for one in benchmark.contestants if one.environment not in left_out)
    return replace(benchmark, contestants=kept)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        help="names, prefixes or patterns of benchmarks; by default all but those of the engine",
    )
    parser.add_argument(
        "--with-vllm",
        dest="optional",
        action="append_const",
        const="vllm",
        help="include vLLM for CPUs, a large install",
    )
    parser.add_argument("--rounds", type=int, help=f"number of rounds (default: {Settings.rounds})")
    parser.add_argument("--quick", action="store_true", help="only check that everything runs")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and exit")
    parser.add_argument("--redraw", action="store_true", help="render stored results and exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
