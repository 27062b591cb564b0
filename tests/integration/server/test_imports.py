"""Adapters made elsewhere: sent in parts, checked, and kept as checkpoints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tinsmith
from tests.integration.server.managed import ManagedServer, key_of
from tests.integration.server.running import MODEL
from tinsmith.checkpoints.format import Adapter, LoraPair, read_adapter, write_adapter
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.cli.main import main
from tinsmith.client.management.imports import import_folder
from tinsmith.errors import ValidationError
from tinsmith.ledger.records import AuditEntry, CheckpointEntry, Model

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
IMPORTS = "/api/v1/tinsmith/imports"


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with ManagedServer(tmp_path / "service", "memory") as running:
        yield running


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder as `peft` writes it."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    pair = LoraPair(np.ones((4, 8), np.float32), np.full((16, 4), 0.5, np.float32))
    layers = {f"model.layers.{n}.self_attn.q_proj": pair for n in range(2)}
    write_adapter(folder, Adapter(base_model=MODEL, rank=4, alpha=8.0, layers=layers))
    return folder


def send(client: httpx.Client, folder: Path, *, part: int = 500, **fields: Any) -> httpx.Response:
    """All calls of an import; the last reply, or the first that refuses."""
    contents = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    sizes = {name: len(content) for name, content in contents.items()}
    begun = client.post(IMPORTS, json={"name": "mine", "files": sizes, **fields})
    if begun.status_code != 200:
        return begun
    place = f"{IMPORTS}/{begun.json()['import_id']}"
    for name, content in contents.items():
        for offset in range(0, len(content), part):
            sent = client.put(
                f"{place}/files/{name}?offset={offset}", content=content[offset : offset + part]
            )
            assert sent.status_code == 204, sent.text
    return client.post(f"{place}/finish", json={})


def test_an_imported_adapter_is_a_checkpoint_like_others(
    server: ManagedServer, adapter: Path
) -> None:
    rest = tinsmith.RestClient(base_url=server.base_url, api_key=key_of("alice"))

    with server.http() as client:
        done = send(client, adapter, project_id="p", ttl_seconds=5000).json()
    path = done["tinker_path"]
    info = rest.get_weights_info_by_tinker_path(path).result(30)
    run = rest.get_training_run_by_tinker_path(path).result(30)

    assert (done["base_model"], done["lora_rank"]) == (MODEL, 4)
    assert (info.base_model, info.lora_rank, info.train_attn) == (MODEL, 4, True)
    assert (info.train_mlp, info.train_unembed) == (False, False)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.expires_at is not None
    assert len(rest.list_training_runs(project_id="p").result(30).training_runs) == 1
    with server.store.open(CheckpointPath.parse(path)) as reading:
        kept = read_adapter(reading.folder)
    assert kept.alpha == 8.0
    assert np.array_equal(kept.layers["model.layers.1.self_attn.q_proj"].b, np.full((16, 4), 0.5))
    (noted,) = server.run(server.ledger.entries(AuditEntry).all())
    assert (noted.event, noted.tinker_path) == ("checkpoint.imported", path)
    assert server.store.sweep() == 0  # nothing is left of what was sent


def test_every_call_may_be_made_again(server: ManagedServer, adapter: Path) -> None:
    contents = {name: (adapter / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    sizes = {name: len(content) for name, content in contents.items()}
    key = {"X-Idempotency-Key": "k"}

    with server.http() as client:
        begun = [
            client.post(IMPORTS, json={"name": "c", "files": sizes}, headers=key).json()
            for _ in range(2)
        ]
        place = f"{IMPORTS}/{begun[0]['import_id']}"
        for name, content in contents.items():
            for start, stop in ((0, 100), (50, 150), (0, len(content))):
                part = client.put(
                    f"{place}/files/{name}?offset={start}", content=content[start:stop]
                )
                assert part.status_code == 204
        done = [client.post(f"{place}/finish", json={}) for _ in range(3)]

    assert begun[0] == begun[1]
    assert [reply.status_code for reply in done] == [200, 200, 200]
    assert done[0].json() == done[1].json() == done[2].json()
    assert server.run(server.ledger.entries(CheckpointEntry).count()) == 1


def test_parts_that_do_not_fit_are_refused(server: ManagedServer) -> None:
    sizes = {CONFIG: 10, WEIGHTS: 100}

    with server.http() as client, server.http("bob") as other:
        place = (
            f"{IMPORTS}/"
            + client.post(IMPORTS, json={"name": "c", "files": sizes}).json()["import_id"]
        )
        refused = {
            what: client.put(f"{place}/files/{end}", content=content)
            for what, end, content in (
                ("gap", f"{WEIGHTS}?offset=5", b"x"),
                ("too much", f"{WEIGHTS}?offset=0", b"x" * 101),
                ("before", f"{WEIGHTS}?offset=-1", b"x"),
                ("no offset", WEIGHTS, b"x"),
                ("no number", f"{WEIGHTS}?offset=x", b"x"),
                ("no file", "other.bin?offset=0", b"x"),
                ("outside", "..%2fx?offset=0", b"x"),
            )
        }
        too_early = client.post(f"{place}/finish", json={})
        stolen = [
            other.put(f"{place}/files/{CONFIG}?offset=0", content=b"x"),
            other.post(f"{place}/finish", json={}),
        ]
        unknown = client.post(f"{IMPORTS}/import-none/finish", json={})

    assert {what: reply.status_code for what, reply in refused.items()} == {
        "gap": 400,
        "too much": 400,
        "before": 400,
        "no offset": 400,
        "no number": 400,
        "no file": 404,
        "outside": 404,
    }
    assert too_early.status_code == 400
    assert "0 of 10 bytes" in too_early.json()["detail"]
    assert [reply.status_code for reply in (*stolen, unknown)] == [404, 404, 404]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"name": "../x"}, "name"),
        ({"name": ""}, "name"),
        ({"files": {}}, "files"),
        ({"files": {CONFIG: 10, WEIGHTS: 10, "more.py": 1}}, "files"),
        ({"files": {CONFIG: 0, WEIGHTS: 10}}, CONFIG),
        ({"files": {CONFIG: 2**21, WEIGHTS: 10}}, CONFIG),
        ({"files": {CONFIG: 10, WEIGHTS: 2**50}}, WEIGHTS),
        ({"base_model": "unknown"}, "base_model"),
        ({"ttl_seconds": 1}, "ttl_seconds"),
        ({"project_id": "x" * 5000}, "project_id"),
    ],
)
def test_what_is_announced_is_checked(
    server: ManagedServer, fields: dict[str, Any], why: str
) -> None:
    body = {"name": "c", "files": {CONFIG: 10, WEIGHTS: 10}, **fields}

    with server.http() as client:
        reply = client.post(IMPORTS, json=body)

    assert 400 <= reply.status_code < 500
    assert why in reply.json()["detail"]


def test_what_is_no_adapter_is_refused_and_leaves_nothing(
    server: ManagedServer, adapter: Path
) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    weights = (adapter / WEIGHTS).read_bytes()

    def refusal(**changed: Any) -> str:
        (adapter / CONFIG).write_text(json.dumps({**config, **changed}))
        with server.http() as client:
            reply = send(client, adapter)
        assert reply.status_code == 400, reply.text
        return str(reply.json()["detail"])

    assert "base_model_name_or_path" in refusal(base_model_name_or_path="another/model")
    assert "peft_type" in refusal(peft_type="IA3")
    assert "use_dora" in refusal(use_dora=True)
    assert "rank" in refusal(r=4096)
    (adapter / WEIGHTS).write_bytes(b"\xff" * len(weights))
    assert refusal()
    (adapter / WEIGHTS).write_bytes(weights)
    assert server.run(server.ledger.entries(Model).count()) == 0
    assert server.run(server.ledger.entries(CheckpointEntry).count()) == 0
    assert list(server.store.paths()) == []
    server.store.sweep()
    assert server.store.sweep() == 0


def test_only_a_few_may_be_under_way(server: ManagedServer) -> None:
    body = {"name": "c", "files": {CONFIG: 10, WEIGHTS: 10}}

    with server.http() as client, server.http("bob") as other:
        statuses = [client.post(IMPORTS, json=body).status_code for _ in range(5)]
        others = other.post(IMPORTS, json=body).status_code

    assert statuses == [200, 200, 200, 200, 429]
    assert others == 200


def test_the_command_uploads_a_folder(
    server: ManagedServer,
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
    monkeypatch.setenv("TINKER_API_KEY", key_of("alice"))

    code = main(["checkpoint", "upload", str(adapter), "--name", "brought", "-f", "json"])

    printed = capsys.readouterr()
    assert code == 0, printed.err
    told = json.loads(printed.out)
    assert told["tinker_path"].endswith("/weights/brought")
    assert server.store.exists(CheckpointPath.parse(told["tinker_path"]))


def test_a_folder_that_is_none_is_told_of_before_anything_is_sent(
    server: ManagedServer, tmp_path: Path
) -> None:
    rest = tinsmith.RestClient(base_url=server.base_url, api_key=key_of("alice"))
    session = rest.holder.session

    with pytest.raises(ValidationError, match="save_pretrained"):
        asyncio.run(import_folder(session, tmp_path, "c"))

    assert server.reports == []
