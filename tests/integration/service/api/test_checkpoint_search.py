"""Search of checkpoints, from the documented shapes: filters, order, pages, and other tenants."""

from __future__ import annotations

import asyncio
import datetime
import uuid
from typing import Any

import pytest

import tinsmith
from tests.integration.service.api.managed import ManagedServer, key_of, server
from tests.integration.service.api.running import MODEL
from tinsmith.errors import ExperimentalWarning
from tinsmith.service.ledger.records import CheckpointEntry, TenantId
from tinsmith.types import CheckpointSearchRequest, UserSearchOwner

__all__ = ["server"]

SEARCH = "/api/v1/checkpoints/search"


def names(server: ManagedServer, tenant: str = "alice", **fields: Any) -> list[str]:
    """The names of what a search finds, page after page."""
    found: list[str] = []
    with server.http(tenant) as client:
        while True:
            reply = client.post(SEARCH, json=fields)
            assert reply.status_code == 200, reply.text
            page = reply.json()
            found += [one["tinker_path"].rpartition("/")[2] for one in page["checkpoints"]]
            if page.get("next_cursor") is None:
                return found
            fields["cursor"] = page["next_cursor"]


def a_run(server: ManagedServer) -> str:
    server.add_session()
    return server.add_run()


def test_a_page_has_the_documented_shape(server: ManagedServer) -> None:
    run = a_run(server)
    for name in ("a", "b"):
        details = {"base_model": MODEL}
        server.save(run, name, user_metadata={"k": "v"}, details=details)

    with server.http() as client:
        page = client.post(SEARCH, json={"limit": 1}).json()

    assert set(page) == {"checkpoints", "next_cursor"}
    (one,) = page["checkpoints"]
    assert (one["checkpoint_id"], one["checkpoint_type"]) == ("weights/b", "training")
    assert (one["base_model"], one["user_metadata"]) == (MODEL, {"k": "v"})
    assert set(page["next_cursor"]) == {"last_created_at", "last_checkpoint_uuid"}
    uuid.UUID(page["next_cursor"]["last_checkpoint_uuid"])
    moment = datetime.datetime.fromisoformat(page["next_cursor"]["last_created_at"])
    assert moment == datetime.datetime.fromisoformat(one["time"])


def test_all_pairs_of_metadata_must_match(server: ManagedServer) -> None:
    run = a_run(server)
    server.save(run, "both", user_metadata={"task": "chat", "step": "1"})
    server.save(run, "one", user_metadata={"task": "chat", "step": "2"})
    server.save(run, "none")

    assert names(server) == ["none", "one", "both"]
    assert names(server, user_metadata={"task": "chat"}) == ["one", "both"]
    assert names(server, user_metadata={"task": "chat", "step": "1"}) == ["both"]
    assert names(server, user_metadata={"task": "cha"}) == []
    assert names(server, user_metadata={"other": "chat"}) == []


def test_types_base_models_and_projects_restrict_a_search(server: ManagedServer) -> None:
    run = a_run(server)
    server.add_session("s2", project_id="p2")
    second = server.add_run("s2")
    server.save(run, "t", details={"base_model": MODEL})
    server.save(run, "s", kind="sampler_weights", details={"base_model": "alias"})
    server.save(second, "e", kind="external_weights", details={"base_model": "other"})

    assert names(server, checkpoint_type="sampler") == ["s"]
    assert names(server, checkpoint_type="external") == ["e"]
    assert names(server, base_models=[MODEL]) == ["s", "t"]
    assert names(server, base_models=["other", "alias"]) == ["e", "s", "t"]
    assert names(server, base_models=[]) == []
    assert names(server, base_models=None) == ["e", "s", "t"]
    assert names(server, project_ids=["p2"]) == ["e"]
    assert names(server, project_ids=["default", "p2"]) == ["e", "s", "t"]
    assert names(server, project_ids=[]) == []
    assert names(server, project_ids=["unknown"]) == []


