"""Changes that break off at any of their writes: a retry ends them, and they happen once.

The ledger fails at the n-th write, before or after it was made, as when the process is killed or
the database goes away. The same call is made again until it is answered.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.service.api.managed import ManagedServer
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.errors import LedgerUnavailableError
from tinsmith.service.api.sweeper import Sweeper
from tinsmith.service.ledger.memory_commands import MemoryEntries
from tinsmith.service.ledger.records import AuditEntry, CheckpointEntry, ModelEntry

WRITES = ("add", "put", "change", "remove")
KEY = {"X-Idempotency-Key": "one"}


class BreakingOff:
    """Lets the n-th write of entries fail, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails_after: bool) -> None:
        self.left: int | None = None
        self._fails_after = fails_after
        for name in WRITES:
            monkeypatch.setattr(MemoryEntries, name, self._broken(getattr(MemoryEntries, name)))

    def _broken(self, write: Callable[..., Any]) -> Callable[..., Any]:
        async def broken(entries: Any, *args: Any, **kwargs: Any) -> Any:
            fails = self.left == 0
            if self.left is not None:
                self.left = None if fails else self.left - 1
            if fails and not self._fails_after:
                raise LedgerUnavailableError("the database is gone")
            result = await write(entries, *args, **kwargs)
            if fails:
                raise LedgerUnavailableError("the database is gone")
            return result

        return broken


def tried_until_answered(
    breaking: BreakingOff, number: int, call: Callable[[], httpx.Response]
) -> tuple[httpx.Response, bool]:
    """The answer, and whether the call broke off before."""
    breaking.left = number
    reply = call()
    has_broken = reply.status_code == 503
    breaking.left = None
    return (call() if has_broken else reply), has_broken


@pytest.fixture(params=[False, True], ids=["before", "after"])
def breaking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BreakingOff:
    """Fails before or after the write is made."""
    return BreakingOff(monkeypatch, fails_after=request.param)


@pytest.fixture
def server(breaking: BreakingOff, tmp_path: Path) -> Any:  # noqa: ARG001 - before the ledger is made
    with ManagedServer(tmp_path, "memory") as running:
        yield running


def counted(server: ManagedServer, kind: Any) -> int:
    count: int = server.run(server.ledger.entries(kind).count())
    return count


def test_an_interrupted_copy_is_made_once(server: ManagedServer, breaking: BreakingOff) -> None:
    server.add_session()
    path = server.save(server.add_run(), "c")
    body = {"source_path": path, "destination_project_id": "p"}
    copies = set()

    with server.http() as client:
        for number in itertools.count():
            send = functools.partial(
                client.post,
                "/api/v1/copy_weights",
                json=body,
                headers={"X-Idempotency-Key": f"copy-{number}"},
            )
            reply, has_broken = tried_until_answered(breaking, number, send)
            assert reply.status_code == 200
            copies.add(reply.json()["tinker_path"])
            if not has_broken:
                break

    assert number >= 3, "it makes a run, a checkpoint and a note"
    assert len(copies) == number + 1
    assert counted(server, CheckpointEntry) == len(copies) + 1
    assert counted(server, ModelEntry) == len(copies) + 1
    assert all(server.store.exists(CheckpointPath.parse(copy)) for copy in copies)


def test_an_interrupted_delete_is_completed(server: ManagedServer, breaking: BreakingOff) -> None:
    server.add_session()
    run = server.add_run()

    with server.http() as client:
        for number in itertools.count():
            path = CheckpointPath.parse(server.save(run, f"c{number}"))
            url = f"/api/v1/training_runs/{run}/checkpoints/weights/c{number}"
            send = functools.partial(client.delete, url, headers=KEY)
            reply, has_broken = tried_until_answered(breaking, number, send)
            assert reply.status_code == 204
            assert not server.store.exists(path)
            if not has_broken:
                break

    assert number >= 2
    assert counted(server, CheckpointEntry) == 0
    assert counted(server, AuditEntry) == number + 1, "each is noted once"


def test_an_interrupted_sweep_is_completed_by_the_next_one(
    server: ManagedServer, breaking: BreakingOff
) -> None:
    server.add_session()
    run = server.add_run()
    sweeper = Sweeper(server.ledger, server.store)
    server.run(sweeper.sweep())

    for number in range(4):
        path = CheckpointPath.parse(server.save(run, f"c{number}", expires_at=1.0))
        breaking.left = number
        server.run(sweeper.sweep())
        breaking.left = None
        server.run(sweeper.sweep())

        assert not server.store.exists(path)
        assert counted(server, CheckpointEntry) == 0
        assert counted(server, AuditEntry) == number + 1
