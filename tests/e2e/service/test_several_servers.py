"""Several servers over one database behave as one, whatever happens to any of them.

Two servers answer requests and two have schedulers, of which one works. Servers are killed and
paused; clients go on with another server, and results are those of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.e2e.service.ready_road import ready_road
from tests.e2e.service.served import BASE_MODEL, serving
from tests.e2e.service.several_servers import LEASE_S, RoleServer, fleet, until
from tests.e2e.service.training_run import API_KEY, WAIT_S, Weights, train
from tinsmith.service.api.keys import add_tenant, create_key
from tinsmith.service.ledger.postgres import PostgresLedger
from tinsmith.types import ModelInput, SamplingParams

STEPS = 12
CLIENTS = 3
TAKEOVER_S = 5.0
"""What is aimed at, with the default lease."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """What one server makes of the runs, with nothing happening to it."""
    with serving(tmp_path_factory.mktemp("one") / "server") as served:
        return [train(served.base_url, seed, STEPS) for seed in range(CLIENTS)]


def test_one_server_of_each_role_trains_as_one_server_does(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    with fleet(tmp_path) as servers:
        [api], _ = servers.start_all(1, 1)

        assert train(api.base_url, 0, STEPS) == undisturbed[0]


def test_an_api_server_says_that_no_scheduler_was_seen_and_accepts_nothing_until_then(
    tmp_path: Path,
) -> None:
    with fleet(tmp_path) as servers:
        api = servers.start("api")
        until(lambda: "no scheduler has been seen" in str(api.told().get("problem")))
        assert api.told()["status"] == "not ready"

        servers.start("scheduler")

        api.wait_ready()
        assert api.told() == {"status": "ready", "problem": None}


def test_tokens_are_streamed_through_a_server_without_the_scheduler(tmp_path: Path) -> None:
    with fleet(tmp_path) as servers:
        apis, _ = servers.start_all(2, 1)
        for api in apis:
            with tinsmith.ServiceClient(base_url=api.base_url, api_key=API_KEY) as client:
                sampler = client.create_sampling_client(base_model=BASE_MODEL)
                params = SamplingParams(max_tokens=400, seed=3, stop=[])
                prompt = ModelInput.from_ints([5, 6, 7])
                events = list(sampler.sample_stream(prompt, 1, params))
                whole = sampler.sample(prompt, 1, params).result(WAIT_S)

            streamed = [token for event in events for token in event.tokens]
            assert streamed == whole.sequences[0].tokens
            # A stream that saw nothing of the run has them all in one event, at its end.
            assert len(events) > 3, len(events)


@pytest.mark.parametrize("role", ["api", "scheduler"])
def test_a_stream_goes_on_when_a_server_is_killed(tmp_path: Path, role: str) -> None:
    """No token is missing or twice, whether the connection broke off or the run began again."""
    with fleet(tmp_path) as servers:
        apis, schedulers = servers.start_all()
        urls = [api.base_url for api in apis]
        with tinsmith.ServiceClient(base_url=urls, api_key=API_KEY) as client:
            sampler = client.create_sampling_client(base_model=BASE_MODEL)
            params = SamplingParams(max_tokens=3000, seed=3, stop=[])
            prompt = ModelInput.from_ints([5, 6, 7])
            stream = sampler.sample_stream(prompt, 1, params)
            events = [next(stream)]
            serving_it = [_streams(api) for api in apis]
            victim = apis[serving_it.index(True)] if role == "api" else schedulers[0]
            victim.kill()
            events += stream
            whole = sampler.sample(prompt, 1, params).result(WAIT_S)

        assert [token for event in events for token in event.tokens] == whole.sequences[0].tokens
        assert len(whole.sequences[0].tokens) == 3000


def _streams(api: RoleServer) -> bool:
    """Whether a client is connected to this server."""
    with urllib.request.urlopen(f"{api.base_url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    name = 'tinsmith_http_requests_total{endpoint="create_sampling_session"'
    return any(line.startswith(name) for line in lines)


def test_clients_go_on_when_servers_of_each_role_are_killed(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    """An API server, then the scheduler that works, then its successor's predecessor is back."""
    with fleet(tmp_path) as servers:
        apis, schedulers = servers.start_all()
        runs = FleetRuns(apis)
        runs.wait_steps(CLIENTS)

        apis[0].kill()
        runs.wait_steps(3 * CLIENTS)
        schedulers[0].kill()
        schedulers[1].wait_status("ready")
        runs.wait_steps(6 * CLIENTS)
        apis[0].start()
        schedulers[0].start(wait=False)
        schedulers[0].wait_status("standby")
        apis[1].kill()
        schedulers[1].kill()

        assert runs.results() == undisturbed, servers.logs()


