"""What a tenant cannot do with the ids, addresses and tokens of another, at a real service.

Every route by itself is in `tests/integration/service/api/test_tenants.py`; here are the ways
that go over several of them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.service.served import BASE_MODEL, Served, serving
from tests.integration.service.api.calls import a_sample, a_session, ok, post, result
from tinsmith.wire.endpoints import ENDPOINTS

WAIT_S = 60.0


class Tenant:
    """A tenant with a session, a model, a sampler and a checkpoint of each kind."""

    def __init__(self, served: Served, name: str) -> None:
        self.key, self.key_id = make_key(served, name)
        self.http = httpx.Client(
            base_url=served.base_url, headers={"X-API-Key": self.key}, timeout=WAIT_S
        )

    def make(self) -> None:
        self.session = a_session(self.http)
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": BASE_MODEL}
        ok(post(self.http, "create_model", body))
        self.model = f"{self.session}:train:0"
        self.sampler = self.a_sampler(0, base_model=BASE_MODEL).json()["sampling_session_id"]
        kinds = ("save_weights", "save_weights_for_sampler", "save_weights_external")
        for number, kind in enumerate(kinds, 1):
            self.done(kind, {"model_id": self.model, "path": "one", "seq_id": number})

    def done(self, name: str, body: Any) -> str:
        """Submit something, and wait until it is done."""
        known: str = ok(post(self.http, name, body))["request_id"]
        ok(result(self.http, known))
        return known

    def a_sampler(self, number: int, **of: str) -> httpx.Response:
        body = {"session_id": self.session, "sampling_session_seq_id": number, **of}
        return post(self.http, "create_sampling_session", body)

    def path(self, kind: str) -> str:
        return f"tinker://{self.model}/{kind}/one"

    def on_checkpoint(self, name: str, kind: str) -> str:
        path = ENDPOINTS[name].path.replace("{training_run_id}", self.model)
        return path.replace("{checkpoint_id:path}", f"{kind}/one")


def key_command(served: Served, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinsmith", "key", *words]
    return subprocess.run(
        [*command, "--data", str(served.folder / "data")],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )


def make_key(served: Served, tenant: str) -> tuple[str, str]:
    made = key_command(served, "create", "--tenant", tenant)
    key = next(word for word in made.stdout.split() if word.startswith("tml-"))
    revoking = (made.stdout + made.stderr).rpartition("key revoke ")[2]
    return key, revoking.split()[0].rstrip("`.")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), "--log-level", "debug") as running:
        yield running


@pytest.fixture(scope="module")
def tenants(served: Served) -> Iterator[tuple[Tenant, Tenant]]:
    owner, other = Tenant(served, "owner"), Tenant(served, "other")
    with owner.http, other.http:
        wait_until(lambda: other.http.get("/api/v1/sessions").status_code == 200)
        owner.make()
        other.make()
        yield owner, other


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.05)


def test_no_crafted_path_reaches_files_of_another_tenant(
    tenants: tuple[Tenant, Tenant],
) -> None:
    owner, other = tenants
    path = owner.on_checkpoint("get_external_weights_urls", "external_weights")
    urls = ok(owner.http.get(path))["urls"]
    assert {httpx.get(url).status_code for url in urls.values()} == {200}

    assert other.http.get(path).status_code == 404
    archive = owner.on_checkpoint("get_checkpoint_archive_url", "external_weights")
    assert other.http.get(archive).status_code == 404
    first, second = list(urls)[:2]
    signed, mine = urls[first].rsplit("/", 1)[0], urls[second].rsplit("/", 1)[1]
    for name in (mine, "manifest.json", "..%2f..%2fsecret", "%2e%2e", "%00", ""):
        assert httpx.get(f"{signed}/{name}").status_code == 404
    own = ok(other.http.get(other.on_checkpoint("get_external_weights_urls", "external_weights")))
    its_ticket = own["urls"][first].split("/")[-2]
    body, signature = its_ticket.split(".")
    forged = [f"{signed.split('/')[-1].split('.')[0]}.{signature}", body, f"{body}.", "."]
    for ticket in forged:
        address = f"{signed.rsplit('/', 1)[0]}/{ticket}/{first}"
        assert httpx.get(address).status_code == 404


def test_results_of_another_tenant_cannot_be_acknowledged_or_cancelled(
    tenants: tuple[Tenant, Tenant],
) -> None:
    owner, other = tenants
    known = owner.done("asample", a_sample(owner.sampler, 0))
    target = {"type": "sampling_session", "cloned_sampler_id": 0}
    poll = {"prev_cursor": 0, "retrieved_request_ids": [known], "timeout": 0.01}

    theirs = {**poll, "target": {**target, "sampling_session_id": owner.sampler}}
    own = {**poll, "target": {**target, "sampling_session_id": other.sampler}}

    assert post(other.http, "retrieve_futures", theirs).status_code == 404
    assert post(other.http, "retrieve_futures", own).status_code == 200
    assert post(other.http, "cancel_future", {"request_id": known}).status_code == 404
    assert post(other.http, "retrieve_future", {"request_id": known}).status_code == 404
    assert ok(result(owner.http, known))["sequences"]


def test_a_published_checkpoint_is_read_only_to_others_until_it_is_unpublished(
    tenants: tuple[Tenant, Tenant],
) -> None:
    owner, other = tenants
    publish = owner.on_checkpoint("publish_checkpoint", "sampler_weights")
    whole = publish.rsplit("/", 1)[0]
    path = owner.path("sampler_weights")
    assert other.http.post(publish).status_code == 404
    assert other.a_sampler(1, model_path=path).status_code == 404

    assert owner.http.post(publish).status_code == 204

    assert other.a_sampler(1, model_path=path).status_code == 200
    assert other.http.delete(whole).status_code == 404
    assert other.http.delete(publish).status_code == 404
    assert other.http.put(f"{whole}/ttl", json={"ttl_seconds": 3600}).status_code == 404
    listed = ok(other.http.get("/api/v1/checkpoints"))["checkpoints"]
    assert path not in {entry["tinker_path"] for entry in listed}
    assert owner.http.delete(publish).status_code == 204
    assert other.a_sampler(2, model_path=path).status_code == 404
    assert post(other.http, "copy_weights", {"source_path": path}).status_code == 404


def test_a_copy_needs_a_token_of_the_owner(tenants: tuple[Tenant, Tenant]) -> None:
    owner, other = tenants
    body = {"source_path": owner.path("weights")}
    for token in (None, "", other.key, "tml-made-up", "eyJhbGciOiJub25lIn0.e30."):
        reply = post(other.http, "copy_weights", {**body, "weights_access_token": token})
        assert reply.status_code == 404, token

    copied = ok(post(other.http, "copy_weights", {**body, "weights_access_token": owner.key}))

    assert copied["tinker_path"].startswith("tinker://copy-")
    assert owner.http.get("/api/v1/checkpoints").text.count("copy-") == 0


def test_revoking_a_key_revokes_its_tokens_and_no_secret_is_logged(
    served: Served, tenants: tuple[Tenant, Tenant]
) -> None:
    owner, _ = tenants
    leaving = Tenant(served, "owner")
    with leaving.http as http:
        wait_until(lambda: http.get("/api/v1/sessions").status_code == 200)
        token = ok(post(http, "auth_token"))["jwt"]
        bearer = {"X-API-Key": token}
        with httpx.Client(base_url=served.base_url, headers=bearer) as by_token:
            assert by_token.get("/api/v1/sessions").status_code == 200
            path = owner.on_checkpoint("get_external_weights_urls", "external_weights")
            url = next(iter(ok(by_token.get(path))["urls"].values()))
            httpx.get(url)

            key_command(served, "revoke", leaving.key_id)

            wait_until(lambda: by_token.get("/api/v1/sessions").status_code == 401)
            assert http.get("/api/v1/sessions").status_code == 401
        assert owner.http.get("/api/v1/sessions").status_code == 200
        http.get(f"/api/v1/{leaving.key}?key={token}")
        http.post("/api/v1/telemetry", json={"key": leaving.key})
    log = served.log.read_text(errors="replace")
    assert "/downloads/" in log
    for secret in (leaving.key, token, owner.key, url.split("/")[-2]):
        assert secret not in log
    assert "Traceback" not in log
