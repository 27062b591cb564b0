"""Runs, checkpoints, sessions and usage over a real socket, with our clients."""

from __future__ import annotations

import concurrent.futures
import datetime
import http.client
import io
import json
import tarfile
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import tinsmith
from tests.integration.service.api.managed import FILES, SIZE_BYTES, ManagedServer, key_of, server
from tests.integration.service.api.running import MODEL
from tinsmith import types
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.errors import BadRequestError, CheckpointUnavailableError, NotFoundError
from tinsmith.service.api.routes import collect
from tinsmith.service.api.store_threads import STORE_THREADS
from tinsmith.service.ledger.records import (
    AuditEntry,
    CheckpointEntry,
    SessionEntry,
    TenantId,
    UsageKey,
    Use,
)
from tinsmith.wire.endpoints import ENDPOINTS

__all__ = ["server"]  # a fixture, for pytest to find


def rest(server: ManagedServer, tenant: str = "alice") -> tinsmith.RestClient:
    return tinsmith.RestClient(base_url=server.base_url, api_key=key_of(tenant))


def admin(server: ManagedServer, tenant: str = "alice") -> tinsmith.AdminClient:
    return tinsmith.AdminClient(base_url=server.base_url, api_key=key_of(tenant))


def audited(server: ManagedServer, tenant: str = "alice") -> list[str]:
    log = admin(server, tenant).get_audit_log().result(30)
    return [entry.event for entry in log.entries]


# Runs


def test_runs_are_listed_newest_first_with_their_last_checkpoints(server: ManagedServer) -> None:
    server.add_session()
    runs = [server.add_run(number=number) for number in range(5)]
    server.save(runs[0], "one")
    newest = server.save(runs[0], "two")
    sampler = server.save(runs[0], "s", "sampler_weights")

    listed = rest(server).list_training_runs(limit=2, offset=3).result(30)
    run = rest(server).get_training_run(runs[0]).result(30)

    assert [one.training_run_id for one in listed.training_runs] == [runs[1], runs[0]]
    assert listed.cursor == types.Cursor(offset=3, limit=2, total_count=5)
    assert run == listed.training_runs[1]
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == newest
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.tinker_path == sampler
    assert (run.base_model, run.is_lora, run.lora_rank, run.corrupted) == (MODEL, True, 8, False)
    assert run.model_owner == "alice"
    assert run.last_request_time.tzinfo is not None


def test_runs_are_listed_by_project(server: ManagedServer) -> None:
    server.add_session("s1", project_id="one")
    server.add_session("s2", project_id="two")
    first, second = server.add_run("s1"), server.add_run("s2")

    one = rest(server).list_training_runs(project_id="one").result(30)
    rest(server).assign_session_project("s1", "two").result(30)
    two = rest(server).list_training_runs(project_id="two").result(30)

    assert [run.training_run_id for run in one.training_runs] == [first]
    assert one.cursor.total_count == 1
    assert [run.training_run_id for run in two.training_runs] == [second, first]


def test_last_request_time_is_that_of_the_last_command(server: ManagedServer) -> None:
    service = tinsmith.ServiceClient(base_url=server.base_url, api_key=key_of("alice"))
    client = service.create_lora_training_client(MODEL, rank=4)
    before = datetime.datetime.now(datetime.UTC)
    client.optim_step(types.AdamParams()).result(30)

    run = rest(server).get_training_run(client.model_id).result(30)

    assert run.last_request_time >= before - datetime.timedelta(seconds=1)
    service.close().result(30)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=-1", "offset=-1", "limit=x"])
def test_page_parameters_out_of_range_are_rejected(server: ManagedServer, query: str) -> None:
    with server.http() as plain:
        for path in ("training_runs", "checkpoints", "sessions"):
            reply = plain.get(f"/api/v1/{path}?{query}")

            assert reply.status_code == 400
            assert query.partition("=")[0] in reply.json()["detail"]


# Checkpoints


def test_checkpoints_are_listed_by_run_and_by_user(server: ManagedServer) -> None:
    server.add_session()
    run, other = server.add_run(), server.add_run(number=1)
    paths = [server.save(run, f"c{n}", user_metadata={"n": str(n)}) for n in range(3)]
    foreign = server.save(other, "x", "external_weights")

    of_run = rest(server).list_checkpoints(run).result(30)
    of_user = rest(server).list_user_checkpoints(limit=2, offset=1).result(30)
    with server.http() as plain:
        old = plain.get(f"/api/v1/models/{run}/checkpoints").json()

    assert [one.tinker_path for one in of_run.checkpoints] == paths[::-1]
    assert of_run.checkpoints[0].user_metadata == {"n": "2"}
    assert of_run.checkpoints[0].size_bytes == SIZE_BYTES
    assert [one.tinker_path for one in of_user.checkpoints] == [paths[2], paths[1]]
    assert of_user.cursor == types.Cursor(offset=1, limit=2, total_count=4)
    assert [one["tinker_path"] for one in old["checkpoints"]] == paths[::-1]
    assert foreign not in [one.tinker_path for one in of_run.checkpoints]


