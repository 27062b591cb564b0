"""A tenant that asks for everything at the same moment gets no more than one that asks in turn."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.service.served import BASE_MODEL, Served, serving
from tests.integration.service.api.calls import a_sample, a_sampler, a_session, ok, post
from tests.integration.service.api.running import RunningServer
from tinsmith.service.api.keys import add_tenant

AT_ONCE = 32


def statuses(served: Served, name: str, bodies: list[Any]) -> Counter[int]:
    limits = httpx.Limits(max_connections=AT_ONCE)
    with (
        httpx.Client(base_url=served.base_url, timeout=60, limits=limits) as http,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        return Counter(threads.map(lambda body: post(http, name, body).status_code, bodies))


def test_concurrently_created_sessions_and_models_respect_the_quota(tmp_path: Path) -> None:
    with serving(tmp_path, "--limits-sessions", "5", "--limits-models", "3") as served:
        opened = statuses(
            served, "create_session", [{"tags": [], "sdk_version": "0.36.0"}] * (2 * AT_ONCE)
        )
        assert opened == {200: 5, 422: 2 * AT_ONCE - 5}
        with httpx.Client(base_url=served.base_url, timeout=30) as http:
            listed = http.get("/api/v1/sessions").json()["sessions"]
        models = [
            {"session_id": listed[0], "model_seq_id": number, "base_model": BASE_MODEL}
            for number in range(2 * AT_ONCE)
        ]

        made = statuses(served, "create_model", models)

        assert made == {200: 3, 422: 2 * AT_ONCE - 3}


def test_a_batch_of_samples_respects_the_in_flight_quota() -> None:
    with RunningServer(with_keys=True) as server, server.http() as http:
        server.run(add_tenant(server.ledger, "alice", {"commands_in_flight": 10}))
        server.held.add("asample")
        sampler = a_sampler(http, a_session(http))
        samples = [a_sample(sampler, number) for number in range(100)]

        answered = ok(post(http, "asample_many", {"samples": samples}))["items"]

        assert sum(item.get("request_id") is not None for item in answered) == 10
        refused = [item for item in answered if item.get("request_id") is None]
        assert {item["status"] for item in refused} == {429}
        server.release()


def test_repeated_quota_rejections_do_not_query_the_ledger_each_time() -> None:
    with RunningServer(with_keys=True) as server, server.http() as http:
        server.run(add_tenant(server.ledger, "alice", {"commands_in_flight": 50}))
        server.held.add("asample")
        sampler = a_sampler(http, a_session(http))
        samples = [a_sample(sampler, number) for number in range(50)]
        ok(post(http, "asample_many", {"samples": samples}))
        asked = Counter[str]()
        look_up = server.ledger.command

        async def counted(request_id: str) -> Any:
            asked[request_id] += 1
            return await look_up(request_id)

        server.ledger.command = counted  # type: ignore[method-assign]
        more = [a_sample(sampler, number) for number in range(100, 200)]
        answered = ok(post(http, "asample_many", {"samples": more}))["items"]

        assert {item["status"] for item in answered} == {429}
        assert max(asked.values()) <= 2  # not once for each that is refused
        server.release()
