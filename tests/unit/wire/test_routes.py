"""From method and path to endpoint, for every row of the table."""

from __future__ import annotations

import pytest

from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.routes import Router

ROUTER = Router()


def filled(endpoint: Endpoint) -> tuple[str, dict[str, str]]:
    """The endpoint's path with ids in it, as clients write them, and those ids."""
    path, fields = endpoint.path, {}
    for name in endpoint.path_fields:
        value = "weights/step:10" if name == "checkpoint_id" else "s1:train:0"
        fields[name] = value
        path = path.replace(f"{{{name}:path}}", value).replace(f"{{{name}}}", value)
    return path, fields


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_endpoint_is_found_by_its_path(name: str) -> None:
    endpoint = ENDPOINTS[name]
    path, fields = filled(endpoint)

    assert ROUTER.find(endpoint.method, path) == (endpoint, fields)


@pytest.mark.parametrize(
    ("method", "suffix", "name"),
    [
        ("POST", "/publish", "publish_checkpoint"),
        ("DELETE", "/publish", "unpublish_checkpoint"),
        ("DELETE", "", "delete_checkpoint"),
        ("PUT", "/ttl", "set_checkpoint_ttl"),
    ],
)
def test_a_suffix_is_not_part_of_a_checkpoint_id(method: str, suffix: str, name: str) -> None:
    path = f"/api/v1/training_runs/s1:train:0/checkpoints/sampler_weights/c{suffix}"

    found = ROUTER.find(method, path)

    assert found is not None
    assert (found[0].name, found[1]["checkpoint_id"]) == (name, "sampler_weights/c")


def test_escaped_ids_are_read() -> None:
    found = ROUTER.find("GET", "/api/v1/sessions/a%20b%3Ac")

    assert found is not None
    assert found[1] == {"session_id": "a b:c"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/asample"),
        ("POST", "/api/v1/asample/"),
        ("POST", "/asample"),
        ("GET", "/api/v1/sessions/a/b/c"),
        ("GET", "/api/v1/training_runs//checkpoints"),
    ],
)
def test_other_paths_match_no_endpoint(method: str, path: str) -> None:
    assert ROUTER.find(method, path) is None


def test_the_methods_of_a_path_are_listed() -> None:
    publish = "/api/v1/training_runs/r/checkpoints/weights/c/publish"
    assert set(ROUTER.methods(publish)) == {"POST", "DELETE"}
    assert ROUTER.methods("/api/v1/nothing") == []