def test_paging_returns_every_checkpoint_once(server: ManagedServer) -> None:
    server.add_session()
    run = server.add_run()
    paths = {server.save(run, f"c{n}") for n in range(7)}

    found = [one.tinker_path for one in rest(server).iter_checkpoints(page_size=3)]

    assert len(found) == 7
    assert set(found) == paths


def test_an_expired_checkpoint_is_not_found_even_before_the_sweep(server: ManagedServer) -> None:
    server.add_session()
    run = server.add_run()
    expired = server.save(run, "old", expires_at=server.ledger.now() - 1)
    kept = server.save(run, "new", expires_at=server.ledger.now() + 5000)
    client = rest(server)

    of_run = client.list_checkpoints(run).result(30)
    of_user = client.list_user_checkpoints().result(30)

    assert [one.tinker_path for one in of_run.checkpoints] == [kept]
    assert [one.tinker_path for one in of_user.checkpoints] == [kept]
    assert of_user.cursor is not None
    assert of_user.cursor.total_count == 1
    assert of_run.checkpoints[0].expires_at is not None
    for call in (
        client.publish_checkpoint_from_tinker_path,
        client.delete_checkpoint_from_tinker_path,
        client.get_weights_info_by_tinker_path,
        lambda path: client.set_checkpoint_ttl_from_tinker_path(path, None),
    ):
        with pytest.raises(NotFoundError):
            call(expired).result(30)


def test_weights_info_says_what_a_checkpoint_was_trained_from(server: ManagedServer) -> None:
    server.add_session()
    path = server.save(server.add_run(), "c")

    info = rest(server).get_weights_info_by_tinker_path(path).result(30)

    assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, 8)
    assert (info.train_unembed, info.train_mlp, info.train_attn) == (False, True, True)


def test_published_checkpoints_are_readable_by_others_until_unpublished(
    server: ManagedServer,
) -> None:
    server.add_session()
    path = server.save(server.add_run(), "c")
    owner, other = rest(server), rest(server, "bob")

    with pytest.raises(NotFoundError):
        other.get_weights_info_by_tinker_path(path).result(30)
    for _ in range(2):  # done already is no error
        owner.publish_checkpoint_from_tinker_path(path).result(30)
    info = other.get_weights_info_by_tinker_path(path).result(30)
    copied = other.copy_weights(path, "p").result(30)
    for _ in range(2):
        owner.unpublish_checkpoint_from_tinker_path(path).result(30)

    assert info.lora_rank == 8
    assert other.get_weights_info_by_tinker_path(copied).result(30) == info
    with pytest.raises(NotFoundError):
        other.get_weights_info_by_tinker_path(path).result(30)
    assert audited(server) == ["checkpoint.published", "checkpoint.unpublished"]
    assert audited(server, "bob") == ["checkpoint.copied"]


def test_a_ttl_is_set_and_removed_within_its_limits(server: ManagedServer) -> None:
    server.add_session()
    run = server.add_run()
    path = server.save(run, "c")
    client = rest(server)

    client.set_checkpoint_ttl_from_tinker_path(path, 7200).result(30)
    (limited,) = client.list_checkpoints(run).result(30).checkpoints
    client.set_checkpoint_ttl_from_tinker_path(path, None).result(30)
    (unlimited,) = client.list_checkpoints(run).result(30).checkpoints

    assert limited.expires_at is not None
    left = limited.expires_at - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(hours=1) < left <= datetime.timedelta(hours=2)
    assert unlimited.expires_at is None
    for ttl in (0, -1, 3599, 10 * 365 * 24 * 3600 + 1):
        with pytest.raises(BadRequestError, match="ttl_seconds"):
            client.set_checkpoint_ttl_from_tinker_path(path, ttl).result(30)
    with server.http() as plain:
        url = f"/api/v1/training_runs/{run}/checkpoints/weights/c/ttl"
        assert plain.put(url, json={}).status_code == 400
        assert plain.put(url, json={"ttl_seconds": 10**30}).status_code == 400


def test_deleting_a_checkpoint_deletes_its_files(server: ManagedServer) -> None:
    server.add_session()
    run = server.add_run()
    path = server.save(run, "c")

    rest(server).delete_checkpoint_from_tinker_path(path).result(30)

    assert rest(server).list_checkpoints(run).result(30).checkpoints == []
    assert not server.store.exists(CheckpointPath.parse(path))
    with pytest.raises(NotFoundError):
        rest(server).delete_checkpoint_from_tinker_path(path).result(30)
    assert audited(server) == ["checkpoint.deleted"]