def test_checkpoints_of_other_owners_are_never_found(server: ManagedServer) -> None:
    run = a_run(server)
    server.save(run, "mine")
    server.add_session("b", tenant="bob")
    theirs = server.add_run("b", tenant="bob")
    server.save(theirs, "theirs", tenant="bob", is_published=True)

    for owner in ({"type": "own"}, {"type": "accessible"}):
        assert names(server, owner=owner) == ["mine"]
    user = {"type": "user", "owner_urns": ["tml:user:bob"]}
    assert names(server, owner=user) == []
    assert names(server, owner={"type": "user", "owner_urns": ["x", "tml:user:alice"]}) == ["mine"]
    assert names(server, "bob") == ["theirs"]


def test_pages_neither_repeat_nor_skip_while_others_come_and_go(server: ManagedServer) -> None:
    run = a_run(server)
    # All at one moment: the time alone does not order them.
    now = server.ledger.now()
    for n in range(25):
        path = f"tinker://{run}/weights/c{n:02}"
        entry = CheckpointEntry(
            id=path,
            tenant_id=TenantId("alice"),
            created_at=now,
            run_id=run,
            checkpoint_id=f"weights/c{n:02}",
        )
        server.run(server.ledger.entries(CheckpointEntry).add(entry))
    seen: list[str] = []
    cursor = None
    with server.http() as client:
        for round_ in range(20):
            page = client.post(SEARCH, json={"limit": 4, "cursor": cursor}).json()
            seen += [one["tinker_path"] for one in page["checkpoints"]]
            cursor = page.get("next_cursor")
            if cursor is None:
                break
            server.save(run, f"new{round_}")
            server.run(server.ledger.entries(CheckpointEntry).remove(seen[-1]))

    assert len(seen) == len(set(seen)) == 25


def test_an_expired_checkpoint_is_not_found(server: ManagedServer) -> None:
    run = a_run(server)
    server.save(run, "old", expires_at=server.ledger.now() - 1)
    server.save(run, "new", expires_at=server.ledger.now() + 100)

    assert names(server) == ["new"]


@pytest.mark.parametrize(
    "fields",
    [
        {"limit": 0},
        {"limit": 201},
        {"limit": "x"},
        {"checkpoint_type": "other"},
        {"user_metadata": {"k": 1}},
        {"owner": {"type": "user", "owner_urns": []}},
        {"owner": {"type": "nobody"}},
        {"cursor": {}},
        {"cursor": {"last_created_at": "x", "last_checkpoint_uuid": "x"}},
        {"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_checkpoint_uuid": "x"}},
        {"base_models": "x"},
    ],
)
def test_an_invalid_search_is_refused(server: ManagedServer, fields: dict[str, Any]) -> None:
    with server.http() as client:
        assert 400 <= client.post(SEARCH, json=fields).status_code < 500


def test_the_client_searches_in_both_ways(server: ManagedServer) -> None:
    run = a_run(server)
    for n in range(3):
        server.save(run, f"c{n}", user_metadata={"k": "v"})
    rest = tinsmith.RestClient(base_url=server.base_url, api_key=key_of("alice"))

    with pytest.warns(ExperimentalWarning):
        first = rest.search_checkpoints(
            CheckpointSearchRequest(user_metadata={"k": "v"}, limit=2)
        ).result(30)
    with pytest.warns(ExperimentalWarning):
        rest_of = asyncio.run(
            rest.search_checkpoints_async(
                CheckpointSearchRequest(limit=2, cursor=first.next_cursor)
            )
        )
    with pytest.warns(ExperimentalWarning):
        nobody = rest.search_checkpoints(
            CheckpointSearchRequest(owner=UserSearchOwner(owner_urns=["x"]))
        ).result(30)

    shown = [one.checkpoint_id for one in (*first.checkpoints, *rest_of.checkpoints)]
    assert shown == ["weights/c2", "weights/c1", "weights/c0"]
    assert rest_of.next_cursor is None
    assert nobody.checkpoints == []


@pytest.mark.parametrize("limit", [0, 201])
def test_a_limit_out_of_range_is_refused_by_the_client(limit: int) -> None:
    with pytest.raises(ValueError, match="limit"):
        CheckpointSearchRequest(limit=limit)
