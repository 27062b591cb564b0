"""Of all servers on one PostgreSQL database one runs commands, whatever happens to connections.

A server whose connections are cut, or which is paused while another one takes over, must not go on:
two schedulers that train the same models give neither the result of either.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg

import tinsmith
from tests.contract import postgres_server
from tests.e2e.service.ready_road import ReadyRoad, ready_road
from tests.e2e.service.served import BASE_MODEL, Served
from tests.e2e.service.training_run import API_KEY, WAIT_S, datum_of
from tinsmith.types import AdamParams

LEASE_S = 2.0
LOOK_S = 0.02
CLIENTS = 4
STEPS = 25
DROPS = 200
"""How often all connections to the database are dropped."""

Losses = list[float]


def test_a_second_server_cannot_start_while_the_first_reconnects(tmp_path: Path) -> None:
    """The second one ends with the reason; no two ever say that they are ready."""
    with _database() as database, _servers(tmp_path, database, 2) as (first, second):
        first.start()
        second.start(wait=False)

        while second.is_running:
            database.drop(first)
            assert not (_is_ready(first) and _is_ready(second) and _is_ready(first))
            time.sleep(0.1)
        assert second.wait_end() != 0
        assert "another server is using this database" in second.log_text()
        _until(lambda: _is_ready(first))


def test_a_paused_server_exits_if_another_took_over(tmp_path: Path) -> None:
    with _database() as database, _servers(tmp_path, database, 2) as (first, second):
        first.start()
        first.pause()
        database.drop(first)
        second.start()

        first.go_on()

        while first.is_running:
            assert not _is_ready(first)
        assert "another server is using this database" in first.log_text()
        assert _is_ready(second)


def test_a_paused_server_continues_if_no_other_took_over(tmp_path: Path) -> None:
    with _database() as database, _servers(tmp_path, database, 1) as (only,):
        only.start()
        only.pause()
        database.drop(only)
        time.sleep(2 * LEASE_S)

        only.go_on()

        _until(lambda: _is_ready(only))


def test_the_next_server_waits_for_the_lease_only_after_a_kill(
    tmp_path: Path,
) -> None:
    with _database() as database, _servers(tmp_path, database, 2) as (first, second):
        first.start()
        assert first.stop() == 0, first.log_text()
        assert database.is_free()
        second.start()
        second.kill()
        assert not database.is_free()
        first.start()


def test_two_servers_never_run_at_a_time_through_drops_stops_kills_and_pauses(
    tmp_path: Path,
) -> None:
    """Every loss and every weight is what it is without all that."""
    with _database() as database, _servers(tmp_path / "calm", database, 1) as (calm,):
        calm.start()
        undisturbed = _train_all(calm.base_url, STEPS).results()
    with (
        _database() as database,
        _servers(tmp_path / "wild", database, 3) as servers,
        ready_road() as road,
    ):
        servers[0].start()
        road.lead_to(servers[0].port)
        database.watch_leases()
        runs = _train_all(road.base_url, STEPS)
        trouble = Trouble(database, list(servers), road)
        while not runs.are_over or database.drops < DROPS:
            trouble.make()
            if runs.are_over and database.drops < DROPS:
                assert runs.results() == undisturbed
                runs = _train_all(road.base_url, STEPS)

        assert runs.results() == undisturbed
        assert trouble.takeovers >= 5
        database.check_one_writer(trouble.takeovers)


class Trouble:
    """What happens to servers.

    All their connections are dropped, again and again, while the one that works is stopped, killed
    or paused and another one takes its place.
    """

    def __init__(self, database: Database, servers: list[LeasedServer], road: ReadyRoad) -> None:
        self._database = database
        self._servers = servers
        self._road = road
        self._chance = random.Random(7)
        self.takeovers = 0

    def make(self) -> None:
        """Some drops, then a takeover."""
        working, following, *_ = self._servers
        for _ in range(self._chance.randint(5, 15)):
            self._database.drop()
            time.sleep(self._chance.uniform(0.0, 0.2))
        self._road.hold()
        what = self._chance.choice(["stop", "kill", "pause"])
        if what == "kill":
            working.kill()
        elif what == "pause":
            working.pause()
        following.start(wait=False)
        if what == "stop":
            working.send(signal.SIGTERM)
        while not _is_ready(following):
            assert following.is_running, following.log_text()
            if self._chance.random() < 0.5:
                self._database.drop()
            time.sleep(0.1)
        self._road.lead_to(following.port)
        if what == "pause":
            working.go_on()
            _until(lambda: not working.is_running)
        working.end()
        self._servers = [following, *self._servers[2:], working]
        self.takeovers += 1


class LeasedServer(Served):
    """A server with a short lease, and a name of its own at the database."""

    def __init__(self, folder: Path, dsn: str, checkpoints: Path) -> None:
        self.user = f"server_{secrets.token_hex(4)}"
        dsn = dsn.replace("://postgres:", f"://{self.user}:")
        super().__init__(
            folder,
            *("--database", dsn, "--checkpoints", str(checkpoints)),
            *("--lease-s", str(LEASE_S), "--snapshots-every-commands", "10"),
        )

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self._process is not None and self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def pause(self) -> None:
        """Stop it where it is."""
        self.send(signal.SIGSTOP)

    def go_on(self) -> None:
        self.send(signal.SIGCONT)


@contextlib.contextmanager
def _servers(folder: Path, database: Database, count: int) -> Iterator[list[LeasedServer]]:
    """Servers with data folders of their own, and one store of checkpoints."""
    servers = []
    for number in range(count):
        own = folder / str(number)
        (own / "data").mkdir(parents=True)
        (own / "data" / "secret").write_bytes(b"s" * 32)  # tokens of one are good for all
        servers.append(LeasedServer(own, database.dsn, folder / "checkpoints"))
        database.ask(f"CREATE ROLE {servers[-1].user} LOGIN SUPERUSER")
    try:
        yield servers
    finally:
        for server in servers:
            server.end()


class Database:
    """The database, as its operator sees it."""

    def __init__(self) -> None:
        self.dsn = postgres_server.new_database()
        self.drops = 0
        self._runner = asyncio.Runner()
        self._connection: Any = self._runner.run(asyncpg.connect(self.dsn))

    def close(self) -> None:
        self._runner.run(self._connection.close())
        self._runner.close()

    def ask(self, sql: str) -> list[Any]:
        rows: list[Any] = self._runner.run(self._connection.fetch(sql))
        return rows

    def drop(self, server: LeasedServer | None = None) -> None:
        """Drop all connections of a server, or of all of them."""
        users = "server_%" if server is None else server.user
        self.ask(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            f"WHERE usename LIKE '{users}' AND datname = current_database()"
        )
        self.drops += 1

    def is_free(self) -> bool:
        """Whether nobody holds the lease."""
        return bool(self.ask("SELECT expires_at <= clock_timestamp() FROM lease")[0][0])

    def watch_leases(self) -> None:
        """Have the database note every change of the lease."""
        self._runner.run(self._connection.execute(WATCH))

    def check_one_writer(self, takeovers: int) -> None:
        """What was written says who wrote it: never two in turns, never two leases at a time."""
        settled = [epoch for (epoch,) in self.ask("SELECT epoch FROM results ORDER BY ordinal")]
        assert settled == sorted(settled)
        assert len(set(settled)) >= 3, "several servers have worked"
        strays = self.ask(
            "SELECT 1 FROM commands c JOIN results r ON r.command = c.ordinal "
            "WHERE c.claimed_epoch <> r.epoch"
        )
        assert not strays
        taken = self.ask(
            "SELECT was, becomes, expired <= taken AS is_over FROM lease_log "
            "WHERE was <> becomes ORDER BY number"
        )
        assert len(taken) >= takeovers
        assert [row["becomes"] for row in taken] == [row["was"] + 1 for row in taken]
        assert all(row["is_over"] for row in taken)


WATCH = """
CREATE TABLE lease_log (
    number BIGINT GENERATED ALWAYS AS IDENTITY, was BIGINT, becomes BIGINT,
    expired TIMESTAMPTZ, taken TIMESTAMPTZ
);
CREATE FUNCTION note_lease() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO lease_log (was, becomes, expired, taken)
    VALUES (OLD.epoch, NEW.epoch, OLD.expires_at, clock_timestamp());
    RETURN NEW;
