"""Programs that use the embedded service, run as a user would: in a process of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ENDS_WITHIN_S = 240.0
"""For a machine that does much else."""

START = f"""\
import os, sys, threading, time
import tinsmith

MODEL = {MODEL!r}
TOKENS = tinsmith.ModelInput.from_ints([1, 2, 3])
DATUM = tinsmith.Datum(TOKENS, {{"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]}})
ADAM = tinsmith.AdamParams(learning_rate=0.1)

def say(*words):
    print(" ".join(map(str, words)) + "\\n", end="", flush=True)  # a line whole, from any thread

def step(training):
    output = training.forward_backward([DATUM], "cross_entropy")
    training.optim_step(ADAM).result()
    return output.result().loss

def loss_of(training):
    return training.forward([DATUM], "cross_entropy").result().loss
"""


def environment(home: Path, **more: str) -> dict[str, str]:
    """What a program sees where nobody has set anything but the engine, which is the fake one."""
    kept = {name: value for name, value in os.environ.items() if not _is_setting(name)}
    return {**kept, "HOME": str(home), "TINSMITH_SERVE_ENGINE": "fake", **more}


def _is_setting(name: str) -> bool:
    return name.startswith(("TINKER_", "TINSMITH_")) or name.lower().endswith("_proxy")


def run(program: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; it must end well."""
    ended = subprocess.run(
        [sys.executable, "-c", START + program],
        env=environment(home, **more),
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended


class Running:
    """A program that runs beside the test, which reads what it says and tells it to go on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def hears(self) -> str:
        """The next line that it says; fails if it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"it ended with {self.process.wait(ENDS_WITHIN_S)}"
        return line

    def go_on(self) -> None:
        """Let its `input()` return."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ends(self) -> int:
        """Its exit code."""
        return self.process.wait(ENDS_WITHIN_S)


@contextlib.contextmanager
def running(program: str, home: Path, **more: str) -> Iterator[Running]:
    """Run a program beside the test; it is killed at the end of the block if it has not ended."""
    with subprocess.Popen(
        [sys.executable, "-c", START + program],
        env=environment(home, **more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Running(process)
        finally:
            process.kill()