def test_a_checkpoint_saved_again_during_its_deletion_is_kept(
    server: ManagedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add_session()
    run = server.add_run()
    path = CheckpointPath.parse(server.save(run, "c"))
    newer, delete = path.new_edition(7), server.store.delete

    async def save_anew() -> None:
        entries = server.ledger.entries(CheckpointEntry)
        old = await entries.get(str(path))
        assert old is not None
        await entries.put(msgspec.structs.replace(old, edition=newer.edition))

    def delete_late(place: CheckpointPath) -> bool:
        server.write(newer, FILES)
        server.run(save_anew())
        return delete(place)

    monkeypatch.setattr(server.store, "delete", delete_late)
    rest(server).delete_checkpoint_from_tinker_path(str(path)).result(30)

    assert len(rest(server).list_checkpoints(run).result(30).checkpoints) == 1
    assert server.store.exists(newer)
    assert not server.store.exists(path)


def test_repeating_a_delete_whose_reply_was_lost_succeeds(server: ManagedServer) -> None:
    server.add_session()
    run = server.add_run()
    server.save(run, "c")
    url = f"/api/v1/training_runs/{run}/checkpoints/weights/c"

    with server.http() as plain:
        key = {"X-Idempotency-Key": "k"}
        statuses = [plain.delete(url, headers=key).status_code for _ in range(3)]
        without_key = plain.delete(url).status_code

    assert statuses == [204, 204, 204]
    assert without_key == 404
    assert audited(server) == ["checkpoint.deleted"]


# Copies


def test_a_copy_gets_its_own_run_and_outlives_its_source(server: ManagedServer) -> None:
    server.add_session()
    source = server.save(
        server.add_run(), "c", expires_at=server.ledger.now() + 5000, user_metadata={"a": "b"}
    )
    client = rest(server)

    copied = client.copy_weights(source, "elsewhere").result(30)
    client.delete_checkpoint_from_tinker_path(source).result(30)
    run = client.get_training_run_by_tinker_path(copied).result(30)
    (listed,) = client.list_checkpoints(run.training_run_id).result(30).checkpoints
    in_project = client.list_training_runs(project_id="elsewhere").result(30)

    assert copied.endswith("/weights/c")
    assert (listed.expires_at, listed.user_metadata) == (None, {"a": "b"})
    assert listed.size_bytes == SIZE_BYTES
    assert [one.training_run_id for one in in_project.training_runs] == [run.training_run_id]
    content = b"".join(server.store.read(CheckpointPath.parse(copied), "adapter_config.json"))
    assert content == FILES["adapter_config.json"]
    client.delete_checkpoint_from_tinker_path(copied).result(30)
    with pytest.raises(NotFoundError):
        client.get_training_run(run.training_run_id).result(30)


def test_a_copy_is_made_once_for_each_idempotency_key(server: ManagedServer) -> None:
    server.add_session()
    path = server.save(server.add_run(), "c")
    body = {"source_path": path, "destination_project_id": "p", "ttl_seconds": 4000}

    def copy(key: str) -> str:
        with server.http() as plain:
            reply = plain.post(
                "/api/v1/copy_weights", json=body, headers={"X-Idempotency-Key": key}
            )
            return str(reply.json()["tinker_path"])

    assert copy("k1") == copy("k1")
    assert copy("k1") != copy("k2")
    assert server.run(server.ledger.entries(CheckpointEntry).count()) == 3
    assert audited(server) == ["checkpoint.copied", "checkpoint.copied"]


def test_a_copy_with_the_owners_key_needs_no_publication(server: ManagedServer) -> None:
    server.add_session()
    path = server.save(server.add_run(), "c")
    other = rest(server, "bob")

    with pytest.raises(NotFoundError):
        other.copy_weights(path, "p").result(30)
    with pytest.raises(NotFoundError):
        other.copy_weights(path, "p", weights_access_token="tml-wrong").result(30)
    copied = other.copy_weights(path, "p", weights_access_token=key_of("alice")).result(30)

    assert other.get_weights_info_by_tinker_path(copied).result(30).lora_rank == 8
    with pytest.raises(NotFoundError):
        rest(server).get_weights_info_by_tinker_path(copied).result(30)


# Files


def test_exported_files_are_fetched_from_urls_without_a_key(server: ManagedServer) -> None:
    server.add_session()
    path = server.save(server.add_run(), "e", "external_weights")

    given = rest(server).get_external_weights_urls(path).result(30)

    assert set(given.urls) == set(FILES)
    assert given.expires > datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=10)
    for name, url in given.urls.items():
        reply = httpx.get(url)  # without a credential
        assert reply.status_code == 200
        assert reply.content == FILES[name]
        assert int(reply.headers["content-length"]) == len(FILES[name])


def test_only_exports_have_file_urls(server: ManagedServer) -> None:
    server.add_session()
    run = server.add_run()
    server.save(run, "c")

    with server.http() as plain:
        reply = plain.get(
            f"/api/v1/training_runs/{run}/checkpoints/weights/c/external_weights_urls"
        )

    assert reply.status_code == 400
    assert "save_weights_external" in reply.json()["detail"]


def test_archive_requests_redirect_to_a_tar(server: ManagedServer) -> None:
    server.add_session()
    path = server.save(server.add_run(), "s", "sampler_weights")

    given = rest(server).get_checkpoint_archive_url_from_tinker_path(path).result(30)
    reply = httpx.get(given.url)

    with tarfile.open(fileobj=io.BytesIO(reply.content)) as tar:
        found = {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]
    weights = found["adapter_model.safetensors"]
    assert found["adapter_config.json"] == FILES["adapter_config.json"]
    assert b"base_model.model.model.unembed_tokens.lora_A.weight" in weights[:300]
    assert weights[-1000:] == FILES["adapter_model.safetensors"][-1000:]
    assert given.expires > datetime.datetime.now(datetime.UTC)


