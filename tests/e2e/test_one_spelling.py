"""Programs that spell each call once, for threads and coroutines, as since 0.38 of the SDK."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compatibility.targets import Target, served

PROGRAMS = Path(__file__).with_name("one_spelling")
BATCHES = Path(__file__).with_name("programs")
TIME_LIMIT_S = 300


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """`tinsmith serve` with a small model."""
    with served(tmp_path_factory.mktemp("one-spelling")) as target:
        yield target


def output_of(name: str, service: Target) -> list[str]:
    """What a program prints; a warning of any kind is an error."""
    program = str(PROGRAMS / f"{name}.py")
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tinsmith.as_tinker", program],
        env={
            **os.environ,
            "PYTHONPATH": str(BATCHES),
            "TINKER_BASE_URL": service.base_url,
            "TINKER_API_KEY": service.api_key,
        },
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert finished.stderr == ""
    return finished.stdout.splitlines()


@pytest.fixture(scope="module")
def losses_of_sync(service: Target) -> list[str]:
    return output_of("sync", service)


def test_a_program_without_coroutines_trains(losses_of_sync: list[str]) -> None:
    starts = ["step 0:", "step 1:", "step 2:", "sampled [", "resumed ", "run of Qwen/Qwen3-8B"]

    assert [line[: len(start)] for line, start in zip(losses_of_sync, starts, strict=True)] == (
        starts
    )


@pytest.mark.parametrize("name", ["coroutines", "pipelined", "direct"])
def test_every_spelling_computes_the_same(
    name: str, service: Target, losses_of_sync: list[str]
) -> None:
    """The losses of the steps, the sample, and the loss after resuming, to the last bit."""
    assert output_of(name, service) == losses_of_sync


def test_a_thousand_samples_are_gathered(service: Target) -> None:
    assert output_of("gathered_samples", service) == [
        "1000 samples, 1 to 2 tokens",
        "the same again: True",
    ]


def test_samples_are_standard_futures_and_tasks(service: Target) -> None:
    first, second = output_of("callbacks", service)

    assert first.startswith("4 completed, callbacks called: True, [")
    assert second.startswith("a task gave ")
