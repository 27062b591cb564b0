"""Adapters that were trained elsewhere: uploaded file by file, checked, and kept as checkpoints."""

from __future__ import annotations

import base64
import concurrent.futures
import datetime
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import pytest

import tinsmith
from tests.contract.s3_server import S3Server
from tests.integration.service.api.managed import ManagedServer, key_of
from tests.integration.service.api.running import MODEL, TINY
from tinsmith.checkpoints.format import LoraPair, StoredAdapter, read_adapter, write_adapter
from tinsmith.checkpoints.paths import UPLOADS, CheckpointPath
from tinsmith.checkpoints.registry import open_store
from tinsmith.cli.main import main
from tinsmith.errors import ExperimentalWarning, LedgerUnavailableError
from tinsmith.service.api import signed_links, weight_uploads
from tinsmith.service.api.keys import add_tenant
from tinsmith.service.api.sweeper import Sweeper
from tinsmith.service.ledger.records import (
    AuditEntry,
    CheckpointEntry,
    ModelEntry,
    TenantId,
    UploadEntry,
)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
START = "/api/v1/external_weights_upload_start"
FINISH = "/api/v1/external_weights_upload_finish"
LORA: dict[str, Any] = {"rank": 4, "train_unembed": False, "train_mlp": False, "train_attn": True}
BODY = {"base_model": MODEL, "lora_config": LORA}
LAYERS = [f"model.layers.{n}.self_attn.q_proj" for n in range(2)]
SIZED = msgspec.structs.replace(TINY, layers=dict.fromkeys(LAYERS, (16, 8)))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ManagedServer]:
    with ManagedServer(
        tmp_path / "service", "sqlite", model=SIZED, import_bytes=100_000, body_bytes=4096
    ) as running:
        yield running


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        server.make_bucket()
        yield server
    finally:
        server.remove()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder as `save_weights_external` and `peft` write it."""
    return written(tmp_path / "adapter")


def written(folder: Path, *, rank: int = 4, inputs: int = 8, names: list[str] = LAYERS) -> Path:
    folder.mkdir()
    pair = LoraPair(np.ones((rank, inputs), np.float32), np.full((16, rank), 0.5, np.float32))
    layers = dict.fromkeys(names, pair)
    write_adapter(folder, StoredAdapter(base_model=MODEL, rank=rank, alpha=8.0, layers=layers))
    return folder


def put(url: str, content: bytes, **headers: str) -> httpx.Response:
    """A `PUT` as any program would make it, without a key."""
    return httpx.put(url, content=content, headers=headers, timeout=60)


def send(folder: Path, started: dict[str, Any]) -> None:
    for name, url in started["urls"].items():
        reply = put(url, (folder / name).read_bytes())
        assert reply.status_code == 200, reply.text


def upload(client: httpx.Client, folder: Path, **fields: Any) -> httpx.Response:
    """All calls of an upload; the last reply."""
    started = client.post(START, json={**BODY, **fields})
    assert started.status_code == 200, started.text
    send(folder, started.json())
    return client.post(FINISH, json={"upload_id": started.json()["upload_id"]})


def internal_files(server: ManagedServer) -> list[CheckpointPath]:
    return [path for path in server.store.paths() if path.kind == UPLOADS]


def assert_nothing_is_visible(server: ManagedServer) -> None:
    for kind in (ModelEntry, CheckpointEntry):
        assert server.run(server.ledger.entries(kind).count()) == 0
    assert [path for path in server.store.paths() if not path.is_internal] == []


# The documented shapes


def test_an_uploaded_adapter_is_an_external_checkpoint_like_others(
    server: ManagedServer, adapter: Path
) -> None:
    rest = tinsmith.RestClient(base_url=server.base_url, api_key=key_of("alice"))

    with server.http() as client:
        started = client.post(START, json={**BODY, "destination_project_id": "p"})
        told = started.json()
        send(adapter, told)
        done = client.post(FINISH, json={"upload_id": told["upload_id"]})

    assert (started.status_code, done.status_code) == (200, 200)
    assert set(told) == {"upload_id", "urls", "expires"}
    assert set(told["urls"]) == {CONFIG, WEIGHTS}
    expires = datetime.datetime.fromisoformat(told["expires"])
    assert expires > datetime.datetime.now(datetime.UTC)
    assert set(done.json()) == {"tinker_path"}
    path = done.json()["tinker_path"]
    assert tinsmith.types.ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type == (
        "external"
    )
    info = rest.get_weights_info_by_tinker_path(path).result(30)
    assert (info.base_model, info.lora_rank) == (MODEL, 4)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, False, False)
    (listed,) = rest.list_user_checkpoints().result(30).checkpoints
    assert (listed.tinker_path, listed.base_model) == (path, MODEL)
    assert len(rest.list_training_runs(project_id="p").result(30).training_runs) == 1
    with server.store.open_whole(CheckpointPath.parse(path)) as reading:
        kept = read_adapter(reading.folder)
    assert (kept.alpha, list(kept.layers)) == (8.0, LAYERS)
    assert np.array_equal(kept.layers[LAYERS[1]].b, np.full((16, 4), 0.5))
    (noted,) = server.run(server.ledger.entries(AuditEntry).all())
    assert (noted.event, noted.tinker_path) == ("checkpoint.imported", path)
    sha256 = hashlib.sha256((adapter / WEIGHTS).read_bytes()).hexdigest()
    assert noted.details[WEIGHTS] == sha256
    # Nothing is left of what was sent.
    assert internal_files(server) == []
    assert server.run(server.ledger.entries(UploadEntry).count()) == 0
    assert server.store.sweep() == 0


def test_the_client_has_the_documented_calls(server: ManagedServer, adapter: Path) -> None:
    rest = tinsmith.RestClient(base_url=server.base_url, api_key=key_of("alice"))
    lora = tinsmith.types.LoraConfig(**LORA)

    with pytest.warns(ExperimentalWarning, match="external_weights_upload_start"):
        started = rest.external_weights_upload_start(base_model=MODEL, lora_config=lora).result(30)
    for name, url in started.urls.items():
        assert put(url, (adapter / name).read_bytes()).status_code == 200
    with pytest.warns(ExperimentalWarning, match="external_weights_upload_finish"):
        done = rest.external_weights_upload_finish(started.upload_id).result(30)

    assert done.tinker_path == f"tinker://{started.upload_id}/external_weights/adapter"
    assert started.expires.tzinfo is not None


def test_a_file_larger_than_other_bodies_is_received_in_pieces(
    server: ManagedServer, tmp_path: Path
) -> None:
    names = [f"model.layers.{n}.self_attn.q_proj" for n in range(60)]
    folder = written(tmp_path / "large", names=names)
    with server.http() as client:
        urls = client.post(START, json=BODY).json()["urls"]

    reply = put(urls[WEIGHTS], (folder / WEIGHTS).read_bytes())

    assert (folder / WEIGHTS).stat().st_size > server.body_limits.body_bytes
    assert reply.status_code == 200, reply.text
    assert reply.headers["ETag"] == (
        f'"{hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()}"'
    )


def test_metadata_is_stored_with_an_uploaded_checkpoint(
    server: ManagedServer, adapter: Path
) -> None:
    with server.http() as client:
        path = upload(client, adapter, user_metadata={"task": "chat"}).json()["tinker_path"]
        listed = client.get("/api/v1/checkpoints").json()["checkpoints"]

    assert [(one["tinker_path"], one["user_metadata"]) for one in listed] == [
        (path, {"task": "chat"})
    ]


# Again, too early, too late


def test_every_upload_call_can_be_repeated(server: ManagedServer, adapter: Path) -> None:
    key = {"X-Idempotency-Key": "k"}

    with server.http() as client:
        started = [client.post(START, json=BODY, headers=key).json() for _ in range(2)]
        put(started[0]["urls"][WEIGHTS], b"something else")
        send(adapter, started[0])
        send(adapter, started[1])
        body = {"upload_id": started[0]["upload_id"]}
        done = [client.post(FINISH, json=body) for _ in range(3)]
        late = put(started[0]["urls"][CONFIG], b"{}")

    assert started[0]["upload_id"] == started[1]["upload_id"]
    assert [reply.status_code for reply in done] == [200, 200, 200]
    assert len({reply.json()["tinker_path"] for reply in done}) == 1
    assert late.status_code == 404
    assert server.run(server.ledger.entries(CheckpointEntry).count()) == 1
    assert internal_files(server) == []


def test_finishing_concurrently_gives_one_checkpoint(server: ManagedServer, adapter: Path) -> None:
    with server.http() as client:
        started = client.post(START, json=BODY).json()
        send(adapter, started)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            body = {"upload_id": started["upload_id"]}
            done = list(pool.map(lambda _: client.post(FINISH, json=body), range(8)))

    assert {reply.status_code for reply in done} == {200}
    assert len({reply.json()["tinker_path"] for reply in done}) == 1
    assert server.run(server.ledger.entries(CheckpointEntry).count()) == 1
    assert server.run(server.ledger.entries(ModelEntry).count()) == 1
    assert len(server.run(server.ledger.entries(AuditEntry).all())) == 1


def test_finishing_before_every_file_has_arrived_is_refused_and_can_be_repeated(
    server: ManagedServer, adapter: Path
) -> None:
    with server.http() as client:
        started = client.post(START, json=BODY).json()
        body = {"upload_id": started["upload_id"]}
        nothing = client.post(FINISH, json=body)
        put(started["urls"][CONFIG], (adapter / CONFIG).read_bytes())
        half = client.post(FINISH, json=body)
        assert_nothing_is_visible(server)
        put(started["urls"][WEIGHTS], (adapter / WEIGHTS).read_bytes())
        done = client.post(FINISH, json=body)

    assert (nothing.status_code, half.status_code) == (400, 400)
    assert CONFIG in nothing.json()["detail"]
    assert CONFIG not in half.json()["detail"]
    assert WEIGHTS in half.json()["detail"]
    assert done.status_code == 200


def test_a_put_that_breaks_off_leaves_nothing_and_can_be_repeated(
    server: ManagedServer, adapter: Path
) -> None:
    content = (adapter / WEIGHTS).read_bytes()
    with server.http() as client:
        started = client.post(START, json=BODY).json()
        url = started["urls"][WEIGHTS]

        def half() -> Iterator[bytes]:
            yield content[:100]
            raise ConnectionAbortedError

        with pytest.raises(ConnectionAbortedError):
            httpx.put(url, content=half(), headers={"Content-Length": str(len(content))})
        server.wait_for(lambda: any(report.client_left for report in server.reports))
        assert internal_files(server) == []
        send(adapter, started)
        done = client.post(FINISH, json={"upload_id": started["upload_id"]})

    assert done.status_code == 200
    assert server.store.sweep() == 0


def test_an_upload_survives_a_restart_between_put_and_finish(tmp_path: Path, adapter: Path) -> None:
    with ManagedServer(tmp_path / "s", "sqlite", model=SIZED) as first, first.http() as client:
        started = client.post(START, json=BODY).json()
        put(started["urls"][WEIGHTS], (adapter / WEIGHTS).read_bytes())
        port = first.port
    with ManagedServer(tmp_path / "s", "sqlite", model=SIZED) as second, second.http() as client:
        url = started["urls"][CONFIG].replace(f":{port}/", f":{second.port}/")
        put(url, (adapter / CONFIG).read_bytes())
        done = client.post(FINISH, json={"upload_id": started["upload_id"]})

    assert done.status_code == 200, done.text


def test_an_upload_that_is_never_finished_is_swept(
    server: ManagedServer, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.http() as client:
        started = client.post(START, json=BODY).json()
        put(started["urls"][WEIGHTS], (adapter / WEIGHTS).read_bytes())
        sweeper = Sweeper(server.ledger, server.store)
        early = server.run(sweeper.sweep())
        kept = internal_files(server)

        later = server.ledger.now() + weight_uploads.KEPT_S + 1
        monkeypatch.setattr(type(server.ledger), "now", lambda _: later)
        # What a crash between storing a file and naming it leaves behind.
        stray = CheckpointPath.uploaded(started["upload_id"])
        server.write(stray, {CONFIG: b"{}"})
        swept = server.run(sweeper.sweep())
        finished = client.post(FINISH, json={"upload_id": started["upload_id"]})

    assert (early.uploads, len(kept)) == (0, 1)
    assert swept.uploads == 1
    assert internal_files(server) == []
    assert finished.status_code == 404
    assert_nothing_is_visible(server)


# What is refused


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"base_model": "unknown"}, "base_model"),
        ({"base_model": None}, "base_model"),
        ({"lora_config": None}, "lora_config"),
        ({"lora_config": {"rank": 0}}, "rank"),
        ({"lora_config": {"rank": 65}}, "rank"),
        ({"lora_config": {"rank": 2**70}}, "rank"),
        (
            {
                "lora_config": {
                    "rank": 4,
                    "train_attn": False,
                    "train_mlp": False,
                    "train_unembed": False,
                }
            },
            "trains nothing",
        ),
        ({"destination_project_id": "x" * 5000}, "destination_project_id"),
        ({"destination_project_id": "a\0b"}, "destination_project_id"),
        ({"user_metadata": {"a": "x" * 100_000}}, "user_metadata"),
        ({"user_metadata": {"a": 1}}, "user_metadata"),
    ],
)
def test_the_start_of_an_upload_is_validated(
    tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    with ManagedServer(tmp_path, "memory") as server, server.http() as client:
        reply = client.post(START, json={**BODY, **fields})

        assert 400 <= reply.status_code < 500
        assert why in reply.json()["detail"]
        assert server.run(server.ledger.entries(UploadEntry).count()) == 0


def test_files_that_are_not_the_announced_adapter_are_refused_and_can_be_replaced(
    server: ManagedServer, adapter: Path, tmp_path: Path
) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    weights = (adapter / WEIGHTS).read_bytes()
    with server.http() as client:
        started = client.post(START, json=BODY).json()

        def refusal(new_config: Any = None, new_weights: bytes = weights) -> str:
            put(started["urls"][CONFIG], json.dumps({**config, **(new_config or {})}).encode())
            assert put(started["urls"][WEIGHTS], new_weights).status_code == 200
            reply = client.post(FINISH, json={"upload_id": started["upload_id"]})
            assert reply.status_code == 400, reply.text
            assert_nothing_is_visible(server)
            return str(reply.json()["detail"])

        def other(name: str, **fields: Any) -> bytes:
            return (written(tmp_path / name, **fields) / WEIGHTS).read_bytes()

        assert "peft_type" in refusal({"peft_type": "IA3"})
        assert "use_dora" in refusal({"use_dora": True})
        assert "rank" in refusal({"r": 2}, other("rank", rank=2))
        with_mlp = other("mlp", names=[*LAYERS, "model.layers.0.mlp.up_proj"])
        assert "train_mlp" in refusal(new_weights=with_mlp)
        assert "does not have" in refusal(
            new_weights=other("unknown", names=["model.layers.9.self_attn.q_proj"])
        )
        assert "maps 9 to 16" in refusal(new_weights=other("shape", inputs=9))
        assert refusal(new_weights=b"\xff" * len(weights))
        pickled = b"\x80\x04cos\nsystem\n(S'true'\ntR."
        assert refusal(new_weights=pickled)
        assert refusal({"r": "x"})
        send(adapter, started)
        done = client.post(FINISH, json={"upload_id": started["upload_id"]})

    assert done.status_code == 200, done.text
    assert internal_files(server) == []


def test_the_digest_that_a_put_announces_is_checked(server: ManagedServer, adapter: Path) -> None:
    content = (adapter / WEIGHTS).read_bytes()
    right = base64.b64encode(hashlib.sha256(content).digest()).decode()
    wrong = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
    with server.http() as client:
        url = client.post(START, json=BODY).json()["urls"][WEIGHTS]

        refused = put(url, content, **{"Content-Digest": f"sha-256=:{wrong}:"})
        assert internal_files(server) == []
        taken = put(url, content, **{"Content-Digest": f"sha-512=:AA==:, sha-256=:{right}:"})

    assert refused.status_code == 400
    assert "SHA-256" in refused.json()["detail"]
    assert taken.status_code == 200


def test_uploaded_bytes_that_changed_in_the_store_never_become_a_checkpoint(
    server: ManagedServer, adapter: Path, tmp_path: Path
) -> None:
    with server.http() as client:
        started = client.post(START, json=BODY).json()
        send(adapter, started)
        (file,) = (tmp_path / "service").rglob(f"uploads/**/{WEIGHTS}")
        file.chmod(0o600)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

        damaged = client.post(FINISH, json={"upload_id": started["upload_id"]})
        assert_nothing_is_visible(server)
        send(adapter, started)
        done = client.post(FINISH, json={"upload_id": started["upload_id"]})

    assert damaged.status_code == 409
    assert done.status_code == 200


def test_bodies_that_are_too_large_empty_or_compressed_are_refused(server: ManagedServer) -> None:
    with server.http() as client:
        urls = client.post(START, json=BODY).json()["urls"]
        too_large = put(urls[WEIGHTS], b"x" * 100_001)
        unannounced = httpx.put(urls[WEIGHTS], content=iter([b"x" * 60_000] * 4), timeout=30)
        config = put(urls[CONFIG], b"x" * (weight_uploads.LARGEST_CONFIG + 1))
        empty = put(urls[WEIGHTS], b"")
        compressed = put(urls[WEIGHTS], b"x", **{"Content-Encoding": "gzip"})

    statuses = [reply.status_code for reply in (too_large, unannounced, config, empty, compressed)]
    assert statuses == [413, 413, 413, 400, 415]
    assert internal_files(server) == []
    assert server.store.sweep() == 0


def test_a_config_is_bounded_more_tightly_than_weights(tmp_path: Path) -> None:
    with ManagedServer(tmp_path, "memory") as server, server.http() as client:
        urls = client.post(START, json=BODY).json()["urls"]
        too_large = b"x" * (weight_uploads.LARGEST_CONFIG + 1)

        assert put(urls[CONFIG], too_large).status_code == 413
        assert put(urls[WEIGHTS], too_large).status_code == 200


# Races and crashes


def test_a_put_that_ends_after_finish_changes_nothing(server: ManagedServer, adapter: Path) -> None:
    go_on = threading.Event()

    def slow() -> Iterator[bytes]:
        yield b"{"
        go_on.wait(60)
        yield b"}"

    with server.http() as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        started = client.post(START, json=BODY).json()
        send(adapter, started)
        sending = pool.submit(httpx.put, started["urls"][CONFIG], content=slow(), timeout=60)
        try:
            deadline = time.monotonic() + 60
            while not server.app.context.uploads.receiving[TenantId("alice")]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            done = client.post(FINISH, json={"upload_id": started["upload_id"]})
        finally:
            go_on.set()
        late = sending.result(60)

    assert done.status_code == 200
    assert late.status_code == 404
    assert internal_files(server) == []
    path = CheckpointPath.parse(done.json()["tinker_path"])
    with server.store.open_whole(path) as reading:
        assert read_adapter(reading.folder).rank == 4


def test_a_finish_that_was_cut_off_keeps_the_files_as_they_are_and_can_be_repeated(
    server: ManagedServer, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, failures = weight_uploads.WeightUploads._record, [1]

    async def cut_off(self: Any, *arguments: Any) -> Any:
        if failures:
            failures.pop()
            raise LedgerUnavailableError("the database is away")
        return await record(self, *arguments)

    monkeypatch.setattr(weight_uploads.WeightUploads, "_record", cut_off)
    with server.http() as client:
        started = client.post(START, json=BODY).json()
        send(adapter, started)
        body = {"upload_id": started["upload_id"]}
        first = client.post(FINISH, json=body)
        listed = client.get("/api/v1/checkpoints").json()["checkpoints"]
        changed = put(started["urls"][CONFIG], b"{}")
        second = client.post(FINISH, json=body)

    assert first.status_code >= 500
    assert listed == []
    assert changed.status_code == 409
    assert second.status_code == 200
    assert server.run(server.ledger.entries(CheckpointEntry).count()) == 1
    assert internal_files(server) == []


# Hostile


def test_an_upload_of_another_tenant_does_not_exist(server: ManagedServer, adapter: Path) -> None:
    with server.http() as alice, server.http("bob") as bob:
        started = alice.post(START, json=BODY).json()
        send(adapter, started)
        body = {"upload_id": started["upload_id"]}
        theirs = bob.post(FINISH, json=body)
        unknown = bob.post(FINISH, json={"upload_id": "upload-" + "0" * 32})
        done = alice.post(FINISH, json=body)
        after = bob.post(FINISH, json=body)
        same_key = [
            client.post(START, json=BODY, headers={"X-Idempotency-Key": "k"}).json()["upload_id"]
            for client in (alice, bob)
        ]

    assert [reply.status_code for reply in (theirs, unknown, done, after)] == [404, 404, 200, 404]
    assert theirs.json()["detail"].replace(started["upload_id"], "") == (
        unknown.json()["detail"].replace("upload-" + "0" * 32, "")
    )
    assert same_key[0] != same_key[1]


def test_urls_that_were_tampered_with_or_have_expired_are_refused(
    server: ManagedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.http() as client:
        started = client.post(START, json=BODY).json()
        url = started["urls"][CONFIG]
        base, ticket, name = url.rsplit("/", 2)
        body, signature = ticket.split(".")
        fields = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        moved = base64.urlsafe_b64encode(json.dumps([*fields[:4], 2e10]).encode()).decode()
        download = signed_links.sign(
            signed_links.SignedLink("file", "alice", started["upload_id"], CONFIG, 2e10), b"s" * 32
        )
        tampered = {
            "signature": f"{base}/{body}.{signature[:-2]}AA/{name}",
            "expiry": f"{base}/{moved.rstrip('=')}.{signature}/{name}",
            "another file": f"{base}/{ticket}/{WEIGHTS}",
            "outside": f"{base}/{ticket}/..%2f..%2fetc%2fpasswd",
            "nested": f"{base}/{ticket}/a/{name}",
            "a link to fetch": f"{base}/{download}/{name}",
            "nothing": f"{base}/x/{name}",
        }
        statuses = {what: put(one, b"{}").status_code for what, one in tampered.items()}
        fetched = httpx.get(f"{server.base_url}/downloads/{ticket}/{name}").status_code
        method = httpx.get(url).status_code
        later = server.ledger.now() + weight_uploads.URLS_S + 1
        monkeypatch.setattr(type(server.ledger), "now", lambda _: later)
        expired = put(url, b"{}")

    assert statuses == dict.fromkeys(tampered, 404)
    assert (fetched, method) == (404, 405)
    assert expired.status_code == 404
    assert "expired" in expired.json()["detail"]
    assert internal_files(server) == []


@pytest.mark.parametrize(
    "upload_id", ["", "..", "upload-", "upload-../x", "x" * 3000, "upload-" + "0" * 31 + "\0"]
)
def test_ids_that_are_no_upload_are_not_found(server: ManagedServer, upload_id: str) -> None:
    with server.http() as client:
        assert client.post(FINISH, json={"upload_id": upload_id}).status_code == 404


def test_a_thousand_starts_leave_a_few_uploads_and_others_are_not_kept_out(
    server: ManagedServer, adapter: Path
) -> None:
    with server.http() as alice, server.http("bob") as bob:
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(lambda _: alice.post(START, json=BODY), range(1000)))
        statuses = [reply.status_code for reply in replies]
        started = [reply.json() for reply in replies if reply.status_code == 200]
        others = upload(bob, adapter)
        send(adapter, started[0])
        finished = alice.post(FINISH, json={"upload_id": started[0]["upload_id"]})
        again = alice.post(START, json=BODY)

    assert statuses.count(200) == weight_uploads.MOST_OPEN
    assert statuses.count(429) == 1000 - weight_uploads.MOST_OPEN
    refused = next(reply for reply in replies if reply.status_code == 429)
    assert float(refused.headers["Retry-After"]) > 0
    assert (others.status_code, finished.status_code, again.status_code) == (200, 200, 200)


def test_one_tenant_can_send_only_some_files_at_a_time(server: ManagedServer) -> None:
    enough, go_on = threading.Event(), threading.Event()
    begun: list[int] = []

    def slow() -> Iterator[bytes]:
        yield b"{"
        begun.append(1)
        if len(begun) == weight_uploads.MOST_RECEIVED:
            enough.set()
        go_on.wait(60)
        yield b"}"

    with (
        server.http() as client,
        concurrent.futures.ThreadPoolExecutor(weight_uploads.MOST_RECEIVED) as pool,
    ):
        url = client.post(START, json=BODY).json()["urls"][CONFIG]
        try:
            sending = [
                pool.submit(httpx.put, url, content=slow(), timeout=60)
                for _ in range(weight_uploads.MOST_RECEIVED)
            ]
            assert enough.wait(60)
            receiving = server.app.context.uploads.receiving
            deadline = time.monotonic() + 60
            while receiving[TenantId("alice")] < weight_uploads.MOST_RECEIVED:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            refused = put(url, b"{}")
        finally:
            go_on.set()
        taken = [one.result(60).status_code for one in sending]

    assert refused.status_code == 429
    assert taken == [200] * weight_uploads.MOST_RECEIVED
    assert len(internal_files(server)) == 1


def test_a_tenants_storage_counts_what_it_has_uploaded(
    server: ManagedServer, adapter: Path
) -> None:
    with server.http() as client:
        started = client.post(START, json=BODY).json()
        server.run(add_tenant(server.ledger, "alice", {"storage_bytes": 1000}))
        server.app.context.quotas.forget()
        size = (adapter / WEIGHTS).stat().st_size
        refused = put(started["urls"][WEIGHTS], (adapter / WEIGHTS).read_bytes())

    assert size > 1000
    assert refused.status_code == 422
    assert "1000" in refused.json()["detail"]


def test_a_service_without_uploads_says_so(tmp_path: Path) -> None:
    with ManagedServer(tmp_path, "memory", import_bytes=0) as server, server.http() as client:
        assert client.post(START, json=BODY).status_code == 404


# Object storage


def test_uploads_work_with_checkpoints_at_an_s3_url(
    tmp_path: Path, adapter: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)

    class OnS3(ManagedServer):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder, "sqlite", model=SIZED)
            self.store = open_store("s3://weights/uploads-test", work=folder / "work")  # type: ignore[assignment]

    with OnS3(tmp_path / "first") as first, first.http() as client:
        started = client.post(START, json=BODY).json()
        put(started["urls"][CONFIG], b"{}")
        put(started["urls"][WEIGHTS], (adapter / WEIGHTS).read_bytes())
        refused = client.post(FINISH, json={"upload_id": started["upload_id"]})
        put(started["urls"][CONFIG], (adapter / CONFIG).read_bytes())
        done = [client.post(FINISH, json={"upload_id": started["upload_id"]}) for _ in range(2)]
        path = CheckpointPath.parse(done[0].json()["tinker_path"])
        abandoned = client.post(START, json=BODY).json()
        put(abandoned["urls"][WEIGHTS], (adapter / WEIGHTS).read_bytes())
        waiting = internal_files(first)
        later = first.ledger.now() + weight_uploads.KEPT_S + 1
        monkeypatch.setattr(type(first.ledger), "now", lambda _: later)
        swept = first.run(Sweeper(first.ledger, first.store).sweep())
        left = list(first.store.paths())
        with first.store.open_whole(path) as reading:
            kept = read_adapter(reading.folder)

    assert refused.status_code == 400
    assert [reply.status_code for reply in done] == [200, 200]
    assert done[0].json() == done[1].json()
    assert len(waiting) == 1
    assert (swept.uploads, left) == (1, [path])
    assert list(kept.layers) == LAYERS


# The command


def test_the_command_imports_a_folder(
    server: ManagedServer,
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
    monkeypatch.setenv("TINKER_API_KEY", key_of("alice"))
    options = ["--metadata", "task=chat", "--metadata", "note=a=b", "--ttl", "5000"]

    code = main(["checkpoint", "import", str(adapter), *options, "-f", "json"])

    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert printed.err == ""
    told = json.loads(printed.out)
    assert (told["base_model"], told["lora_rank"]) == (MODEL, 4)
    entry = server.run(server.ledger.entries(CheckpointEntry).get(told["checkpoint_path"]))
    assert entry is not None
    assert entry.user_metadata == {"task": "chat", "note": "a=b"}
    assert entry.expires_at is not None

    def listed(*words: str) -> list[str]:
        assert main(["checkpoint", "list", *words, "-f", "json"]) == 0
        found = json.loads(capsys.readouterr().out)["checkpoints"]
        return [one["tinker_path"] for one in found]

    assert listed("--metadata", "task=chat", "--base-model", MODEL) == [told["checkpoint_path"]]
    assert listed("--metadata", "task=chat", "--metadata", "note=b") == []
    assert listed("--base-model", "other") == []
    assert listed("--type", "external") == [told["checkpoint_path"]]
    assert main(["checkpoint", "list", "--run-id", "x", "--type", "external"]) == 2
    assert main(["checkpoint", "list", "--metadata", "task"]) == 2
    capsys.readouterr()


def test_the_command_reports_a_folder_or_an_adapter_that_is_refused(
    server: ManagedServer,
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
    monkeypatch.setenv("TINKER_API_KEY", key_of("alice"))

    def refused(*words: str) -> str:
        assert main(["checkpoint", "import", *words]) != 0
        shown = capsys.readouterr()
        assert shown.out == ""
        return shown.err

    assert "is not a folder" in refused(str(adapter / "missing"))
    assert server.reports == []
    assert "base_model" in refused(str(adapter), "--base-model", "other")
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, "use_dora": True}))
    assert "use_dora" in refused(str(adapter))
    (adapter / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": None}))
    assert "--base-model" in refused(str(adapter))
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    assert "could execute code" in refused(str(adapter))
    assert_nothing_is_visible(server)


def test_the_command_repeats_a_put_that_failed(
    server: ManagedServer,
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
    monkeypatch.setenv("TINKER_API_KEY", key_of("alice"))
    monkeypatch.setattr("tinsmith.cli.checkpoint_import.RETRY_S", 0.01)
    begin, failures = server.store.begin, [1, 1]

    def failing(path: CheckpointPath, *, origin: str = "") -> Any:
        if failures and path.kind == UPLOADS:
            failures.pop()
            raise tinsmith.errors.CheckpointUnavailableError("the disk is away")
        return begin(path, origin=origin)

    monkeypatch.setattr(server.store, "begin", failing)

    assert main(["checkpoint", "import", str(adapter), "-f", "json"]) == 0
    assert failures == []
    assert json.loads(capsys.readouterr().out)["checkpoint_path"]
    assert urlsplit(server.base_url).port == server.port