def test_commands_wait_while_no_scheduler_runs(tmp_path: Path, undisturbed: list[Weights]) -> None:
    with fleet(tmp_path) as servers:
        apis, schedulers = servers.start_all()
        runs = FleetRuns(apis)
        runs.wait_steps(CLIENTS)
        for scheduler in schedulers:
            scheduler.kill()
        until(lambda: "no scheduler has reported for" in str(apis[0].told().get("problem")))
        assert apis[0].told()["status"] == "ready"

        schedulers[1].start(wait=False)

        assert runs.results() == undisturbed, servers.logs()


def test_a_paused_scheduler_stands_by_when_it_goes_on(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    """It was in the midst of its work, and its writes come too late."""
    with fleet(tmp_path) as servers:
        apis, schedulers = servers.start_all()
        runs = FleetRuns(apis)
        runs.wait_steps(CLIENTS)
        for paused, other in ((0, 1), (1, 0)):
            schedulers[paused].pause()
            try:
                schedulers[other].wait_status("ready")
                time.sleep(1.0)  # not until a step: it may hold the lock of the store's folder
            finally:
                schedulers[paused].go_on()
            schedulers[paused].wait_status("standby")

        assert runs.results() == undisturbed, servers.logs()
        assert "restarts with epoch" in schedulers[0].log_text()


def test_a_paused_api_server_is_left_for_another(
    tmp_path: Path, undisturbed: list[Weights]
) -> None:
    with fleet(tmp_path) as servers:
        apis, _ = servers.start_all(2, 1)
        runs = FleetRuns(apis)
        runs.wait_steps(CLIENTS)
        apis[0].pause()
        try:
            time.sleep(1.0)
        finally:
            apis[0].go_on()
        assert runs.results() == undisturbed, servers.logs()


def test_a_standby_takes_over_within_seconds_of_a_kill(tmp_path: Path) -> None:
    """The time is printed, not asserted: a busy machine may need longer."""
    with fleet(tmp_path) as servers:
        _, schedulers = servers.start_all(0, 2)
        began = time.monotonic()
        schedulers[0].kill()
        schedulers[1].wait_status("ready")
        took_s = time.monotonic() - began
        print(f"taken over after {took_s:.2f} s with a lease of {LEASE_S} s")

        began = time.monotonic()
        schedulers[0].start(wait=False)
        schedulers[0].wait_status("standby")
        assert schedulers[1].stop() == 0, schedulers[1].log_text()
        schedulers[0].wait_status("ready")


def test_an_official_client_behind_a_load_balancer_goes_on_when_servers_are_killed(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "one") as served:
        expected = json.loads(
            _official(served.base_url).communicate(timeout=WAIT_S)[0].splitlines()[-1]
        )
    with fleet(tmp_path) as servers, ready_road() as road:
        apis, schedulers = servers.start_all()
        road.lead_to(apis[0].port)
        with _official(road.base_url) as program:
            assert program.stdout is not None
            lines = iter(program.stdout.readline, "")
            next(line for line in lines if line == "step 3\n")
            apis[0].kill()
            road.lead_to(apis[1].port)
            next(line for line in lines if line == "step 5\n")
            schedulers[0].kill()
            *_, last = lines

        assert json.loads(last) == expected


def test_a_link_signed_by_one_server_is_good_at_the_other(tmp_path: Path) -> None:
    with fleet(tmp_path) as servers:
        (first, second), _ = servers.start_all(2, 1)
        with tinsmith.ServiceClient(base_url=first.base_url, api_key=API_KEY) as client:
            training = client.create_lora_training_client(BASE_MODEL, rank=1, seed=1)
            saved = training.save_weights_for_sampler("weights").result(WAIT_S).path
            rest = tinsmith.RestClient(base_url=first.base_url, api_key=API_KEY)
            url = rest.get_checkpoint_archive_url_from_tinker_path(saved).result(WAIT_S).url

        assert url.startswith(first.base_url)
        archives = [
            urllib.request.urlopen(url.replace(first.base_url, one.base_url), timeout=30).read()
            for one in (first, second)
        ]
        assert archives[0]
        assert archives[0] == archives[1]


def test_a_session_created_again_at_another_server_is_the_same(tmp_path: Path) -> None:
    with fleet(tmp_path) as servers:
        apis, _ = servers.start_all(2, 1)
        body = {"tags": [], "sdk_version": "1", "user_metadata": {}, "type": "create_session"}
        key = {"X-Idempotency-Key": "once"}
        made = [_post(api, "create_session", body, API_KEY, key)[1] for api in apis]

        assert made[0]["session_id"] == made[1]["session_id"]


@pytest.mark.parametrize(
    ("quota", "most"), [("commands_in_flight", 4), ("requests_per_minute", 5), ("sessions", 3)]
)
def test_a_quota_counts_what_was_sent_to_all_servers(tmp_path: Path, quota: str, most: int) -> None:
    with fleet(tmp_path) as servers:
        apis, [scheduler] = servers.start_all(2, 1)
        key = asyncio.run(_new_key(servers.database, {quota: most}))
        if quota == "sessions":
            body = {"tags": [], "sdk_version": "1", "type": "create_session"}
            statuses = _at_once(apis, "create_session", [body] * (3 * most), key)
        else:
            with tinsmith.ServiceClient(base_url=apis[0].base_url, api_key=key) as client:
                sampler = client.create_sampling_client(base_model=BASE_MODEL)
                scheduler.kill()  # nothing is settled from now on
                bodies = [
                    _sample(sampler._sampling_session_id, number) for number in range(3 * most)
                ]
                statuses = [
                    _post(apis[number % 2], "asample", body, key)[0]
                    for number, body in enumerate(bodies)
                ]

        assert sum(status == 200 for status in statuses) == most, statuses
        assert set(statuses) <= {200, 422, 429}


def _at_once(
    apis: list[RoleServer], path: str, bodies: list[dict[str, Any]], key: str
) -> list[int]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        posted = [
            pool.submit(_post, apis[number % 2], path, body, key)
            for number, body in enumerate(bodies)
        ]
        return [one.result(WAIT_S)[0] for one in posted]


def _sample(session: str, number: int) -> dict[str, Any]:
    return {
        "sampling_session_id": session,
        "seq_id": 1000 + number,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 1},
        "type": "sample",
    }


