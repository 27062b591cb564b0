"""Plain HTTP calls of the API, for tests that look at statuses and bodies."""

from __future__ import annotations

from typing import Any

import httpx

from tests.integration.service.api.running import MODEL
from tinsmith.types.inputs import Datum, ModelInput
from tinsmith.types.requests import ForwardBackwardRequest
from tinsmith.types.training import ForwardBackwardInput
from tinsmith.wire.endpoint_types import Format
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import encode_body

PROTOBUF = {"Content-Type": "application/x-protobuf"}


def post(http: httpx.Client, name: str, body: Any = None, **options: Any) -> httpx.Response:
    """Call an endpoint without fields in its path."""
    return http.post(ENDPOINTS[name].path, json=body, **options)


def ok(reply: httpx.Response) -> Any:
    """The body of a reply that is no refusal."""
    assert reply.status_code == 200, (reply.status_code, reply.text)
    return reply.json()


def a_session(http: httpx.Client) -> str:
    """A new session."""
    return str(
        ok(post(http, "create_session", {"tags": [], "sdk_version": "0.36.0"}))["session_id"]
    )


def a_model(http: httpx.Client, session_id: str | None = None, number: int = 0) -> str:
    """A new model, perhaps in a session of its own."""
    session_id = session_id or a_session(http)
    body = {"session_id": session_id, "model_seq_id": number, "base_model": MODEL}
    ok(post(http, "create_model", body))
    return f"{session_id}:train:{number}"


def a_sampler(http: httpx.Client, session_id: str | None = None, number: int = 0) -> str:
    """A new sampler of the base model."""
    session_id = session_id or a_session(http)
    body = {
        "session_id": session_id,
        "sampling_session_seq_id": number,
        "base_model": MODEL,
    }
    return str(ok(post(http, "create_sampling_session", body))["sampling_session_id"])


def a_sample(sampler_id: str, seq_id: int = 0, **fields: Any) -> dict[str, Any]:
    """The body of a small sample."""
    return {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4},
        **fields,
    }


def a_step(model_id: str, seq_id: int) -> dict[str, Any]:
    """The body of a step of the optimizer."""
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": {}}


def a_pass(model_id: str, seq_id: int, **inputs: Any) -> bytes:
    """The body of a small pass."""
    given = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0], **inputs}
    datum = Datum(ModelInput.from_ints([1, 2, 3]), given)
    request = ForwardBackwardRequest(
        ForwardBackwardInput([datum], "cross_entropy"), model_id, seq_id
    )
    return b"".join(encode_body(request, Format.PROTOBUF))


def result(http: httpx.Client, request_id: str, **options: Any) -> httpx.Response:
    """Ask for a result, again while there is none."""
    for _ in range(50):
        reply = post(http, "retrieve_future", {"request_id": request_id}, **options)
        if reply.status_code != 408:
            return reply
    raise AssertionError(f"{request_id} never ended")
