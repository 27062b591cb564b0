"""API servers, schedulers with replicas, PostgreSQL and S3: real processes that faults happen to.

A fault begins, lasts for a while, and is undone. Each has a *target*, and one target has one fault
at a time; otherwise faults overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import asyncpg

from tests.contract import postgres_server
from tests.contract.s3_server import BUCKET, S3Server
from tests.e2e.chaos.balancer import balancer
from tests.e2e.service.served import BASE_MODEL, START_S, Served

LEASE_S = 2.0
SNAPSHOT_COMMANDS = 12
LOOK_S = 0.05

AUDIT = """
CREATE TABLE chaos_settlements (command BIGINT NOT NULL, change TEXT NOT NULL);
CREATE FUNCTION chaos_note_result() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_settlements VALUES (coalesce(NEW.command, OLD.command), TG_OP);
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_results AFTER INSERT OR DELETE ON results
FOR EACH ROW EXECUTE FUNCTION chaos_note_result();
CREATE FUNCTION chaos_note_reopened() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_settlements VALUES (NEW.ordinal, 'REOPENED');
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_commands AFTER UPDATE ON commands
FOR EACH ROW WHEN (OLD.state = 2 AND NEW.state <> 2) EXECUTE FUNCTION chaos_note_reopened();
"""
"""Has the database itself note each settlement, and whatever else happens to a settled command."""


class ChaosServer(Served):
    """A server of one role, which can be paused."""

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self._process is not None and self._process.poll() is None

    def replica_pids(self) -> list[int]:
        """The processes of its replicas."""
        if not self.is_running:
            return []
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
            return [int(pid) for pid in children.split()]
        return []


class Fault(NamedTuple):
    """Something that may happen to a cluster."""

    name: str
    target: str
    begin: Callable[[Cluster, random.Random], Callable[[], None]]
    """Does it, and returns what undoes it."""
    longest_s: float


class Cluster:
    """Servers that share a database and a bucket, each a process of its own.

    Args:
        folder: For everything that they keep.
        database: The address of the database.
        store: The S3 server.
        arguments: Of the schedulers, such as their engine and their replicas.
        engine: The name of the engine.
        model: `NAME=FOLDER`, or a name for the fake engine.
    """

    def __init__(
        self,
        folder: Path,
        database: str,
        store: S3Server,
        *arguments: str,
        engine: str = "fake",
        model: str = BASE_MODEL,
    ) -> None:
        self.database = database
        self.store = store
        self.model = model.partition("=")[0]
        common = (
            *("--database", database, "--checkpoints", f"s3://{BUCKET}/{folder.name}"),
            *("--lease-s", str(LEASE_S)),
            *("--snapshots-every-commands", str(SNAPSHOT_COMMANDS)),
        )

        def server(role: str, number: int, *more: str) -> ChaosServer:
            own = folder / f"{role}-{number}"
            own.mkdir(parents=True)
            return ChaosServer(own, "--role", role, *common, *more, engine=engine, model=model)

        self.apis = [server("api", number) for number in range(2)]
        self.schedulers = [server("scheduler", number, *arguments) for number in range(2)]

    @property
    def servers(self) -> list[ChaosServer]:
        """All of them."""
        return [*self.apis, *self.schedulers]

    def start(self) -> None:
        """Start everything; returns when requests are answered and commands are run."""
        for server in [*self.schedulers, *self.apis]:
            server.start(wait=False)
        for api in self.apis:
            api.wait_ready()
        wait_until(lambda: any(is_working(one) for one in self.schedulers), self.logs)
        self.execute(AUDIT)

    def end(self) -> None:
        """Let nothing of it stay behind."""
        for server in self.servers:
            for pid in server.replica_pids():
                _signal(pid, signal.SIGKILL)
            server.end()

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query of the database."""

        async def run() -> list[tuple[Any, ...]]:
            connection = await asyncpg.connect(self.database)
            try:
                return [tuple(row) for row in await connection.fetch(query)]
            finally:
                await connection.close()

        return asyncio.run(run())

    def execute(self, statements: str) -> None:
        """Run statements in the database."""

        async def run() -> None:
            connection = await asyncpg.connect(self.database)
            try:
                await connection.execute(statements)
            finally:
                await connection.close()

        asyncio.run(run())

    def logs(self) -> str:
        """What all servers have printed last."""
        return "\n".join(f"{one.folder.name}:\n{one.log_text()[-4000:]}" for one in self.servers)


def kill_replica(cluster: Cluster, chance: random.Random) -> Callable[[], None]:
    """A replica of the scheduler that works, or of the one that stands by."""
    _signal(_replica(cluster, chance), signal.SIGKILL)
    return lambda: None


