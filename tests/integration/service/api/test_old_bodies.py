"""Bodies that old releases of the official SDK really sent, answered by the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service.api.calls import a_model, a_sampler, a_session
from tests.integration.service.api.running import MODEL, RunningServer
from tinsmith.engine.base import BaseModel

LARGE = BaseModel(name=MODEL, vocabulary=2**31, max_context=10_000, takes_images=True)
GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "old_sdk"
RELEASES = sorted(path.stem for path in GOLDEN.glob("*.json"))
SUBMITTED = {
    "create_model",
    "forward_backward",
    "forward",
    "optim_step",
    "create_sampling_session",
    "asample",
    "session_heartbeat",
    "create_session",
    "telemetry",
    "client_config",
    "client_dynamic_config",
    "get_info",
    "get_server_capabilities",
    "save_weights",
    "save_weights_for_sampler",
    "cancel_future",
}
"""What needs nothing but a session, a model and a sampler."""


def content(exchange: dict[str, Any], session: str, number: int) -> bytes:
    """The recorded body, about things that are there."""
    text = json.dumps(exchange["body"])
    text = text.replace("sess-1", session).replace("small/model", MODEL)
    text = text.replace('"s:sample:', f'"{session}:sample:')
    body = json.loads(text)
    for name in ("seq_id", "model_seq_id", "sampling_session_seq_id"):
        if isinstance(body, dict) and body.get(name) is not None:
            body[name] = number  # the recordings are not in the order in which they were sent
    return json.dumps(body).encode()


@pytest.mark.parametrize("release", RELEASES)
def test_request_bodies_of_old_releases_are_accepted(release: str) -> None:
    """Nulls, missing `type` keys, old routes and all."""
    exchanges = json.loads((GOLDEN / f"{release}.json").read_text())
    exchanges = [one for one in exchanges if one["route"] in SUBMITTED and one["body"] is not None]
    with RunningServer(model=LARGE) as server, server.http() as http:
        session = a_session(http)
        a_model(http, session)
        for sampler in range(2):
            a_sampler(http, session, sampler)
        refused = []
        for number, exchange in enumerate(exchanges, start=10):
            if "base64" in exchange["body"]:
                continue  # protobuf of one release, which the contract tests read
            reply = http.request(
                exchange["method"],
                exchange["path"].replace("sess-1", session),
                content=content(exchange, session, number),
                headers={"Content-Type": exchange["content_type"], "Accept": exchange["accept"]},
            )
            # What it says makes little sense to a model; what counts is that it was read.
            if reply.status_code >= 300 and not reply.json()["detail"].startswith("data[0]."):
                refused.append((exchange["route"], reply.text))

    assert not refused
    assert len(exchanges) >= 10
