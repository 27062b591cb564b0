"""A service whose engine has a process of its own: killing either one loses nothing."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.service.served import START_S, Served, serving
from tests.e2e.service.training_run import Runs, Weights
from tinsmith.service.run.supervisor import MOST_LOSSES

CLIENTS = 2
STEPS = 12


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """What each client's run ends with when nothing happens to it, in one process."""
    with serving(tmp_path_factory.mktemp("undisturbed")) as served:
        return Runs(served.base_url, CLIENTS, STEPS).results()


def test_a_killed_engine_is_restarted_until_it_crashed_too_often(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    """Then the service ends and says why; the next start goes on. No client sees any of it."""
    with serving(tmp_path, "--engine-process") as served:
        runs = Runs(served.base_url, CLIENTS, STEPS)
        killed: set[int] = set()
        for loss in range(MOST_LOSSES + 1):
            _wait(lambda: runs.steps_done > loss)  # noqa: B023 - called at once
            _wait(lambda: bool(_children(served) - killed))
            [child] = _children(served) - killed
            os.kill(child, signal.SIGKILL)
            killed.add(child)
            if loss < MOST_LOSSES:
                _wait(lambda: _readiness(served)["status"] == "ready")
        status = served.wait_end()
        told = served.log_text()
        served.start()

        assert status == 1
        assert "tinsmith: the process of the engine 'fake' has ended" in told
        assert "ran out of memory" in told
        assert runs.results() == undisturbed


def test_the_engine_process_ends_when_its_service_is_killed(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    """And the next service has one of its own."""
    with serving(tmp_path, "--engine-process") as served:
        runs = Runs(served.base_url, CLIENTS, STEPS)
        _wait(lambda: runs.steps_done > 0)
        [child] = _children(served)
        served.kill()
        _wait(lambda: not Path(f"/proc/{child}").exists())
        served.start()

        assert runs.results() == undisturbed
        assert served.stop() == 0


def _children(served: Served) -> set[int]:
    """Processes that the service has started and that run."""
    text = "".join(
        place.read_text() for place in Path(f"/proc/{served.pid}/task").glob("*/children")
    )
    return {int(pid) for pid in text.split()}


def _readiness(served: Served) -> dict[str, str]:
    try:
        with urllib.request.urlopen(f"{served.base_url}/readyz", timeout=START_S) as reply:
            answer: dict[str, str] = json.load(reply)
    except urllib.error.HTTPError as exc:
        with exc:
            answer = json.load(exc)
    return answer


def _wait(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
