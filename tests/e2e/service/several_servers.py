"""Several servers over one PostgreSQL database, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.contract import postgres_server
from tests.e2e.service.served import Served
from tests.e2e.service.training_run import WAIT_S

LEASE_S = 2.0
LOOK_S = 0.02


class RoleServer(Served):
    """A server with one role."""

    def __init__(self, folder: Path, role: str, database: str, checkpoints: Path, *more: str):
        folder.mkdir(parents=True)
        self.role = role
        super().__init__(
            folder,
            *("--role", role, "--database", database, "--checkpoints", checkpoints.as_uri()),
            *("--lease-s", str(LEASE_S), "--snapshots-every-commands", "10", *more),
        )

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self._process is not None and self._process.poll() is None

    def pause(self) -> None:
        """Stop it where it is."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue it."""
        os.kill(self.pid, signal.SIGCONT)

    def told(self) -> dict[str, Any]:
        """What it says of itself at `/readyz`; empty if it does not answer."""
        return ready_status(self.base_url)

    def wait_status(self, status: str) -> None:
        """Return when it says so at `/readyz`."""
        until(lambda: self.told().get("status") == status, self.log_text)


class Fleet:
    """API servers and schedulers that share a database and a folder of checkpoints."""

    def __init__(self, folder: Path, *more: str, database: str | None = None) -> None:
        self.database = database or postgres_server.new_database()
        self._folder = folder
        self._more = more
        self.servers: list[RoleServer] = []

    def add(self, role: str, *more: str) -> RoleServer:
        """One more server, not started."""
        name = f"{role}-{len(self.servers)}"
        checkpoints = self._folder / "checkpoints"
        server = RoleServer(
            self._folder / name, role, self.database, checkpoints, *self._more, *more
        )
        self.servers.append(server)
        return server

    def start(self, role: str, *more: str) -> RoleServer:
        """One more server, started, which may not be ready yet."""
        server = self.add(role, *more)
        server.start(wait=False)
        return server

    def start_all(self, apis: int = 2, schedulers: int = 2) -> tuple[list[RoleServer], ...]:
        """Servers that are ready; the first scheduler works, the others stand by."""
        working = self.start("scheduler")
        started = [self.start("api") for _ in range(apis)]
        working.wait_status("ready")
        standing_by = [self.start("scheduler") for _ in range(schedulers - 1)]
        for one in started:
            one.wait_ready()
        for one in standing_by:
            one.wait_status("standby")
        return started, [working, *standing_by]

    def logs(self) -> str:
        """What all of them have printed."""
        return "\n".join(f"{one.folder.name}:\n{one.log_text()[-3000:]}" for one in self.servers)

    def end(self) -> None:
        """Let nothing of them stay behind."""
        for server in self.servers:
            server.end()


@contextlib.contextmanager
def fleet(folder: Path, *more: str, database: str | None = None) -> Iterator[Fleet]:
    """Servers for the length of a test."""
    made = Fleet(folder, *more, database=database)
    try:
        yield made
    finally:
        made.end()


def ready_status(base_url: str) -> dict[str, Any]:
    """What a server says of itself at `/readyz`; empty if it does not answer."""
    try:
        with urllib.request.urlopen(f"{base_url}/readyz", timeout=2.0) as reply:
            body = reply.read()
    except urllib.error.HTTPError as exc:
        body = exc.read()
    except OSError:
        return {}
    found: dict[str, Any] = json.loads(body)
    return found


def until(is_so: Callable[[], bool], why: Callable[[], str] = str) -> None:
    """Return when something is so."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(LOOK_S)
