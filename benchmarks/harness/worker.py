"""A contestant's own process: prepares one workload and measures it when it is told to.

    python -m benchmarks.harness.worker '{"target": "module:function", "parameters": {…}, …}'

Each line that it reads is an order, each line that it writes is JSON. First it prepares and says
what it found about memory, on memory that is still fresh. At `batch` it times one batch of calls,
or does its work once where that takes seconds.
At `trace` it asks Python for its account of memory, which comes last because tracing slows down
everything that follows. When its input ends, it ends.

Runs in the contestant's environment, so it needs nothing but the standard library.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from benchmarks.harness import timing
from benchmarks.harness.memory import rise_of_resident_peak, traced_peak
from benchmarks.harness.work import Work, held_bytes

_out: TextIO = sys.stdout
WARM_UP_SIZE = 16
"""No parameter is larger than this while imports are done and caches filled."""


def main() -> None:
    """Do what the one argument says, then what each line says."""
    job = json.loads(sys.argv[1])
    _keep_stdout()
    module, _, name = job["target"].partition(":")
    workload = getattr(importlib.import_module(module), name)
    if job["kind"] == "Figures":
        _say(workload(**job["parameters"]))
    elif job["kind"] == "Turns":
        _take_turns(workload(**job["parameters"]))
    else:
        _take_batches(workload, job)


def _take_turns(turn: Callable[[], dict[str, float]]) -> None:
    _say({})
    for _ in sys.stdin:
        _say(turn())


def _take_batches(workload: Callable[..., Work], job: dict[str, Any]) -> None:
    small = {name: min(size, WARM_UP_SIZE) for name, size in job["parameters"].items()}
    workload(**small).run()
    work: Work = workload(**job["parameters"])
    _say(_sizes(work))
    timing.settle()
    repetitions = timing.calibrate(work.run, job["batch_s"])
    for order in sys.stdin:
        if order.strip() == "batch":
            _say(timing.batch(work.run, repetitions)._asdict())
        else:
            _say({"traced_peak_bytes": traced_peak(work.run)})


def _sizes(work: Work) -> dict[str, float]:
    peak_bytes, result = rise_of_resident_peak(work.run)
    return {
        "resident_peak_bytes": peak_bytes,
        "input_bytes": held_bytes(work.inputs),
        "payload_bytes": work.payload_bytes(result),
    }


def _keep_stdout() -> None:
    """Let what libraries print go to stderr: stdout is for `_say` alone."""
    global _out  # noqa: PLW0603 - one for the process
    _out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _say(found: dict[str, Any]) -> None:
    print(json.dumps(found), file=_out, flush=True)


if __name__ == "__main__":
    main()
