"""Every example runs to its end and says what it found."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 5
    assert "Traceback" not in done.stderr


def test_the_tour_of_the_client_shows_faults_that_cost_nothing() -> None:
    tour = ROOT / "examples" / "client_tour.py"

    said = subprocess.run(
        [sys.executable, str(tour)], capture_output=True, text=True, timeout=120, check=True
    ).stdout

    assert "[1, 3, 3, 5]: sent again, done once" in said
    assert "500 answers" in said
    assert "over 2 connections; as the whole answer: True" in said
    assert "the service was told 1 time" in said


def test_the_tour_of_the_service_loses_nothing_to_a_kill() -> None:
    tour = ROOT / "examples" / "service_tour.py"

    said = subprocess.run(
        [sys.executable, str(tour)], capture_output=True, text=True, timeout=240, check=True
    ).stdout

    assert "killed; the client is not told" in said
    assert "commands were run again" in said
    assert "are the same, to the last bit" in said