@pytest.mark.parametrize("what", ["file", "archive"])
def test_interrupted_downloads_resume_where_they_stopped(server: ManagedServer, what: str) -> None:
    server.add_session()
    run = server.add_run()
    path = server.save(run, "e", "external_weights")
    url = (
        rest(server).get_external_weights_urls(path).result(30).urls["adapter_model.safetensors"]
        if what == "file"
        else rest(server).get_checkpoint_archive_url_from_tinker_path(path).result(30).url
    )
    whole = httpx.get(url)
    size, tag = len(whole.content), whole.headers["etag"]

    def part(header: str, **more: str) -> httpx.Response:
        return httpx.get(url, headers={"Range": header, **more})

    middle = part("bytes=1000-1999", **{"If-Range": tag})
    assert (middle.status_code, middle.content) == (206, whole.content[1000:2000])
    assert middle.headers["content-range"] == f"bytes 1000-1999/{size}"
    assert part("bytes=700000-").content == whole.content[700000:]
    assert part("bytes=-10").content == whole.content[-10:]
    assert part(f"bytes={size}-").status_code == 416
    assert part("bytes=5-1").status_code == 200
    assert part("bytes=0-1,4-5").status_code == 200
    assert part("bytes=0-1", **{"If-Range": '"other"'}).status_code == 200
    assert httpx.get(url, headers={"If-None-Match": tag}).status_code == 304
    head = httpx.head(url)
    assert (head.status_code, head.headers["content-length"]) == (200, str(size))
    assert head.headers["accept-ranges"] == "bytes"


def test_files_can_be_fetched_with_a_key_too(server: ManagedServer) -> None:
    server.add_session()
    run = server.add_run()
    server.save(run, "c")
    folder = f"/api/v1/tinsmith/training_runs/{run}/checkpoints/weights/c"

    with server.http() as owner, server.http("bob") as other:
        file = owner.get(f"{folder}/files/adapter_config.json")
        archive = owner.get(f"{folder}/archive.tar")
        missing = owner.get(f"{folder}/files/nothing.json")
        outside = owner.get(f"{folder}/files/..%2f..%2fcheckpoint.json")
        manifest = owner.get(f"{folder}/files/checkpoint.json")
        refused = [
            other.get(f"{folder}/{end}") for end in ("files/adapter_config.json", "archive.tar")
        ]

    assert file.content == FILES["adapter_config.json"]
    assert archive.content[:19] == b"adapter_config.json"
    assert [r.status_code for r in (missing, outside, manifest, *refused)] == [404] * 5


def test_a_download_url_is_valid_for_one_file_of_one_tenant_and_expires(
    server: ManagedServer,
) -> None:
    server.add_session()
    run = server.add_run()
    path = server.save(run, "e", "external_weights")
    urls = rest(server).get_external_weights_urls(path).result(30).urls
    url = urls["adapter_config.json"]
    ticket = url.split("/downloads/")[1].split("/")[0]

    tricks = [
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace(ticket, ticket[:-1] + ("A" if ticket[-1] != "A" else "B")),
        url.replace(ticket, ticket.split(".")[0]),
        url.replace(ticket, "A" * 10_000),
        url.replace(ticket, "%00"),
        f"{server.base_url}/downloads/x/y",
    ]

    assert [httpx.get(trick).status_code for trick in tricks] == [404] * len(tricks)
    rest(server).delete_checkpoint_from_tinker_path(path).result(30)
    assert httpx.get(url).status_code == 404


def test_another_tenant_s_download_url_is_revoked_when_unpublished(
    server: ManagedServer,
) -> None:
    server.add_session()
    path = server.save(server.add_run(), "e", "external_weights")
    owner, other = rest(server), rest(server, "bob")
    owner.publish_checkpoint_from_tinker_path(path).result(30)
    files = other.get_external_weights_urls(path).result(30).urls
    archive = other.get_checkpoint_archive_url_from_tinker_path(path).result(30).url
    urls = [*files.values(), archive]
    own = owner.get_external_weights_urls(path).result(30).urls

    before = [httpx.get(url).status_code for url in urls]
    owner.unpublish_checkpoint_from_tinker_path(path).result(30)

    assert before == [200] * len(urls)
    assert [httpx.get(url).status_code for url in urls] == [404] * len(urls)
    assert [httpx.get(url).status_code for url in own.values()] == [200] * len(own)


def test_download_urls_start_with_the_public_url(tmp_path: Path) -> None:
    with ManagedServer(tmp_path, "memory", public_url="https://gpu.example/svc/") as server:
        server.add_session()
        path = server.save(server.add_run(), "e", "external_weights")

        urls = rest(server).get_external_weights_urls(path).result(30).urls

        url = urls["adapter_config.json"]
        assert url.startswith("https://gpu.example/svc/downloads/")
        behind_proxy = url.replace("https://gpu.example/svc", server.base_url)
        assert httpx.get(behind_proxy).content == FILES["adapter_config.json"]


def test_the_file_is_closed_when_the_downloading_client_disconnects(server: ManagedServer) -> None:
    server.add_session()
    run = server.add_run()
    big = {"adapter_model.safetensors": bytes(30_000_000)}
    path = server.save(run, "e", "external_weights", files=big)
    (url,) = rest(server).get_external_weights_urls(path).result(30).urls.values()

    with httpx.stream("GET", url) as reply:
        next(reply.iter_bytes(1000))
    server.wait_for(lambda: any(r.endpoint == "download" and r.client_left for r in server.reports))

    rest(server).delete_checkpoint_from_tinker_path(path).result(30)
    server.store.sweep()
    assert server.store.sweep() == 0


