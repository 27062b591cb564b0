"""CPU and wall time of a whole process, its children included."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from benchmarks.harness.timing import Times


def run_command(command: list[str], cwd: Path) -> Times:
    """Run a program from its start to its end.

    Raises:
        RuntimeError: It failed; the message has what it said.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process.stderr:
        said = process.stderr.read()
    # Not process.wait: only wait4 says what this one child has used.
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}: {said[-2000:]}")
    return Times(usage.ru_utime + usage.ru_stime, wall_s)