def _post(
    api: RoleServer,
    path: str,
    body: dict[str, Any],
    key: str,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Send a request; returns the status and the body of the reply."""
    request = urllib.request.Request(
        f"{api.base_url}/api/v1/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-API-Key": key, **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as exc:
        return exc.code, json.loads(exc.read() or b"{}")


async def _new_key(database: str, quotas: dict[str, int]) -> str:
    async with await PostgresLedger.open(database) as ledger:
        tenant = await add_tenant(ledger, "limited", quotas)
        return (await create_key(ledger, tenant, "test"))[1]


def _official(base_url: str) -> subprocess.Popen[str]:
    program = ("-m", "tests.e2e.service.official_training", base_url, "5", str(STEPS))
    return subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE, text=True)


class FleetRuns:
    """Clients of all servers, each on a thread of its own."""

    def __init__(self, apis: list[RoleServer]) -> None:
        urls = [api.base_url for api in apis]
        self.steps = 0
        pool = ThreadPoolExecutor(CLIENTS)
        self._runs: list[Future[Weights]] = [
            pool.submit(train, urls, seed, STEPS, on_step=self._count) for seed in range(CLIENTS)
        ]

    def _count(self) -> None:
        self.steps += 1

    def wait_steps(self, steps: int) -> None:
        """Return after so many steps of all clients together, or when all have ended."""
        until(lambda: self.steps >= steps or all(run.done() for run in self._runs))

    def results(self) -> list[Weights]:
        """What each ended with; raises what any of them raised."""
        return [run.result(WAIT_S) for run in self._runs]