# Sessions


def test_a_session_shows_its_runs_and_samplers(server: ManagedServer) -> None:
    server.add_session("s1", display_name="a name", user_metadata={"a": 1, "b": "x"})
    runs = [server.add_run("s1", n) for n in range(2)]
    samplers = [server.add_sampler("s1", n) for n in range(2)]

    shown = rest(server).get_session("s1").result(30)

    assert (shown.training_run_ids, shown.sampler_ids) == (runs, samplers)
    assert shown.display_name == "a name"
    assert shown.user_metadata == {"a": "1", "b": "x"}


def test_sessions_are_listed_newest_first(server: ManagedServer) -> None:
    names = [server.add_session(f"s{n}") for n in range(4)]

    listed = rest(server).list_sessions(limit=2, offset=1).result(30)

    assert listed.sessions == [names[2], names[1]]
    assert listed.cursor == types.Cursor(offset=1, limit=2, total_count=4)


def search(server: ManagedServer, **fields: Any) -> list[str]:
    """The ids that a search finds, page by page."""
    found: list[str] = []
    cursor = None
    while True:
        with server.http() as plain:
            body = {"limit": 2, **fields, **({"cursor": cursor} if cursor else {})}
            reply = plain.post("/api/v1/sessions/search", json=body)
        assert reply.status_code == 200, reply.text
        page = reply.json()
        found += [one["session_id"] for one in page["sessions"]]
        cursor = page.get("next_cursor")
        if cursor is None:
            return found


def test_sessions_are_searched(server: ManagedServer) -> None:
    now = server.ledger.now()
    finished = {"type": "client_finished", "reason": {"type": "success"}}
    server.add_session("s1", display_name="Big Run one", project_id="p1")
    server.add_session("s2", display_name="big other", user_metadata={"k": "v", "n": 1})
    server.add_session("s3", ended_at=now, ending=finished)
    server.add_session("s4", ended_at=now, ending={"type": "cancelled", "detail": "lost"})
    server.add_session("s5")
    server.add_session("theirs", tenant="bob")
    run = server.add_run("s1")
    server.save(run, "c")

    assert search(server) == ["s5", "s4", "s3", "s2", "s1"]
    assert search(server, display_name="BIG") == ["s2", "s1"]
    assert search(server, display_name="run big") == ["s1"]
    assert search(server, display_name="run big", session_id="s5") == ["s5", "s1"]
    assert search(server, session_id="theirs") == []
    assert search(server, project_ids=["p1"]) == ["s1"]
    assert search(server, user_metadata={"k": "v", "n": "1"}) == ["s2"]
    assert search(server, statuses=[{"type": "active"}]) == ["s5", "s2", "s1"]
    assert search(server, statuses=[{"type": "cancelled"}]) == ["s4"]
    reasons = {"type": "client_finished", "reasons": ["errored"]}
    assert search(server, statuses=[reasons]) == []
    assert search(server, statuses=[{**reasons, "reasons": ["success"]}]) == ["s3"]
    assert search(server, owner={"type": "user", "owner_urns": ["tml:user:alice"]})[0] == "s5"
    assert search(server, owner={"type": "user", "owner_urns": ["tml:user:bob"]}) == []
    with server.http() as plain:
        page = plain.post("/api/v1/sessions/search", json={"session_id": "s1"}).json()
        too_many = plain.post("/api/v1/sessions/search", json={"limit": 201})
    assert page["sessions"][0]["checkpoints_count"] == 1
    assert page["sessions"][0]["checkpoint_storage_bytes"] == SIZE_BYTES
    assert page["sessions"][0]["owner"] == "tml:user:alice"
    assert too_many.status_code == 400


def test_a_search_continues_after_the_session_of_its_cursor_was_deleted(
    server: ManagedServer,
) -> None:
    for number in range(4):
        server.add_session(f"s{number}", created_at=1000.0 + number)
    with server.http() as plain:
        page = plain.post("/api/v1/sessions/search", json={"limit": 2}).json()
        server.run(server.ledger.entries(SessionEntry).remove("s2"))
        server.add_session("s9")
        body = {"limit": 2, "cursor": page["next_cursor"]}
        rest_of = plain.post("/api/v1/sessions/search", json=body).json()

    assert [one["session_id"] for one in page["sessions"]] == ["s3", "s2"]
    assert [one["session_id"] for one in rest_of["sessions"]] == ["s1", "s0"]


def test_a_session_is_assigned_to_a_project(server: ManagedServer) -> None:
    server.add_session("s1")

    rest(server).assign_session_project("s1", "mine").result(30)

    assert search(server, project_ids=["mine"]) == ["s1"]
    assert audited(server) == ["project.session_assigned"]
    with server.http() as plain:
        for project in ("", "x" * 1000, "a\x00b"):
            reply = plain.put("/api/v1/sessions/s1/project", json={"project_id": project})
            assert reply.status_code == 400
            assert "project_id" in reply.json()["detail"]
        assert plain.put("/api/v1/sessions/s1/project", json={}).status_code == 400


