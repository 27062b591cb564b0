"""A client of few words: one blocking HTTP exchange at a time, made from the table of endpoints."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from tinsmith import types as t
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import requests as r
from tinsmith.wire import json_format
from tinsmith.wire.endpoint_types import Format
from tinsmith.wire.endpoints import ENDPOINTS, FUTURE_RESULTS
from tinsmith.wire.exchange import decode_body, read_reply, to_http

TIMEOUT_S = 60.0
TOKENS = [1, 2, 3]
TARGETS = [2, 3, 4]


class Reply(msgspec.Struct):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def plain(self) -> Any:
        """The body, which is JSON."""
        return json_format.decode_any(self.body)


class Caller:
    """Calls a service; each call has a connection of its own unless one is kept."""

    def __init__(self, service: ScriptedService, *, accept: str | None = None) -> None:
        self.service = service
        self.accept = accept

    def send(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Reply:
        """One exchange, as it is."""
        place = urlsplit(self.service.base_url)
        connection = http.client.HTTPConnection(place.netloc, timeout=TIMEOUT_S)
        try:
            sent = {"X-API-Key": self.service.api_key, **(headers or {})}
            connection.request(method, place.path + path, body or None, sent)
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(reply.status, found, reply.read())
        finally:
            connection.close()

    def call(self, name: str, request: Any, **headers: str) -> Reply:
        """Call an endpoint; header names have `_` for `-`."""
        made = to_http(ENDPOINTS[name], request)
        query = f"?{urlencode(made.query)}" if made.query else ""
        extra = {key.replace("_", "-"): value for key, value in headers.items()}
        return self.send(
            made.method, made.path + query, b"".join(made.parts), {**made.headers, **extra}
        )

    def ask(self, name: str, request: Any, **headers: str) -> Any:
        """Call an endpoint that succeeds, and read its answer."""
        reply = self.call(name, request, **headers)
        assert 200 <= reply.status < 300, (reply.status, reply.body)
        return read_reply(ENDPOINTS[name], reply.body)

    def poll(self, request_id: str, *, metadata_only: bool = False) -> Reply:
        """Ask for a result once."""
        request = r.FutureRetrieveRequest(request_id=request_id, allow_metadata_only=metadata_only)
        accept = self.accept or "application/x-protobuf, application/json"
        return self.call("retrieve_future", request, Accept=accept)

    def result(self, name: str, request_id: str) -> Any:
        """The result of a submission to an endpoint."""
        reply = self.poll(request_id)
        assert reply.status == 200, (reply.status, reply.body)
        expected = FUTURE_RESULTS[ENDPOINTS[name].result or ""]
        is_protobuf = reply.headers["content-type"] == Format.PROTOBUF.value
        written = Format.PROTOBUF if is_protobuf else Format.JSON
        return decode_body(reply.body, expected.type, written)

    def do(self, name: str, request: Any) -> Any:
        """Submit, and wait for the result."""
        return self.result(name, self.ask(name, request).request_id)

    # What most tests begin with

    def new_session(self, **fields: Any) -> str:
        """A session's id."""
        request = r.CreateSessionRequest(tags=[], sdk_version="0.36.0", **fields)
        created: t.CreateSessionResponse = self.ask("create_session", request)
        return created.session_id

    def new_model(self, session_id: str | None = None, number: int = 0) -> str:
        """A model's id, in a session of its own if none is given."""
        request = r.CreateModelRequest(
            session_id=session_id or self.new_session(),
            model_seq_id=number,
            base_model="Qwen/Qwen3-8B",
            lora_config=t.LoraConfig(rank=8),
        )
        made: t.CreateModelResponse = self.do("create_model", request)
        return made.model_id

    def new_sampler(self, session_id: str | None = None, number: int = 0) -> str:
        """A sampler's id, of a base model."""
        request = r.CreateSamplingSessionRequest(
            session_id=session_id or self.new_session(),
            sampling_session_seq_id=number,
            base_model="Qwen/Qwen3-8B",
        )
        made: t.CreateSamplingSessionResponse = self.ask("create_sampling_session", request)
        return made.sampling_session_id


def forward_backward(model_id: str, seq_id: int, **fields: Any) -> r.ForwardBackwardRequest:
    """One datum of three tokens."""
    inputs = {"target_tokens": TARGETS, "weights": [0.0, 1.0, 1.0]}
    datum = t.Datum.received(t.ModelInput.from_ints(TOKENS), fields.pop("inputs", inputs))
    given = t.ForwardBackwardInput([datum], fields.pop("loss_fn", "cross_entropy"))
    return r.ForwardBackwardRequest(given, model_id, seq_id, **fields)


def optim_step(model_id: str, seq_id: int) -> r.OptimStepRequest:
    """One step of Adam."""
    return r.OptimStepRequest(model_id=model_id, seq_id=seq_id, adam_params=t.AdamParams())


def asample(sampler_id: str, seq_id: int, **fields: Any) -> r.SampleRequest:
    """A sample of four tokens."""
    params = {"max_tokens": 4, "seed": 7, "stop": [], **fields.pop("params", {})}
    return r.SampleRequest(
        prompt=t.ModelInput.from_ints(fields.pop("prompt", TOKENS)),
        sampling_params=t.SamplingParams(**params),
        sampling_session_id=sampler_id,
        seq_id=seq_id,
        **fields,
    )


@contextmanager
def calling(**options: Any) -> Iterator[Caller]:
    """A running service and its caller; polls are short unless the test says otherwise."""
    with running_service(**{"long_poll_s": 5.0, **options}) as service:
        yield Caller(service)
