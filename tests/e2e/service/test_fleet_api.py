"""Operators see and drain replicas over HTTP; tenants do not learn that there are any."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tinsmith
from tests.e2e.service.served import BASE_MODEL, START_S, Served, serving
from tests.e2e.service.several_servers import fleet
from tests.e2e.service.training_run import API_KEY, datum_of
from tinsmith.types import AdamParams, ModelInput, SamplingParams

FLEET = "/api/v1/tinsmith/fleet"
REPLICAS = ("--replica", "count=2,name=r")


def _client(base_url: str, key: str = API_KEY) -> httpx.Client:
    return httpx.Client(base_url=base_url, headers={"X-API-Key": key}, timeout=START_S)


def _replicas(http: httpx.Client) -> dict[str, dict[str, Any]]:
    reply = http.get(FLEET)
    assert reply.status_code == 200, reply.text
    return {one["name"]: one for one in reply.json()["replicas"]}


def _until(is_so: Callable[[], bool], meanwhile: Callable[[], object] = bool) -> None:
    give_up_at = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < give_up_at
        meanwhile()
        time.sleep(0.05)


def _command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tinsmith", *words, "--format", "json"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


def _key(served: Served, tenant: str, *words: str) -> str:
    where = ("--data", str(served.folder / "data"))
    made = _command("key", "create", "--tenant", tenant, *words, *where)
    assert made.returncode == 0, made.stderr
    return str(json.loads(made.stdout)["key"])


class _Training:
    """A model that trains and samples; whatever fails is raised."""

    def __init__(self, service: tinsmith.ServiceClient) -> None:
        self._training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
        self._sampler = service.create_sampling_client(base_model=BASE_MODEL)
        self._chance = random.Random(1)
        self.model_id = self._training.get_info().model_id

    def step(self) -> None:
        sampled = self._sampler.sample(
            ModelInput.from_ints([1, 2, 3]), 1, SamplingParams(max_tokens=4)
        )
        self._training.forward_backward([datum_of(self._chance)], "cross_entropy").result(START_S)
        self._training.optim_step(AdamParams(learning_rate=0.05)).result(START_S)
        sampled.result(START_S)


def test_replicas_are_shown_drained_and_resumed_while_a_model_trains(tmp_path: Path) -> None:
    """Whoever needs no key runs the service: without keys, everyone is an operator."""
    with (
        serving(tmp_path, *REPLICAS) as served,
        _client(served.base_url) as http,
        tinsmith.ServiceClient(base_url=served.base_url, api_key=API_KEY) as service,
    ):
        _until(lambda: len(_replicas(http)) == 2)
        training = _Training(service)

        def place() -> str | None:
            found = _replicas(http).values()
            return next(
                (one["name"] for one in found if training.model_id in one["adapters"]), None
            )

        _until(lambda: place() is not None, training.step)
        first = place()
        other = "r-1" if first == "r-0" else "r-0"
        asked = http.post(f"{FLEET}/{first}/drain").json()
        assert (asked["name"], asked["wants_drained"]) == (first, True)
        _until(lambda: _replicas(http)[str(first)]["state"] == "drained", training.step)
        assert place() == other
        assert _replicas(http)[str(first)]["adapters"] == []
        assert _replicas(http)[other]["load"] > 0

        asked = http.post(f"{FLEET}/{first}/resume").json()
        assert (asked["name"], asked["wants_drained"]) == (first, False)
        _until(lambda: _replicas(http)[str(first)]["state"] == "running", training.step)
        os.kill(_replicas(http)[other]["pid"], signal.SIGKILL)
        _until(lambda: _replicas(http)[other]["losses"] == 1, training.step)
        assert "SIGKILL" in _replicas(http)[other]["last_loss"]
        assert _replicas(http)[str(first)]["losses"] == 0
        training.step()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str, str]]:
    """A service with the key of an operator and that of a tenant."""
    with serving(tmp_path_factory.mktemp("guarded"), *REPLICAS) as served:
        operator, tenant = _key(served, "ops", "--operator"), _key(served, "ada")
        with _client(served.base_url, operator) as http:
            _until(lambda: http.get("/api/v1/sessions", headers={"X-API-Key": "x"}).is_error)
            _until(lambda: len(_replicas(http)) == 2)
        yield served, operator, tenant


def _fixed_headers(reply: httpx.Response) -> dict[str, str]:
    return {k: v for k, v in reply.headers.items() if k not in ("x-request-id", "date")}


def _token(http: httpx.Client) -> str:
    return str(http.post("/api/v1/auth/token").json()["jwt"])


def test_to_the_key_of_a_tenant_the_routes_do_not_exist(guarded: tuple[Served, str, str]) -> None:
    """Not with its token either, and whether or not a replica has the name."""
    served, operator, tenant = guarded
    with _client(served.base_url, operator) as ops, _client(served.base_url, tenant) as http:
        before = _replicas(ops)
        for key in (tenant, _token(http)):
            for method, path in (
                ("GET", FLEET),
                ("POST", f"{FLEET}/r-0/drain"),
                ("POST", f"{FLEET}/r-0/resume"),
                ("POST", f"{FLEET}/nobody/drain"),
            ):
                there, nowhere = path, path.replace("/fleet", "/fleat")
                given = {"X-API-Key": key}
                refused = http.request(method, there, headers=given, content=b"{")
                unknown = http.request(method, nowhere, headers=given, content=b"{")
                assert refused.status_code == 404
                assert refused.text == unknown.text.replace("/fleat", "/fleet")
                assert _fixed_headers(refused) == _fixed_headers(unknown)
        assert http.get(FLEET, headers={"X-API-Key": "tml-unknown"}).status_code == 401
        time.sleep(1.5)  # longer than the service takes to notice a wish
        after = _replicas(ops)
        assert {
            name: (one["state"], one["wants_drained"]) for name, one in after.items()
        } == dict.fromkeys(before, ("running", False))
        assert ops.get(FLEET, headers={"X-API-Key": _token(ops)}).status_code == 200


def test_an_unknown_replica_is_a_404_that_names_the_known_ones(
    guarded: tuple[Served, str, str],
) -> None:
    served, operator, _ = guarded
    with _client(served.base_url, operator) as http:
        for verb in ("drain", "resume"):
            for name, shown in (("r-9", "r-9"), ("%00", r"\x00")):
                reply = http.post(f"{FLEET}/{name}/{verb}")
                assert reply.status_code == 404
                assert (
                    reply.json()["detail"] == f"there is no replica '{shown}'; there are r-0, r-1"
                )


def test_the_command_asks_the_service_or_its_database(guarded: tuple[Served, str, str]) -> None:
    """The service where an address is given, the database where its place is."""
    served, operator, tenant = guarded
    address = {"TINKER_BASE_URL": served.base_url}
    elsewhere = {**address, "TINSMITH_SERVE_DATA": str(served.folder / "nothing")}

    def told(*words: str, key: str = operator) -> Any:
        done = _command("fleet", *words, **elsewhere, TINKER_API_KEY=key)
        return json.loads(done.stdout) if done.returncode == 0 else json.loads(done.stderr)["error"]

    assert [one["name"] for one in told()["replicas"]] == ["r-0", "r-1"]
    assert told("drain", "r-1")["wants_drained"]
    _until(lambda: told("list")["replicas"][1]["state"] == "drained")
    assert not told("resume", "r-1")["wants_drained"]
    _until(lambda: told("list")["replicas"][1]["state"] == "running")
    assert told("drain", "r-9")["message"].endswith("there are r-0, r-1")
    for words in ((), ("drain", "r-1")):
        refused = told(*words, key=tenant)
        assert "operators only" in refused["message"]
        assert "--operator" in refused["remedy"]

    data = ("--data", str(served.folder / "data"))
    assert [one["name"] for one in told(*data, key=tenant)["replicas"]] == ["r-0", "r-1"]


def test_a_server_without_an_engine_shows_and_drains_replicas(tmp_path: Path) -> None:
    """Reports and wishes are in the database, which all servers share."""
    with fleet(tmp_path) as servers:
        scheduler = servers.start("scheduler", *REPLICAS)
        api = servers.start("api")
        scheduler.wait_status("ready")
        api.wait_ready()
        with _client(api.base_url) as http:
            _until(lambda: len(_replicas(http)) == 2)
            assert http.post(f"{FLEET}/r-0/drain").json()["wants_drained"]
            _until(lambda: _replicas(http)["r-0"]["state"] == "drained")
            assert http.post(f"{FLEET}/%00/drain").status_code == 404
            assert not http.post(f"{FLEET}/r-0/resume").json()["wants_drained"]
            _until(lambda: _replicas(http)["r-0"]["state"] == "running")