def test_a_trace_shows_how_long_commands_waited_and_ran(server: ManagedServer) -> None:
    service = tinsmith.ServiceClient(base_url=server.base_url, api_key=key_of("alice"))
    client = service.create_lora_training_client(MODEL, rank=4)
    for _ in range(3):
        client.optim_step(types.AdamParams()).result(30)
    session_id = client.model_id.partition(":train")[0]

    url = rest(server).export_session_trace(session_id).result(30)
    trace = httpx.get(url).json()

    events = trace["traceEvents"]
    runs = [event for event in events if event.get("cat") == "run"]
    queued = [event for event in events if event.get("cat") == "queue"]
    assert [event["name"] for event in runs] == ["create_model"] + ["optim_step"] * 3
    assert len(queued) == 4
    assert {event["args"]["state"] for event in runs} == {"settled"}
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["train:0"]
    for before, after in zip(queued, runs, strict=True):
        assert before["ts"] + before["dur"] == after["ts"]
        assert after["dur"] >= 0
    service.close().result(30)


# Usage


def test_usage_is_what_the_ledger_counted(server: ManagedServer) -> None:
    """By hour, session, base model and kind, whichever models and samplers the session had."""
    server.add_session("s1", project_id="p", user_metadata={"a": "b"})
    key = {"tenant_id": TenantId("alice"), "session_id": "s1", "base_model": MODEL}
    kinds = {
        "training": 1000,
        "sampling_prefill": 20,
        "sampling_prefill_cached": 5,
        "sampling_sample": 7,
        "checkpoint": 2,
        "storage": 1.5,
        "unheard_of": 1,
    }
    uses = [
        Use(key=UsageKey(kind=kind, queue_id=queue_id, **key), amount=amount / 2)  # type: ignore[arg-type]
        for kind, amount in kinds.items()
        for queue_id in ("s1:train:0", "s1:sample:0")
    ]
    server.run(server.ledger.add_uses(uses))
    this_hour = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)
    hour = datetime.timedelta(hours=1)

    usage = admin(server).get_billing_usage(this_hour - hour, this_hour + 2 * hour).result(30)
    theirs = admin(server, "bob").get_billing_usage(this_hour - hour, this_hour + hour).result(30)

    told = {
        (event.event_info.type, getattr(event.event_info, "cached", None)): event.event_info
        for event in usage.data
    }
    assert len(usage.data) == 6
    assert told["training", None] == types.TrainingBillingEvent(token_count=1000)
    assert told["sampling_prefill", True].token_count == 5  # type: ignore[union-attr]
    assert told["storage", None] == types.StorageBillingEvent(gigabyte_hours=1.5)
    assert {event.project_id for event in usage.data} == {"p"}
    assert usage.sessions["s1"].user_metadata == {"a": "b"}
    assert theirs.data == []


def test_usage_ranges_must_be_whole_hours_within_two_weeks(server: ManagedServer) -> None:
    def status(since: str, before: str) -> int:
        with server.http() as plain:
            query = {"starting_on": since, "ending_before": before}
            return plain.get("/api/v1/billing/usage/events", params=query).status_code

    assert status("2026-01-01T00:00:00Z", "2026-01-15T00:00:00Z") == 200
    assert status("2026-01-01T00:00:00Z", "2026-01-15T01:00:00Z") == 400
    assert status("2026-01-01T00:30:00Z", "2026-01-02T00:00:00Z") == 400
    assert status("2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z") == 400
    assert status("0001-01-01T00:00:00Z", "0001-01-02T00:00:00Z") == 400
    assert status("x", "y") == 400


def test_storage_is_reported_by_project(server: ManagedServer) -> None:
    server.add_session("s1", project_id="p1")
    server.add_session("s2", project_id="p2")
    server.save(server.add_run("s1"), "a")
    run = server.add_run("s2")
    server.save(run, "a")
    server.save(run, "b")
    server.save(run, "gone", expires_at=1.0)

    usage = admin(server).get_current_checkpoint_storage_usage().result(30)
    one = admin(server).get_current_checkpoint_storage_usage("p2").result(30)

    assert [(item.project_id, item.checkpoint_count) for item in usage.data] == [
        ("p1", 1),
        ("p2", 2),
    ]
    (item,) = one.data
    assert (item.size_bytes, item.user_name) == (2 * SIZE_BYTES, "alice")


def test_the_audit_log_is_queried_by_day_and_resource(server: ManagedServer) -> None:
    day = datetime.date(2026, 3, 1)
    noon = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC).timestamp()
    for number, (event, at) in enumerate(
        [
            ("checkpoint.deleted", noon),
            ("project.session_assigned", noon + 1),
            ("checkpoint.deleted", noon + 86400),
        ]
    ):
        entry = AuditEntry(id=f"a{number}", tenant_id=TenantId("alice"), created_at=at, event=event)
        server.run(server.ledger.entries(AuditEntry).add(entry))
    client = admin(server)

    whole = client.get_audit_log().result(30).entries
    of_day = client.get_audit_log(day=day).result(30).entries
    of_kind = client.get_audit_log("checkpoints", day=day).result(30).entries

    assert len(whole) == 3
    assert [one.event for one in of_day] == ["checkpoint.deleted", "project.session_assigned"]
    assert [one.timestamp.timestamp() for one in of_kind] == [noon]
    assert client.get_audit_log("teams").result(30).entries == []
    assert admin(server, "bob").get_audit_log().result(30).entries == []


