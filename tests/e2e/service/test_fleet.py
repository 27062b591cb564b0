"""A service whose engine is a fleet: replicas are killed and drained, and no client sees it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.service.served import BASE_MODEL, START_S, Served, serving
from tests.e2e.service.training_run import Runs, Weights
from tests.numerics.small_models import make_model

CLIENTS = 3
STEPS = 40
ENGINES = ["fake", "embedded"]


def _model(engine: str, folder: Path) -> str:
    if engine == "fake":
        return BASE_MODEL
    place = folder / "model"
    if not place.exists():
        make_model(place, "Llama", vocab_size=1000, hidden_size=32)
    return f"{BASE_MODEL}={place}"


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """What computes."""
    return str(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the small model is."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def undisturbed(
    engine: str, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Weights]:
    """What each client's run ends with when nothing happens to it, in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    model = _model(engine, models)
    with serving(folder, "--threads", "1", engine=engine, model=model) as served:
        return Runs(served.base_url, CLIENTS, STEPS).results()


def _fleet(served: Served, *words: str) -> Any:
    """What `tinsmith fleet` tells."""
    where = ("--data", str(served.folder / "data"), "--format", "json")
    told = subprocess.run(
        [sys.executable, "-m", "tinsmith", "fleet", *words, *where],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def _replicas(served: Served) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in _fleet(served)["replicas"]}


def _wait(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def test_a_killed_and_a_drained_replica_change_no_bit(
    engine: str, models: Path, undisturbed: list[Weights], tmp_path: Path
) -> None:
    """All runs end with the weights of an engine in one process that nothing happened to."""
    replicas = ("--replica", "count=3,name=r,threads=1")
    model = _model(engine, models)
    with serving(tmp_path, *replicas, engine=engine, model=model) as served:
        _wait(lambda: len(_replicas(served)) == 3)
        before = _replicas(served)
        victim, other, third = before
        runs = Runs(served.base_url, CLIENTS, STEPS)
        _wait(lambda: runs.steps_done > CLIENTS)  # each replica has a model
        os.kill(before[victim]["pid"], signal.SIGKILL)
        assert _fleet(served, "drain", other)["wants_drained"]

        assert runs.results() == undisturbed
        _wait(lambda: _replicas(served)[other]["state"] == "drained")
        _wait(lambda: _replicas(served)[victim]["state"] == "running")
        after = _replicas(served)
        assert after[victim]["pid"] != before[victim]["pid"]
        assert (after[other]["pid"], after[other]["adapters"]) == (None, [])
        assert [after[name]["losses"] for name in (victim, other, third)] == [1, 0, 0]
        told = served.log.read_text()
        assert re.search(rf"replica {victim} was lost with [1-9]\d* models", told)
        assert "restored model" in told
        assert "SIGKILL" in after[victim]["last_loss"]
        assert served.stop() == 0


def test_a_wish_that_cannot_be_granted_is_answered_and_one_outlives_a_restart(
    tmp_path: Path,
) -> None:
    """The last replica is not drained; a drained one stays closed until it is resumed."""
    with serving(tmp_path, "--replica", "count=2,name=r") as served:
        _wait(lambda: len(_replicas(served)) == 2)
        _fleet(served, "drain", "r-0")
        _wait(lambda: _replicas(served)["r-0"]["state"] == "drained")
        _fleet(served, "drain", "r-1")
        _wait(lambda: _replicas(served)["r-1"]["problem"] is not None)
        refused = _replicas(served)["r-1"]
        assert "the only one that trains" in refused["problem"]
        assert (refused["wants_drained"], refused["state"]) == (False, "running")
        served.kill()
        served.start()
        _wait(lambda: _replicas(served)["r-0"]["state"] == "drained")
        _fleet(served, "resume", "r-0")
        _wait(lambda: _replicas(served)["r-0"]["state"] == "running")
        assert served.stop() == 0
