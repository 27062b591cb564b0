"""The short form of `chaos_run.py`: every fault once on fake replicas, and a few on real ones."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract import postgres_server
from tests.contract.s3_server import S3Server
from tests.e2e.chaos import chaos_run
from tests.e2e.chaos.chaos_run import Numbers
from tests.e2e.chaos.cluster import AUDIT, FAULTS, Cluster
from tinsmith.service.ledger.postgres import PostgresLedger
from tinsmith.service.ledger.records import (
    QueueId,
    RequestId,
    SessionId,
    Settlement,
    Submission,
    TenantId,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


@pytest.mark.parametrize(
    ("engine", "events", "seed"), [("fake", len(FAULTS), 1), ("embedded", 3, 4)]
)
def test_faults_change_no_result_and_every_command_is_settled_once(
    tmp_path: Path, engine: str, events: int, seed: int
) -> None:
    """Clients of both SDKs on API servers, schedulers with replicas, PostgreSQL and S3."""
    wrong = chaos_run.run(tmp_path, events=events, seed=seed, steps=4, clients=4, engine=engine)

    assert wrong == []


def test_a_seed_gives_the_same_faults_and_a_round_has_each_once() -> None:
    def planned(seed: int) -> list[str]:
        return [fault.name for fault in chaos_run.planned_faults(seed, len(FAULTS))]

    assert planned(1) == planned(1)
    assert planned(1) != planned(2)
    assert sorted(planned(1)) == sorted(fault.name for fault in FAULTS)


def test_commands_that_are_not_settled_exactly_once_are_found(tmp_path: Path) -> None:
    """The database sees it, whatever the ledger believes."""
    database = postgres_server.new_database()
    hit = Cluster(tmp_path, database, S3Server(tmp_path / "s3"))

    async def settle(count: int) -> None:
        async with await PostgresLedger.open(database) as ledger:
            for number in range(count):
                await ledger.append(_submission(number))
            done = [Settlement(request_id=RequestId(f"m:{n}"), payload=b"") for n in range(count)]
            await ledger.settle(done)

    asyncio.run(settle(0))  # it makes the tables
    hit.execute(AUDIT)
    asyncio.run(settle(3))
    asyncio.run(settle(3))  # again, as after a lost reply
    assert chaos_run.wrong_settlements(hit) == []

    hit.execute("UPDATE commands SET state = 1 WHERE seq_id = 0")
    hit.execute("DELETE FROM results WHERE command = (SELECT ordinal FROM commands LIMIT 1)")
    hit.execute("UPDATE results SET is_failed = 1")
    wrong = "\n".join(chaos_run.wrong_settlements(hit))
    assert "optim_step m:0 is not settled: state 1" in wrong
    assert "1 × REOPENED" in wrong
    assert "1 × DELETE" in wrong
    assert "optim_step m:2 failed" in wrong


def _submission(number: int) -> Submission:
    return Submission(
        queue_id=QueueId("m"),
        seq_id=number,
        kind="optim_step",
        tenant_id=TenantId("tenant"),
        session_id=SessionId("session"),
        fingerprint=b"%d" % number,
        payload=b"",
    )


def test_a_loss_a_weight_and_a_charge_that_differ_are_found() -> None:
    def numbers(loss: float = 1.0, digest: str = "a", tokens: float = 5.0) -> Numbers:
        computed: dict[str, Any] = {"losses": [0.5, loss]}
        return Numbers([computed], [{"adapter": digest}], [{"training": tokens}])

    assert chaos_run.differences(numbers(), numbers()) == []
    assert chaos_run.differences(numbers(), numbers(loss=1.0000000000000002)) == [
        "client 0: computed losses"
    ]
    assert chaos_run.differences(numbers(), numbers(digest="b")) == ["client 0: weights adapter"]
    assert chaos_run.differences(numbers(), numbers(tokens=10.0)) == ["client 0: charged training"]