# Trouble with the store


def test_an_unreachable_store_is_a_503_and_loses_nothing(
    server: ManagedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add_session()
    run = server.add_run()
    path = server.save(run, "e", "external_weights")
    url = f"/api/v1/training_runs/{run}/checkpoints/external_weights/e"
    copy = {"source_path": path, "destination_project_id": "p"}
    key = {"X-Idempotency-Key": "k"}

    def unavailable(*_: object, **__: object) -> None:
        raise CheckpointUnavailableError("/srv/disk does not answer")

    with server.http() as plain:
        with monkeypatch.context() as broken:
            for name in ("delete", "copy", "info", "open"):
                broken.setattr(server.store, name, unavailable)
            replies = [
                plain.delete(url, headers=key),
                plain.post("/api/v1/copy_weights", json=copy, headers=key),
                plain.get(f"{url}/external_weights_urls"),
                plain.get(f"/api/v1/tinsmith{url.removeprefix('/api/v1')}/archive.tar"),
            ]
        (listed,) = plain.get(f"/api/v1/training_runs/{run}/checkpoints").json()["checkpoints"]
        copied = plain.post("/api/v1/copy_weights", json=copy, headers=key)
        deleted = plain.delete(url, headers=key)

    assert [reply.status_code for reply in replies] == [503] * 4
    assert {reply.headers["retry-after-ms"] for reply in replies} == {"5000"}
    assert "/srv" not in "".join(reply.text for reply in replies)
    assert listed["tinker_path"] == path
    assert (copied.status_code, deleted.status_code) == (200, 204)
    assert sorted(audited(server)) == ["checkpoint.copied", "checkpoint.deleted"]


def test_a_hanging_store_does_not_delay_other_requests(
    server: ManagedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large bodies are read and payloads written on other threads than those of the store."""
    server.add_session()
    run = server.add_run()
    server.save(run, "e", "external_weights")
    url = f"/api/v1/training_runs/{run}/checkpoints/external_weights/e/archive"
    hung, freed = threading.Semaphore(0), threading.Event()
    info = server.store.info

    def hanging(path: CheckpointPath) -> Manifest:
        hung.release()
        assert freed.wait(60)
        return info(path)

    def ask() -> int:
        with server.http() as plain:
            return plain.get(url).status_code

    monkeypatch.setattr(server.store, "info", hanging)
    with concurrent.futures.ThreadPoolExecutor(STORE_THREADS * 2) as pool:
        asked = [pool.submit(ask) for _ in range(STORE_THREADS * 2)]
        for _ in range(STORE_THREADS):
            assert hung.acquire(timeout=30)
        with server.http() as plain:
            large = plain.post("/api/v1/weights_info", json={"tinker_path": "x" * 1_000_000})
            listed = plain.get(f"/api/v1/training_runs/{run}/checkpoints")
        is_waiting = not any(one.done() for one in asked)
        freed.set()

    assert (large.status_code, listed.status_code) == (422, 200)
    assert is_waiting
    assert [one.result() for one in asked] == [302] * len(asked)


def test_lost_files_are_a_404(server: ManagedServer) -> None:
    """The entry is there, the files are not: somebody deleted them on the disk."""
    server.add_session()
    run = server.add_run()
    path = server.save(run, "e", "external_weights")
    server.store.delete(CheckpointPath.parse(path))
    url = f"/api/v1/training_runs/{run}/checkpoints/external_weights/e"
    copy = {"source_path": path, "destination_project_id": "p"}

    with server.http() as plain:
        statuses = [
            plain.get(f"{url}/external_weights_urls").status_code,
            plain.get(f"{url}/archive").status_code,
            plain.post("/api/v1/copy_weights", json=copy).status_code,
            plain.delete(url).status_code,
        ]

    assert statuses == [404, 404, 404, 204]
    runs = rest(server).list_training_runs().result(30)
    assert [one.training_run_id for one in runs.training_runs] == [run]


# Strangers


MANAGEMENT = [
    ("GET", "training_runs/{run}"),
    ("GET", "training_runs/{run}/checkpoints"),
    ("GET", "models/{run}/checkpoints"),
    ("GET", "training_runs/{run}/checkpoints/external_weights/c/external_weights_urls"),
    ("GET", "training_runs/{run}/checkpoints/external_weights/c/archive"),
    ("POST", "training_runs/{run}/checkpoints/external_weights/c/publish"),
    ("DELETE", "training_runs/{run}/checkpoints/external_weights/c/publish"),
    ("PUT", "training_runs/{run}/checkpoints/external_weights/c/ttl"),
    ("DELETE", "training_runs/{run}/checkpoints/external_weights/c"),
    ("GET", "sessions/{session}"),
    ("PUT", "sessions/{session}/project"),
    ("GET", "sessions/{session}/trace_export"),
    (
        "GET",
        "tinsmith/training_runs/{run}/checkpoints/external_weights/c/files/adapter_config.json",
    ),
    ("GET", "tinsmith/training_runs/{run}/checkpoints/external_weights/c/archive.tar"),
    ("POST", "weights_info"),
    ("POST", "copy_weights"),
]


def _ask(plain: httpx.Client, method: str, path: str, run: str, session: str) -> httpx.Response:
    body = {
        "ttl_seconds": 4000,
        "project_id": "p",
        "tinker_path": f"tinker://{run}/external_weights/c",
        "source_path": f"tinker://{run}/external_weights/c",
    }
    url = f"/api/v1/{path.format(run=run, session=session)}"
    return plain.request(method, url, json=body if method in ("POST", "PUT") else None)


def test_resources_of_another_tenant_look_like_missing_ones(server: ManagedServer) -> None:
    server.add_session("s1")
    run = server.add_run("s1")
    server.save(run, "c", "external_weights")

    for method, path in MANAGEMENT:
        with server.http("bob") as stranger:
            theirs = _ask(stranger, method, path, run, "s1")
            nobodys = _ask(stranger, method, path, run.replace("s1", "s2"), "s2")

        assert theirs.status_code == nobodys.status_code == 404, (method, path, theirs.text)
        assert theirs.text.replace("s1", "s2") == nobodys.text
    with server.http() as owner:
        assert _ask(owner, *MANAGEMENT[3], run, "s1").status_code == 200
    assert audited(server, "bob") == []


HOSTILE = [
    "..",
    ".",
    "%2e%2e",
    "..%2f..%2fetc%2fpasswd",
    "%2fetc%2fpasswd",
    "a%00b",
    "%00",
    "%ff%fe",
    "x" * 10_000,
    "%25",
    "a%0d%0aX-Evil:1",
    "%F0%9F%92%A9",
    "con",
    "a%5cb",
    "a?b",
]


def test_hostile_ids_are_rejected(server: ManagedServer) -> None:
    """Sent as they are: clients would tidy such a path up."""
    wire = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for hostile in HOSTILE:
        folder = f"training_runs/{hostile}/checkpoints"
        for path in (
            f"training_runs/{hostile}",
            folder,
            f"sessions/{hostile}",
            f"sessions/{hostile}/trace_export",
            f"{folder}/external_weights/c/external_weights_urls",
            f"training_runs/r/checkpoints/weights/{hostile}/archive",
            f"training_runs/r/checkpoints/..%2fweights/{hostile}/archive",
            f"tinsmith/training_runs/r/checkpoints/weights/c/files/{hostile}",
        ):
            wire.request("GET", f"/api/v1/{path}", headers={"X-API-Key": key_of("alice")})
            reply = wire.getresponse()

            assert 400 <= reply.status < 500, (path[:100], reply.status)
            assert json.loads(reply.read())["detail"]
        with server.http() as client:
            for text in (hostile, f"tinker://{hostile}/weights/c", f"tinker://r/weights/{hostile}"):
                refused = client.post("/api/v1/weights_info", json={"tinker_path": text})
                assert 400 <= refused.status_code < 500
    wire.close()


def test_clients_cannot_address_snapshots_or_sampler_weights(server: ManagedServer) -> None:
    server.add_session()
    run = server.add_run()
    server.write(CheckpointPath.snapshot(run, 3), FILES)

    with server.http() as plain:
        for path in (
            f"snapshots/{run}/3",
            f"tinker://{run}/snapshots/3",
            "samplers/s1/weights",
            "uploads/upload-0/" + "0" * 16,
        ):
            for url, field in (("weights_info", "tinker_path"), ("copy_weights", "source_path")):
                body = {field: path, "destination_project_id": "p"}
                reply = plain.post(f"/api/v1/{url}", json=body)
                assert reply.status_code in (404, 422)
        reply = plain.get(f"/api/v1/training_runs/{run}/checkpoints/snapshots/3/archive")
    assert reply.status_code in (404, 422)


def test_a_key_that_revokes_itself_is_recorded_in_the_audit_log(server: ManagedServer) -> None:
    with server.http() as plain:
        assert plain.delete("/api/v1/auth/apikey/me").status_code == 204
        assert plain.get("/api/v1/sessions").status_code == 401

    (noted,) = server.run(server.ledger.entries(AuditEntry).all())
    assert (noted.event, noted.tenant_id) == ("organization.key_revoked", "alice")
    assert key_of("alice") not in str(noted)


def test_every_extension_route_is_probed_or_open() -> None:
    """A new one cannot be forgotten here; those of the protocol are probed in `test_tenants`."""
    ours = {one.name for one in collect().endpoints} - set(ENDPOINTS)

    probed = {"download_checkpoint_file", "download_checkpoint_archive"}
    heads = {f"{name}_head" for name in (*probed, "download")}
    assert ours == probed | heads | {"download", "upload_file", "openapi", "docs"}
    assert collect().open == {
        "healthz",
        "download",
        "download_head",
        "upload_file",
        "openapi",
        "docs",
    }


def test_management_routes_require_a_key(server: ManagedServer) -> None:
    for method, path in MANAGEMENT:
        with httpx.Client(base_url=server.base_url) as plain:
            assert _ask(plain, method, path, "r", "s").status_code == 401
