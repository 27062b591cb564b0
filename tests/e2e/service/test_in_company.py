"""The whole: clients of three kinds at one service that is killed under them.

Two releases of the official SDK and our client run in processes of their own at the same time, each
with a key and a model of its own, and read what another published. The engine is the real one. Each
gets what it gets alone on a service that nothing happens to; see `in_company.py` for what they do.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tinsmith
from tests.compatibility.measure import Client, environment
from tests.compatibility.sdks import NEWEST, ROOT, folder_of
from tests.compatibility.targets import Target, faults
from tests.e2e.service.in_company import PUBLISHED_AFTER
from tests.e2e.service.served import BASE_MODEL, Served, serving
from tests.e2e.service.training_run import WAIT_S
from tests.numerics.small_models import make_model

CLIENTS = {
    "1": Client("official", "tinker", NEWEST),
    "2": Client("official of old", "tinker", "0.16.1"),
    "3": Client("ours", "tinsmith", NEWEST),
}
"""By seed, which is also the name of the tenant."""
READS = {"1": "2", "2": "3", "3": "1"}
"""Whose published checkpoint each reads. Alone, each reads its own."""
KILLED_AFTER = 2
"""Steps of every client."""
HOUR = datetime.timedelta(hours=1)


class Ended(NamedTuple):
    """What became of the clients, and what the service says of each."""

    told: dict[str, Any]
    """By seed, the last line that the client printed."""
    commands: dict[str, Counter[str]]
    """By tenant, how many of each kind the ledger holds."""
    unsettled: list[Any]
    """Commands that have no result, or that failed."""
    billed: dict[str, Counter[str]]
    """By tenant, the amounts of its bill."""


class Running:
    """A client in a process of its own."""

    def __init__(self, seed: str, other: str, served: Served, key: str, folder: Path) -> None:
        client = CLIENTS[seed]
        self.out, self.err = folder / f"client-{seed}.out", folder / f"client-{seed}.err"
        program = [sys.executable, "-W", "ignore", "-m", "tests.e2e.service.in_company"]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self._process = subprocess.Popen(
                [*program, client.kind, seed, other, str(folder)],
                cwd=ROOT,
                env=environment(client, Target(served.base_url, key)),
                stdout=out,
                stderr=err,
            )

    @property
    def steps_done(self) -> int:
        """How many steps of its training are over."""
        assert self._process.poll() in (None, 0), self.err.read_text()[-5000:]
        return self.out.read_text().count("\n")

    def told(self) -> Any:
        """What came of it, once it has ended."""
        code = self._process.wait(WAIT_S)
        assert code == 0, self.err.read_text()[-5000:]
        return json.loads(self.out.read_text().splitlines()[-1])

    def end(self) -> None:
        """Let nothing of it stay behind."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, vocab_size=1000)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """One client after another, at a service that nothing happens to."""

    def one_after_another(start: Callable[[str, str], Running], _: Served) -> dict[str, Any]:
        return {seed: start(seed, seed).told() for seed in CLIENTS}

    return _ended(tmp_path_factory.mktemp("alone"), model, one_after_another)


@pytest.fixture(scope="module")
def together(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """All at once, at a service that is killed when all are under way."""

    def all_at_once(start: Callable[[str, str], Running], served: Served) -> dict[str, Any]:
        running = {seed: start(seed, READS[seed]) for seed in CLIENTS}
        _wait(lambda: min(one.steps_done for one in running.values()) >= KILLED_AFTER)
        served.kill()
        # None has ended: each waits for another's checkpoint.
        assert min(one.steps_done for one in running.values()) <= PUBLISHED_AFTER
        served.start()
        return {seed: one.told() for seed, one in running.items()}

    return _ended(tmp_path_factory.mktemp("together"), model, all_at_once)


def _ended(
    folder: Path,
    model: Path,
    run: Callable[[Callable[[str, str], Running], Served], dict[str, Any]],
) -> Ended:
    keys = {seed: _key(folder, seed) for seed in CLIENTS}
    for client in CLIENTS.values():
        folder_of(client.release)  # fetched before anything waits for it
    how = ("--threads", "1", "--dtype", "float32")
    with (
        serving(folder, *how, engine="embedded", model=f"{BASE_MODEL}={model}") as served,
        _starting(folder, served, keys) as start,
    ):
        told = run(start, served)
        billed = {seed: _bill(served, key) for seed, key in keys.items()}
        assert served.stop() == 0, served.log_text()
        assert faults(served.log.read_text()) == []
    commands, unsettled = _ledger(folder / "data")
    return Ended(told, commands, unsettled, billed)


@contextlib.contextmanager
def _starting(
    folder: Path, served: Served, keys: dict[str, str]
) -> Iterator[Callable[[str, str], Running]]:
    """Starts clients, and lets none of them stay behind."""
    started: list[Running] = []

    def start(seed: str, other: str) -> Running:
        started.append(Running(seed, other, served, keys[seed], folder))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            one.end()


def _key(folder: Path, tenant: str) -> str:
    command = [sys.executable, "-m", "tinsmith", "key", "create", "--tenant", tenant]
    made = subprocess.run(
        [*command, "--data", str(folder / "data")], check=True, capture_output=True, text=True
    )
    return made.stdout.strip()


def _bill(served: Served, key: str) -> Counter[str]:
    """What a tenant used by its bill; what came from a cache is not told apart."""
    now = datetime.datetime.now(datetime.UTC)
    this_hour = now.replace(minute=0, second=0, microsecond=0)
    admin = tinsmith.AdminClient(base_url=served.base_url, api_key=key)
    usage = admin.get_billing_usage(this_hour - HOUR, this_hour + HOUR).result(WAIT_S)
    amounts: Counter[str] = Counter()
    for event in usage.data:
        info: Any = event.event_info
        if info.type != "storage":  # by the hour, so by chance
            amounts[info.type] += info.count if info.type == "checkpoint" else info.token_count
    return amounts


def _ledger(data: Path) -> tuple[dict[str, Counter[str]], list[Any]]:
    """The commands of each tenant by kind, and those that have no good result."""
    with contextlib.closing(sqlite3.connect(data / "ledger" / "ledger.sqlite3")) as ledger:
        rows = ledger.execute("SELECT tenant_id, kind, settled_at, is_failed FROM command_states")
        commands: dict[str, Counter[str]] = {}
        unsettled = []
        for tenant, kind, settled_at, is_failed in rows:
            commands.setdefault(tenant, Counter())[kind] += 1
            if settled_at is None or is_failed:
                unsettled.append((tenant, kind, settled_at, is_failed))
    return commands, unsettled


def _wait(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


@pytest.mark.parametrize("seed", CLIENTS)
def test_concurrent_clients_get_bit_identical_results_to_running_alone(
    seed: str, alone: Ended, together: Ended
) -> None:
    """Losses of every pass, and tokens and log-probabilities of every sample."""
    assert together.told[seed]["losses"] == alone.told[seed]["losses"]
    assert together.told[seed]["samples"] == alone.told[seed]["samples"]


@pytest.mark.parametrize("seed", CLIENTS)
def test_a_published_checkpoint_reads_the_same_for_every_client(
    seed: str, alone: Ended, together: Ended
) -> None:
    """Whatever SDK wrote it; samples from it and training on from it are the same."""
    assert together.told[seed]["read"] == alone.told[READS[seed]]["read"]


def test_each_client_computes_different_numbers(alone: Ended) -> None:
    """So that equal numbers are those of one client and not of all."""
    for what in ("losses", "samples", "read"):
        assert len({json.dumps(told[what]) for told in alone.told.values()}) == len(CLIENTS)


def test_no_command_is_lost_or_run_twice(alone: Ended, together: Ended) -> None:
    assert together.unsettled == []
    for seed, told in together.told.items():
        again = Counter(asample=_sampled_again(together, seed))
        assert together.commands[seed] - again == alone.commands[seed]
        assert {kind: alone.commands[seed][kind] for kind in told["asked"]} == told["asked"]


def test_each_tenant_is_billed_for_what_it_used(alone: Ended, together: Ended) -> None:
    """What was computed anew after the kill is not charged again."""
    for seed, told in together.told.items():
        assert alone.billed[seed] == alone.told[seed]["used"]
        if not _sampled_again(together, seed):
            assert together.billed[seed] == told["used"]
        else:
            more = together.billed[seed] - Counter(told["used"])
            assert set(more) <= {"sampling_prefill", "sampling_sample"}


def _sampled_again(ended: Ended, seed: str) -> int:
    """Samples that the client itself asked for again, since the kill took the answer.

    Ours asks with the number that it had; the official one takes another, so that nobody can tell.
    """
    more: int = ended.commands[seed]["asample"] - ended.told[seed]["asked"]["asample"]
    assert 0 <= more <= (0 if CLIENTS[seed].kind == "tinsmith" else 1)
    return more
