"""The unmodified official SDK's `RestClient` and `AdminClient` against the server."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import httpx

from tests.contract.official_process import said_by
from tests.integration.service.api import official_management
from tests.integration.service.api.managed import FILES, SIZE_BYTES, ManagedServer, key_of, server

__all__ = ["server"]  # a fixture, for pytest to find


def test_the_official_sdk_manages_runs_checkpoints_and_sessions(server: ManagedServer) -> None:
    session = server.add_session("s1", display_name="a name", user_metadata={"k": "v"})
    run = server.add_run(session)
    path = server.save(run, "c")
    server.save(run, "e", "external_weights")

    program = pathlib.Path(str(official_management.__file__))
    said = said_by(str(program), server.base_url, key_of("alice"), run, session)

    seen: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert seen["run"]["training_run_id"] == run
    assert seen["run_by_path"] == seen["run"] == seen["runs"]["training_runs"][0]
    assert seen["info"]["lora_rank"] == 8
    assert [one["tinker_path"] for one in seen["checkpoints"]["checkpoints"]][-1] == path
    assert seen["mine"]["cursor"] == {"offset": 0, "limit": 1000, "total_count": 2}
    assert seen["copy"].startswith("tinker://copy-")
    assert seen["session"]["training_run_ids"] == [run]
    assert seen["sessions"]["sessions"] == [session]
    (found,) = seen["search"]["sessions"]
    assert (found["session_id"], found["checkpoint_storage_bytes"]) == (session, 2 * SIZE_BYTES)
    assert found["status"] == {"type": "active"}
    assert [one["event"] for one in seen["audit"]["entries"]] == [
        "checkpoint.published",
        "checkpoint.unpublished",
        "checkpoint.ttl_set",
        "checkpoint.copied",
        "checkpoint.deleted",
        "project.session_assigned",
    ]
    assert seen["usage"]["data"] == []
    assert seen["storage"]["data"][0]["size_bytes"] == 2 * SIZE_BYTES
    assert httpx.get(seen["trace"]).json()["traceEvents"]
    assert httpx.get(seen["urls"]["urls"]["adapter_config.json"]).content == next(
        iter(FILES.values())
    )
