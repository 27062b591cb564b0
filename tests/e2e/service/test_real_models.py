"""`tinsmith serve` with the embedded engine, from real SDKs to real tensors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.e2e.service.learning import TEXT
from tests.e2e.service.served import BASE_MODEL, START_S, Served, serving
from tests.e2e.service.training_run import WAIT_S, Runs, Weights
from tests.numerics.small_models import make_model

CLIENTS = 2
STEPS = 6
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, vocab_size=1000)
    return folder


def _serving(folder: Path, model: Path) -> AbstractContextManager[Served]:
    chosen = f"{BASE_MODEL}={model}"
    how = ("--threads", "1", "--dtype", "float32")
    return serving(folder, *how, engine="embedded", model=chosen)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service that nothing happens to."""
    with _serving(tmp_path_factory.mktemp("served"), model) as served:
        yield served


@pytest.mark.parametrize("sdk", ["tinsmith", "tinker"])
def test_a_model_learns_a_text_and_reproduces_it(served: Served, sdk: str) -> None:
    """Trained, saved, sampled and trained on from what was saved; see `learning.py`."""
    told = subprocess.run(
        [sys.executable, "-m", "tests.e2e.service.learning", sdk, served.base_url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )

    assert told.returncode == 0, told.stderr[-5000:]
    learned = json.loads(told.stdout)
    assert learned["losses"][-1] < 0.2 * learned["losses"][0]
    assert learned["said"] == [TEXT[1:], TEXT[1:]]
    assert learned["resumed"] == learned["went_on"]


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> list[Weights]:
    """What each client's run ends with when nothing happens to it."""
    return Runs(served.base_url, CLIENTS, STEPS).results()


def test_a_killed_service_or_engine_resumes_with_identical_weights(
    tmp_path: Path, model: Path, undisturbed: list[Weights]
) -> None:
    """Bit for bit, and no client sees any of it."""
    with _serving(tmp_path, model) as served:
        runs = Runs(served.base_url, CLIENTS, STEPS)
        _wait(lambda: runs.steps_done >= 1)
        served.kill()
        served.start()
        _wait(lambda: runs.steps_done >= 3)
        [engine] = _children(served)
        os.kill(engine, signal.SIGKILL)

        assert runs.results() == undisturbed
        assert _children(served) != {engine}


def _children(served: Served) -> set[int]:
    """Processes that the service has started and that run."""
    found: set[int] = set()
    for place in Path(f"/proc/{served.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            found |= {int(pid) for pid in place.read_text().split()}
    return found


def _wait(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