def pause_replica(cluster: Cluster, chance: random.Random) -> Callable[[], None]:
    """It neither computes nor answers for a while."""
    pid = _replica(cluster, chance)
    _signal(pid, signal.SIGSTOP)
    return lambda: _signal(pid, signal.SIGCONT)


def _replica(cluster: Cluster, chance: random.Random) -> int:
    choice = chance.random()
    wait_until(lambda: any(one.replica_pids() for one in cluster.schedulers), cluster.logs)
    # Rather the one that works: the other's replicas hold nothing.
    schedulers = sorted(cluster.schedulers, key=lambda one: not is_working(one))
    found = [one.replica_pids() for one in schedulers]
    pids = next((pids for pids in found if pids), [0])
    return pids[int(choice * len(pids))]


def kill_api(cluster: Cluster, chance: random.Random) -> Callable[[], None]:
    """Its clients lose their connections, and what they have sent may have arrived."""
    return _killed(chance.choice(cluster.apis), wait=True)


def pause_api(cluster: Cluster, chance: random.Random) -> Callable[[], None]:
    """It accepts connections, and does not answer."""
    return _paused(chance.choice(cluster.apis))


def kill_scheduler(cluster: Cluster, chance: random.Random) -> Callable[[], None]:
    """The one that works, or the one that stands by."""
    return _killed(chance.choice(cluster.schedulers))


def pause_scheduler(cluster: Cluster, chance: random.Random) -> Callable[[], None]:
    """For longer than its lease, so that it goes on when another one works already."""
    return _paused(chance.choice(cluster.schedulers))


def kill_both_schedulers(cluster: Cluster, _: random.Random) -> Callable[[], None]:
    """Nothing runs until one is started again."""
    undo = [_killed(one) for one in cluster.schedulers]

    def restart() -> None:
        for one in undo:
            one()

    return restart


def drop_connections(cluster: Cluster, _: random.Random) -> Callable[[], None]:
    """All servers lose all their connections to the database."""
    cluster.fetch(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    return lambda: None


def stop_store(cluster: Cluster, _: random.Random) -> Callable[[], None]:
    """The S3 server is gone; what it has kept is there when it comes back."""
    cluster.store.stop()
    return cluster.store.start


def _killed(server: ChaosServer, *, wait: bool = False) -> Callable[[], None]:
    if server.is_running:
        server.kill()

    def restart() -> None:
        if not server.is_running:
            server.start(wait=wait)

    return restart


def _paused(server: ChaosServer) -> Callable[[], None]:
    if not server.is_running:
        return lambda: None
    pid = server.pid
    _signal(pid, signal.SIGSTOP)
    return lambda: _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


FAULTS = (
    Fault("kill a replica", "replica", kill_replica, 0.2),
    Fault("pause a replica", "replica", pause_replica, 3.0),
    Fault("kill an API server", "api", kill_api, 1.0),
    Fault("pause an API server", "api", pause_api, 3.0),
    Fault("kill a scheduler", "scheduler", kill_scheduler, 2.0),
    Fault("pause a scheduler", "scheduler", pause_scheduler, 3 * LEASE_S),
    Fault("kill both schedulers", "scheduler", kill_both_schedulers, 1.0),
    Fault("drop the database's connections", "database", drop_connections, 0.2),
    Fault("stop the store", "store", stop_store, 5.0),
)


def is_working(scheduler: Served) -> bool:
    """Whether it runs commands, and does not stand by, as it says at `/readyz`."""
    try:
        with urllib.request.urlopen(f"{scheduler.base_url}/readyz", timeout=2.0) as reply:
            return bool(json.load(reply)["status"] == "ready")
    except OSError:
        return False


def wait_until(is_so: Callable[[], bool], why: Callable[[], str] = str) -> None:
    """Return when something is so."""
    deadline = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(LOOK_S)


@contextlib.contextmanager
def cluster(folder: Path, *arguments: str, **chosen: str) -> Iterator[tuple[Cluster, list[str]]]:
    """A running cluster, and the addresses of its API servers: that of a load balancer first."""
    store = S3Server(folder / "s3")
    with patch.dict(os.environ, store.environment()):
        store.start()
        store.make_bucket()
        database = postgres_server.new_database()
        made = Cluster(folder / "servers", database, store, *arguments, **chosen)
        try:
            made.start()
            with balancer([one.port for one in made.apis]) as road:
                yield made, [road.base_url, *(one.base_url for one in made.apis)]
        finally:
            made.end()
            store.remove()
