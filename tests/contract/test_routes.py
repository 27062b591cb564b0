"""Every route that the official SDK calls is in our table of endpoints, and nothing else is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.routes import Router

SDK = Path(tinker.__file__).parent

PROTOCOL = {
    "POST /client/config",
    "POST /client/dynamic_config",
    "POST /auth/token",
    "GET /healthz",
    "GET /get_server_capabilities",
    "POST /create_session",
    "POST /session_heartbeat",
    "POST /sessions/{}/finish",
    "POST /create_model",
    "POST /load_weights",
    "POST /forward_backward",
    "POST /forward",
    "POST /optim_step",
    "POST /save_weights",
    "POST /save_weights_for_sampler",
    "POST /save_weights_external",
    "POST /create_custom_loss",
    "POST /get_info",
    "POST /weights_info",
    "POST /unload_model",
    "POST /create_sampling_session",
    "POST /join_sampling_session",
    "GET /samplers/{}",
    "POST /asample",
    "POST /retrieve_future",
    "POST /retrieve_futures",
    "POST /cancel_future",
    "POST /copy_weights",
    "GET /training_runs",
    "GET /training_runs/{}",
    "GET /training_runs/{}/checkpoints",
    "GET /models/{}/checkpoints",
    "GET /checkpoints",
    "DELETE /training_runs/{}/checkpoints/{}",
    "POST /training_runs/{}/checkpoints/{}/publish",
    "DELETE /training_runs/{}/checkpoints/{}/publish",
    "PUT /training_runs/{}/checkpoints/{}/ttl",
    "GET /training_runs/{}/checkpoints/{}/external_weights_urls",
    "GET /training_runs/{}/checkpoints/{}/archive",
    "GET /sessions",
    "GET /sessions/{}",
    "POST /sessions/search",
    "PUT /sessions/{}/project",
    "GET /sessions/{}/trace_export",
    "GET /audit",
    "GET /billing/usage/events",
    "GET /billing/usage/checkpoints/current",
    "POST /telemetry",
    "GET /auth/apikey/me",
    "DELETE /auth/apikey/me",
}
"""All routes of the protocol, SDK 0.3 to 0.36; `{}` stands for an id."""

OF_NEWER_SDKS = {
    "POST /external_weights_upload_start",
    "POST /external_weights_upload_finish",
    "POST /checkpoints/search",
}
"""Routes of 0.39, from its documentation."""

OF_OLDER_SDKS = {
    "POST /forward": "0.24",
    "POST /unload_model": "0.25",
    "GET /models/{}/checkpoints": "0.3",
    "GET /training_runs/{}/checkpoints/{}/archive": "0.35",
}


def without_names(path: str) -> str:
    """A path whose ids are all `{}`, without the prefix."""
    parts = path.removeprefix("/api/v1").split("/")
    return "/".join("{}" if part.startswith("{") else part for part in parts)


def sdk_routes() -> Iterator[str]:
    """What the SDK's source passes to `get`, `post`, `put` and `delete`; ids as `{}`."""
    for source in sorted(SDK.rglob("*.py")):
        if source.name.endswith("_test.py"):
            continue
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                yield from _routes_of(node.func.attr.lstrip("_"), node.args)


def _routes_of(method: str, arguments: list[ast.expr]) -> Iterator[str]:
    texts = [_text(argument) for argument in arguments[:2]]
    if method in ("get", "post", "put", "delete", "patch") and texts:
        path = texts[0]
    elif method == "request" and len(texts) == 2:
        method, path = texts
    else:
        return
    if path.startswith("/api/v1/"):
        yield f"{method.upper()} {path.removeprefix('/api/v1')}"


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    return str(node.value) if isinstance(node, ast.Constant) else ""


def test_the_route_table_holds_exactly_the_protocol_routes() -> None:
    table = {
        f"{endpoint.method} {without_names(endpoint.path)}": endpoint.until
        for endpoint in ENDPOINTS.values()
        if not endpoint.is_extension
    }

    assert set(table) == PROTOCOL | OF_NEWER_SDKS
    assert {name: until for name, until in table.items() if until} == OF_OLDER_SDKS
    assert len(table) == sum(not endpoint.is_extension for endpoint in ENDPOINTS.values())


def test_extension_routes_have_their_own_prefix() -> None:
    """So that no route of theirs can ever be one of the protocol."""
    for endpoint in ENDPOINTS.values():
        assert endpoint.is_extension is endpoint.path.startswith("/api/v1/tinsmith/")


def test_the_sdk_calls_every_route_except_those_of_older_releases() -> None:
    called = set(sdk_routes())

    assert called == PROTOCOL - OF_OLDER_SDKS.keys()


@pytest.mark.parametrize("name", ENDPOINTS)
def test_no_route_shadows_another(name: str) -> None:
    """No route hides another, with ids as the protocol has them: `:` inside, `/` in checkpoints."""
    endpoint = ENDPOINTS[name]
    ids = {
        "session_id": "sess-1",
        "sampler_id": "sess-1:sample:0",
        "training_run_id": "sess-1:train:0",
        "checkpoint_id": "sampler_weights/c1",
        "name": "replica-0",
    }
    path = endpoint.path.replace(":path", "").format(**ids)

    found = Router().find(endpoint.method, path)

    assert found is not None
    assert found[0] is endpoint
    assert found[1] == {field: ids[field] for field in endpoint.path_fields}
