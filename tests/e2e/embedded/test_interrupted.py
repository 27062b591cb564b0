"""Ctrl-C on a program that trains on the embedded service: what is left, and what is said of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.embedded.programs import ENDS_WITHIN_S, START, environment, run

LOOP = """
training = client.create_lora_training_client(MODEL, rank=8, seed=1)
step(training)
say(training.model_id)
BIG = tinsmith.ModelInput.from_ints([1] * 64)
ONE = tinsmith.Datum(BIG, {"target_tokens": [2] * 64, "weights": [1.0] * 64})
asked = [training.forward_backward([ONE], "cross_entropy") for _ in range(QUEUED)]
say("queued")
asked[-1].result()
while True:
    step(training)
"""
SLOWLY = """
import asyncio
from tinsmith.engine.fake.engine import FakeEngine

train, batches = FakeEngine.train, []
async def train_slowly(engine, batch):
    batches.append(batch)
    if len(batches) > 2:  # the pass and the step before
        say("running")
        await asyncio.sleep(60)
    return await train(engine, batch)
FakeEngine.train = train_slowly
QUEUED = 10
"""
PLAIN = "client = tinsmith.ServiceClient()\n" + LOOP
IN_BLOCK = "with tinsmith.ServiceClient() as client:\n" + LOOP.replace("\n", "\n    ")


@contextmanager
def interrupted(program: str, home: Path, **more: str) -> Iterator[Interrupted]:
    """Run a program in a process group of its own, as a terminal's shell does."""
    with subprocess.Popen(
        [sys.executable, "-c", START + program],
        env=environment(home, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Interrupted(process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


class Interrupted:
    """A program that runs beside the test and is sent Ctrl-C."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._came = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._came:
                self.lines.append(line.rstrip("\n"))
                self._came.notify_all()

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ctrl_c(self) -> None:
        """As a terminal does: to all processes of the foreground."""
        os.killpg(self.process.pid, signal.SIGINT)

    def warns_of(self, text: str) -> str:
        """The line on stderr with this text, once it is there."""
        with self._came:
            assert self._came.wait_for(lambda: self._found(text), 60.0), "\n".join(self.lines)
            return self._found(text)[0]

    def _found(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]

    def ends(self, within_s: float = ENDS_WITHIN_S) -> int:
        return self.process.wait(within_s)


UNTIL_LISTED = """
import time

client = tinsmith.ServiceClient()
step(client.create_lora_training_client(MODEL, rank=8))
rest = client.create_rest_client()
while {path!r} not in [one.tinker_path for one in rest.iter_checkpoints()]:
    time.sleep(0.05)
"""


def listed(home: Path) -> str:
    """What `tinsmith checkpoint list` prints."""
    command = [sys.executable, "-m", "tinsmith", "checkpoint", "list", "--base-url", "embedded"]
    ended = subprocess.run(
        command, env=environment(home), capture_output=True, text=True, check=True, timeout=120
    )
    return ended.stdout


@pytest.mark.parametrize("loop", [PLAIN, IN_BLOCK], ids=["plain", "in a with block"])
def test_ctrl_c_saves_the_training_state_lists_it_and_says_how_to_resume(
    tmp_path: Path, loop: str
) -> None:
    """The first listing already has it, also if much was queued before it."""
    with interrupted(f"QUEUED = 500\n{loop}", tmp_path) as program:
        path = f"tinker://{program.hears()}/weights/autosave"
        assert program.hears() == "queued"
        program.ctrl_c()
        told = program.warns_of("tinsmith: saved ")
        assert program.ends() == -signal.SIGINT

    assert path in told
    assert path in listed(tmp_path)
    resume = re.search(r"resume with (create_\w+\(.*\))$", told)
    assert resume is not None
    run(f"step(tinsmith.ServiceClient().{resume.group(1)})", tmp_path)
    noise = [line for line in program.lines if "ignored" in line or "never retrieved" in line]
    assert not noise


@pytest.mark.parametrize("loop", [PLAIN, IN_BLOCK], ids=["plain", "in a with block"])
def test_after_a_second_ctrl_c_the_next_program_saves(tmp_path: Path, loop: str) -> None:
    """Saving is behind a long call: whoever does not want to wait for it need not."""
    with interrupted(SLOWLY + loop, tmp_path) as program:
        path = f"tinker://{program.hears()}/weights/autosave"
        assert {program.hears(), program.hears()} == {"queued", "running"}
        program.ctrl_c()
        program.warns_of("tinsmith: saving the trained models; press Ctrl-C again to skip")
        program.ctrl_c()
        told = program.warns_of(path)
        program.ends(within_s=20.0)  # saving is waited for for 30 s

    assert told.startswith("tinsmith: not saved yet: ")
    assert not [line for line in program.lines if "Error" in line]
    run(UNTIL_LISTED.format(path=path), tmp_path)
    assert path in listed(tmp_path)


def test_ctrl_c_during_a_model_download_ends_the_program_without_a_traceback(
    tmp_path: Path,
) -> None:
    """Nothing was trained, so there is nothing to say."""
    with socket.create_server(("127.0.0.1", 0)) as hub:  # takes connections, and never answers
        more = {
            "TINSMITH_SERVE_ENGINE": "embedded",
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
        }
        program = "tinsmith.ServiceClient().create_lora_training_client(MODEL, rank=8)"
        with interrupted(program, tmp_path, **more) as fetching:
            connection, _ = hub.accept()
            with connection:
                fetching.ctrl_c()
                assert fetching.ends() == -signal.SIGINT

    fetching.warns_of("KeyboardInterrupt")
    assert fetching.lines[-1] == "KeyboardInterrupt"
