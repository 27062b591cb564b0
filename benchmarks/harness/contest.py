"""One round of one benchmark: everybody in a fresh process, taking turns batch by batch.

The machines are shared, and their speed changes from one second to the next. Turns of a twentieth
of a second see the same machine, so their ratio holds even where times do not.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from benchmarks.harness.commands import run_command
from benchmarks.harness.plan import Call, Command, Contestant, Figures, Turns

ROOT = Path(__file__).resolve().parents[2]
LONG_ENOUGH_S = 1.5
"""Where turns take longer than planned, two for each and this much time are enough."""
LONG_TURNS_S = 6.0
"""Where they take seconds by nature, one for each and this much time are."""
EXIT_S = 30.0
"""How long a contestant that has said everything may take to end by itself."""

Found: TypeAlias = dict[str, float]


def run_round(
    contestants: Sequence[Contestant], pythons: Mapping[str, Path], *, batch_s: float, batches: int
) -> dict[str, Found]:
    """The figures of each contestant; of the times, the least of its batches.

    What disturbs a batch only ever adds to it: the least is nearest to what the work costs.

    Raises:
        RuntimeError: A contestant failed; the message has what it said.
    """
    with ExitStack() as running:
        found: dict[str, Found] = {}
        turns: dict[str, Callable[[], Found]] = {}
        workers: dict[str, Worker] = {}
        # One after the other is started and ready: while they prepare, nobody is measured.
        for one in contestants:
            python = pythons[one.environment]
            if isinstance(one.job, Command):
                found[one.name], turns[one.name] = {}, _command_turn(one.job, python)
                continue
            worker = running.enter_context(Worker(python, one.job, batch_s))
            found[one.name] = worker.hear()
            if isinstance(one.job, Call):
                workers[one.name] = worker
            if not isinstance(one.job, Figures):
                turns[one.name] = worker.batch
        are_long = any(isinstance(one.job, Turns) for one in contestants)
        fewest, enough_s = (1, LONG_TURNS_S) if are_long else (2, LONG_ENOUGH_S)
        start = time.monotonic()
        for number in range(batches):
            if number >= fewest and time.monotonic() - start > enough_s:
                break
            for name, turn in turns.items():
                keep = _keep_best if are_long else _keep_least
                keep(found[name], turn())
        for name, worker in workers.items():
            found[name] |= worker.trace()
    return found


def _command_turn(job: Command, python: Path) -> Callable[[], Found]:
    command = [str(python.with_name(job.program)), *job.arguments]
    return lambda: run_command(command, ROOT)._asdict()


def _keep_least(found: Found, times: Found) -> None:
    for name, value in times.items():
        found[name] = min(value, found.get(name, value))


def _keep_best(found: Found, figures: Found) -> None:
    """The figures of one turn belong together."""
    if "cpu_s" not in found or figures["cpu_s"] < found["cpu_s"]:
        found |= figures


class Worker:
    """A contestant's process, seen from here; see `worker.py` for what is said."""

    def __init__(self, python: Path, job: Call | Figures | Turns, batch_s: float) -> None:
        self._target = job.target
        told = {**asdict(job), "kind": type(job).__name__, "batch_s": batch_s}
        # In a file: a pipe that nobody reads would stop a contestant whose libraries say much.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.harness.worker", json.dumps(told)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def batch(self) -> Found:
        """Let it do one batch."""
        return self._ask("batch")

    def trace(self) -> Found:
        """Let it do its work once more, under tracing."""
        return self._ask("trace")

    def hear(self) -> Found:
        """The next thing it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.communicate()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace")
            raise RuntimeError(f"{self._target} failed:\n{said[-4000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _ask(self, order: str) -> Found:
        assert self._process.stdin is not None
        print(order, file=self._process.stdin, flush=True)
        return self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # How it ends is not asked: what it has said was measured, even if it crashes at its exit.
        if kind is not None:
            self._process.kill()
        try:
            self._process.communicate(timeout=EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._said.close()
