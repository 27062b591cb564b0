"""Prompts that come as memory: what is kept is the sample, whatever form it came in."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.service.api.running import MODEL, RunningServer
from tinsmith.client.service import ServiceClient
from tinsmith.errors import BadRequestError
from tinsmith.types.inputs import ModelInput
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import SamplingParams
from tinsmith.wire import json_format, packed_format
from tinsmith.wire.content import PACKED_TYPE
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.stored import read_stored

PARAMS = SamplingParams(max_tokens=4)
LONG = list(range(300))


def a_sample(sampler: str, seq_id: int, tokens: list[int] = LONG) -> SampleRequest:
    return SampleRequest(
        prompt=ModelInput.from_ints(tokens),
        sampling_params=PARAMS,
        sampling_session_id=sampler,
        seq_id=seq_id,
    )


def post(http: httpx.Client, endpoint: str, body: bytes, content_type: str) -> httpx.Response:
    return http.post(ENDPOINTS[endpoint].path, content=body, headers={"Content-Type": content_type})


def as_text(http: httpx.Client, request: SampleRequest) -> httpx.Response:
    return post(http, "asample", json_format.encode(request), "application/json")


def as_memory(http: httpx.Client, request: SampleRequest) -> httpx.Response:
    return post(http, "asample", b"".join(packed_format.encode(request).body()), PACKED_TYPE)


def test_packed_prompts_reach_the_scheduler_token_for_token() -> None:
    prompts = [ModelInput.from_ints([*LONG, number]) for number in range(100)]
    with (
        RunningServer() as server,
        ServiceClient(base_url=server.base_url, api_key="tml-x") as client,
    ):
        server.held.add("asample")
        sampler = client.create_sampling_client(base_model=MODEL)
        futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts]
        server.wait_for(lambda: len(server._kept) == 100)
        kept = {
            command.seq_id: read_stored("asample", server.run(payload_of(server, command)))
            for command in server._kept
        }
        server.release()
        for future in futures:
            future.result(60)

    assert [kept[number].prompt for number in range(100)] == prompts


async def payload_of(server: RunningServer, command: Any) -> bytes:
    return await server.ledger.payload(command.request_id)


def test_a_packed_sample_gives_the_same_result_as_json() -> None:
    with (
        RunningServer(with_keys=True) as server,
        server.http() as http,
        ServiceClient(base_url=server.base_url, api_key="tml-alice-key") as client,
    ):
        sampler = client.create_sampling_client(base_model=MODEL)._sampling_session_id
        first = as_memory(http, a_sample(sampler, 5))
        again = as_text(http, a_sample(sampler, 5))
        other = as_memory(http, a_sample(sampler, 5, [*LONG[:-1], 7]))
        text_first = as_text(http, a_sample(sampler, 6))
        packed_again = as_memory(http, a_sample(sampler, 6))

    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    assert text_first.json() == packed_again.json()
    assert other.status_code == 400


@pytest.mark.parametrize("spoiled", ["cut", "longer", "negative"])
def test_an_inconsistent_packed_body_is_rejected_and_nothing_is_stored(spoiled: str) -> None:
    with (
        RunningServer(with_keys=True) as server,
        server.http() as http,
        ServiceClient(base_url=server.base_url, api_key="tml-alice-key") as client,
    ):
        sampler = client.create_sampling_client(base_model=MODEL)._sampling_session_id
        body = b"".join(packed_format.encode(a_sample(sampler, 0)).body())
        bodies = {"cut": body[:-1], "longer": body + b"\0", "negative": body[:-1] + b"\xff"}
        refused = post(http, "asample", bodies[spoiled], PACKED_TYPE)
        taken = as_text(http, a_sample(sampler, 0, [1, 2]))

    assert refused.status_code == 400
    assert taken.status_code == 200


def test_a_token_outside_the_vocabulary_is_reported_with_the_valid_range() -> None:
    with (
        RunningServer() as server,
        ServiceClient(base_url=server.base_url, api_key="tml-x") as client,
    ):
        sampler = client.create_sampling_client(base_model=MODEL)
        for wrong in (-1, 1000):
            with pytest.raises(BadRequestError, match=f"{wrong}.*it must be 0 to 999"):
                sampler.sample(ModelInput.from_ints([*LONG, wrong]), 1, PARAMS).result(60)