END $$;
CREATE TRIGGER note_lease AFTER UPDATE ON lease FOR EACH ROW EXECUTE FUNCTION note_lease();
"""


@contextlib.contextmanager
def _database() -> Iterator[Database]:
    database = Database()
    try:
        yield database
    finally:
        database.close()


def _is_ready(server: Served) -> bool:
    try:
        with urllib.request.urlopen(f"{server.base_url}/readyz", timeout=2.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(LOOK_S)


class Training:
    """Clients that train, each on a thread of its own."""

    def __init__(self, base_url: str, steps: int) -> None:
        pool = ThreadPoolExecutor(CLIENTS)
        self._runs = [pool.submit(_train, base_url, seed, steps) for seed in range(CLIENTS)]

    @property
    def are_over(self) -> bool:
        return all(run.done() for run in self._runs)

    def results(self) -> list[Losses]:
        """The losses of each, and what its weights make of a fixed text at the end."""
        return [run.result(WAIT_S) for run in self._runs]


def _train_all(base_url: str, steps: int) -> Training:
    return Training(base_url, steps)


def _train(base_url: str, seed: int, steps: int) -> Losses:
    chance, told = random.Random(seed), Losses()
    with tinsmith.ServiceClient(base_url=base_url, api_key=API_KEY) as service:
        training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed)
        for step in range(steps):
            passed = training.forward_backward([datum_of(chance)], "cross_entropy")
            stepped = training.optim_step(AdamParams(learning_rate=0.05))
            told.append(passed.result(WAIT_S).metrics["loss:sum"])
            stepped.result(WAIT_S)
            if step % 5 == 4:
                training.save_state("latest", overwrite=True).result(WAIT_S)
        last = service.create_training_client_from_state(
            training.save_state("last").result(WAIT_S).path
        )
        for one in (training, last):
            probe = one.forward([datum_of(random.Random(0))], "cross_entropy").result(WAIT_S)
            told += probe.loss_fn_outputs[0]["logprobs"].tolist()
    return told
