"""Whatever befalls the service, every client finishes, with the weights of an undisturbed run."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract import postgres_server
from tests.e2e.service.bad_road import bad_road
from tests.e2e.service.served import Served, serving
from tests.e2e.service.training_run import Runs, Weights, train

CLIENTS = 8
STEPS = 12
KILLS = 20
OUTAGE_S = 8.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """What each client's run ends with when nothing happens to it."""
    with serving(tmp_path_factory.mktemp("undisturbed")) as served:
        return Runs(served.base_url, CLIENTS, STEPS).results()


def test_runs_with_different_seeds_have_different_weights(undisturbed: list[Weights]) -> None:
    assert len(set(undisturbed)) == CLIENTS


def test_repeated_kills_of_the_service_do_not_change_the_final_weights(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    chance = random.Random(1)
    kills = 0
    with serving(tmp_path) as served:
        for round_number in itertools.count():
            runs = Runs(served.base_url, CLIENTS, STEPS)
            while not runs.are_over and kills < KILLS:
                time.sleep(chance.uniform(0.05, 1.0))
                served.kill()
                kills += 1
                served.start(wait=kills % 3 != 0)  # now and then it dies while it is recovering
            served.wait_ready()
            assert runs.results() == undisturbed, f"in round {round_number}"
            if kills >= KILLS:
                break


def test_lost_repeated_and_late_requests_do_not_change_the_weights(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    with serving(tmp_path) as served, bad_road(served.port, seed=2) as road:
        runs = Runs(f"http://127.0.0.1:{road.port}", CLIENTS, STEPS)

        assert runs.results() == undisturbed
        assert min(road.met.values()) > 0, road.met


def test_a_full_disk_delays_clients_but_loses_nothing(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    with serving(tmp_path) as served:
        runs = Runs(served.base_url, CLIENTS, STEPS)
        _wait(lambda: runs.steps_done >= CLIENTS)
        largest = max(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file())
        unlimited = resource.RLIM_INFINITY

        resource.prlimit(served.pid, resource.RLIMIT_FSIZE, (largest // 2, unlimited))
        time.sleep(3.0)
        resource.prlimit(served.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))

        assert runs.results() == undisturbed


@pytest.mark.parametrize("lease_s", [30, 2])
def test_a_temporarily_unavailable_database_is_waited_for(
    tmp_path: Path, undisturbed: list[Weights], lease_s: int
) -> None:
    """Also for so long that the scheduler loses its lease; it takes it again then."""
    address = postgres_server.new_database()
    with serving(tmp_path, "--database", address, "--lease-s", str(lease_s)) as served:
        runs = Runs(served.base_url, CLIENTS, STEPS)
        _wait(lambda: runs.steps_done >= CLIENTS)

        with postgres_server.stopped():
            time.sleep(OUTAGE_S)

        assert runs.results() == undisturbed
        assert ("restarts with epoch" in served.log_text()) == (lease_s < OUTAGE_S)


def test_runs_continue_over_a_graceful_stop_and_restart(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    with serving(tmp_path) as served:
        runs = Runs(served.base_url, CLIENTS, STEPS)
        for step in (CLIENTS, 3 * CLIENTS):
            _wait(lambda step=step: runs.steps_done >= step)  # type: ignore[misc]
            assert served.stop() == 0, served.log_text()
            served.start()

        assert runs.results() == undisturbed


def test_runs_continue_after_the_service_was_paused_with_sigstop(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    with serving(tmp_path) as served:
        runs = Runs(served.base_url, CLIENTS, STEPS)
        _wait(lambda: runs.steps_done >= CLIENTS)

        os.kill(served.pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(served.pid, signal.SIGCONT)

        assert runs.results() == undisturbed


def test_clock_jumps_do_not_expire_sessions_or_results(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    program = (str(Path(__file__).with_name("jumping_clock.py")), str(offset))
    with serving(tmp_path, program=program) as served:
        runs = Runs(served.base_url, CLIENTS, STEPS)
        for steps, days in ((CLIENTS, 30), (2 * CLIENTS, -60), (3 * CLIENTS, -90)):
            _wait(lambda steps=steps: runs.steps_done >= steps)  # type: ignore[misc]
            written = offset.with_suffix(".new")
            written.write_text(str(days * 24 * 3600))
            written.replace(offset)  # it is never half there
        served.kill()
        served.start()

        assert runs.results() == undisturbed


def test_starting_without_the_checkpoint_disk_mounted_loses_no_model(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    """A service that began with an empty folder would find no snapshot, and give up all models."""
    checkpoints, away = tmp_path / "data" / "checkpoints", tmp_path / "away"
    with serving(tmp_path, "--snapshots-every-commands", "4") as served:
        runs = Runs(served.base_url, CLIENTS, STEPS)
        _wait(lambda: runs.steps_done >= 3 * CLIENTS)
        served.kill()
        checkpoints.rename(away)
        checkpoints.mkdir()
        served.start(wait=False)
        status = served.wait_end()
        checkpoints.rmdir()
        away.rename(checkpoints)
        served.start()

        assert status != 0
        assert "check that its disk is mounted" in served.log_text()
        assert runs.results() == undisturbed


def test_a_second_service_on_the_same_folder_is_rejected(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        second = Served(tmp_path)
        second.log = tmp_path / "second.log"
        second.start(wait=False)

        assert second.wait_end() != 0
        assert "already" in second.log_text() or "another" in second.log_text()
        assert train(first.base_url, 0, 1)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
