"""Quotas as clients meet them: which call is refused, with which status, and who is not."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.service.api.calls import (
    a_model,
    a_sample,
    a_sampler,
    a_session,
    a_step,
    ok,
    post,
    result,
)
from tests.integration.service.api.running import MODEL, RunningServer
from tinsmith.service.api.keys import add_tenant
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import (
    Appended,
    CheckpointEntry,
    Submission,
    TenantId,
    UsageKey,
    Use,
)

ALICE = TenantId("alice")


def test_each_quota_limits_its_own_call_and_no_other_tenant() -> None:
    with (
        RunningServer(with_keys=True) as server,
        server.http("alice") as alice,
        server.http("bob") as bob,
    ):
        quotas = {"sessions": 1, "models": 1, "storage_bytes": 10}
        server.run(add_tenant(server.ledger, "alice", quotas))
        model = a_model(alice)
        session = model.partition(":")[0]
        entry = CheckpointEntry(
            id="tinker://r/weights/x",
            tenant_id=ALICE,
            created_at=0.0,
            run_id="r",
            checkpoint_id="weights/x",
            size_bytes=10,
        )
        server.run(server.ledger.entries(CheckpointEntry).add(entry))

        refused = {
            "sessions": post(alice, "create_session", {"tags": [], "sdk_version": "0.36.0"}),
            "models": post(
                alice,
                "create_model",
                {"session_id": session, "model_seq_id": 1, "base_model": MODEL},
            ),
            "bytes": post(alice, "save_weights", {"model_id": model, "path": "y", "seq_id": 1}),
        }

        for what, reply in refused.items():
            assert reply.status_code == 422, reply.text
            assert what in reply.text
            assert "the maximum is" in reply.text or "the quota is" in reply.text
        # Its number was refused for good, and what comes after it goes on.
        ok(post(alice, "optim_step", a_step(model, 2)))
        assert ok(result(alice, f"{model}:2"))
        a_model(bob, a_session(bob))


def test_an_exhausted_hourly_token_quota_is_a_429_with_retry_after() -> None:
    with RunningServer(with_keys=True) as server, server.http("alice") as alice:
        server.run(add_tenant(server.ledger, "alice", {"tokens_per_hour": 5}))
        model = a_model(alice)
        key = UsageKey(tenant_id=ALICE, kind="training")
        server.run(server.ledger.add_uses([Use(key=key, amount=5)]))
        server.app.context.quotas.forget()

        reply = post(alice, "optim_step", a_step(model, 1))

        assert reply.status_code == 429
        assert 0 < int(reply.headers["retry-after-ms"]) <= 60_000
        server.run(add_tenant(server.ledger, "alice", {"tokens_per_hour": 50}))
        server.app.context.quotas.forget()
        ok(post(alice, "optim_step", a_step(model, 1)))


def test_a_repeated_create_session_returns_the_same_session_at_the_limit() -> None:
    with RunningServer(with_keys=True, most_sessions=1) as server, server.http("alice") as alice:
        body = {"tags": [], "sdk_version": "0.36.0"}
        first = post(alice, "create_session", body, headers={"X-Idempotency-Key": "k"})

        again = post(alice, "create_session", body, headers={"X-Idempotency-Key": "k"})
        other = post(alice, "create_session", body, headers={"X-Idempotency-Key": "l"})

        assert ok(again) == ok(first)
        assert other.status_code == 422


def test_a_create_model_rejected_with_429_does_not_count_against_its_retry() -> None:
    with RunningServer(most_models=1, commands_in_flight=1) as server, server.http() as http:
        server.held = {"asample"}
        sampler = a_sampler(http)
        session = sampler.rpartition(":sample:")[0]
        ok(post(http, "asample", a_sample(sampler, 0)))
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
        assert post(http, "create_model", body).status_code == 429
        server.release()
        ok(result(http, f"{sampler}:0"))

        again = post(http, "create_model", body)

        assert ok(result(http, ok(again)["request_id"]))
        other = post(http, "create_model", {**body, "model_seq_id": 1})
        assert other.status_code == 422


def test_the_number_of_session_tags_is_limited() -> None:
    with RunningServer() as server, server.http() as http:
        tags = [f"tag{number}" for number in range(100)]
        body = {"sdk_version": "0.36.0", "tags": tags}
        ok(post(http, "create_session", body))

        reply = post(http, "create_session", {**body, "tags": [*tags, "more"]})

        assert reply.status_code == 400
        assert "101" in reply.text


def test_the_nesting_depth_of_metadata_is_limited() -> None:
    with RunningServer() as server, server.http() as http:
        body = {"sdk_version": "0.36.0", "tags": []}
        for levels, status in ((40, 200), (60, 400), (900, 400)):
            nested: object = 1
            for _ in range(levels):
                nested = {"a": nested}

            reply = post(http, "create_session", {**body, "user_metadata": nested})

            assert reply.status_code == status, reply.text


class GatedServer(RunningServer):
    """A server whose ledger appends no sample until the gate is open."""

    async def _open_ledger(self) -> Ledger:
        self.gate = asyncio.Event()
        return _GatedLedger(self.gate)

    def open_gate(self) -> None:
        """Let samples in."""
        self._loop.call_soon_threadsafe(self.gate.set)


class _GatedLedger(MemoryLedger):
    def __init__(self, gate: asyncio.Event) -> None:
        super().__init__()
        self._gate = gate

    async def append(self, submission: Submission) -> Appended:
        if submission.kind == "asample":
            await self._gate.wait()
        return await super().append(submission)


@pytest.mark.parametrize(
    ("limits", "admitted"),
    [({"commands_in_flight": 3}, 3), ({"bytes_in_flight": 2_500}, 1)],
    ids=["commands", "bytes"],
)
def test_commands_that_are_still_being_appended_count_against_the_quota(
    limits: dict[str, Any], admitted: int
) -> None:
    """Else a burst that arrives while the disk is busy passes every limit."""
    count = 8
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [100] * 400}]}  # about 1,900 bytes
    with (
        GatedServer(**limits) as server,
        server.http() as http,
        ThreadPoolExecutor(count) as pool,
    ):
        server.held = {"asample"}
        sampler = a_sampler(http)

        def send(number: int) -> httpx.Response:
            return post(http, "asample", a_sample(sampler, number, prompt=prompt))

        def refused() -> int:
            return sum(report.status == 429 for report in server.reports)

        replies = [pool.submit(send, number) for number in range(count)]
        server.wait_for(lambda: refused() == count - admitted)
        server.open_gate()

        statuses = sorted(reply.result().status_code for reply in replies)
        assert statuses == [200] * admitted + [429] * (count - admitted)
