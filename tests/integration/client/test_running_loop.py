"""Clients where an event loop runs already: notebooks, and coroutines that go on meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from tinsmith.client.futures import APIFuture
from tinsmith.client.rest import RestClient
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams

PROMPT = ModelInput.from_ints([1])
PARAMS = SamplingParams(max_tokens=1)
DATUM = Datum(PROMPT, {"target_tokens": [1], "weights": [1.0]})
SLOW_S = 0.4
"""How long the service takes for each reply."""


def test_blocking_calls_work_in_a_running_loop_as_in_a_notebook(service: ScriptedService) -> None:
    """A cell runs on a loop, calls blocking methods, and may await others in between."""

    async def cell() -> list[Any]:
        with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
            client.get_server_capabilities()
            training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
            output = training.forward_backward([DATUM], "cross_entropy").result(20)
            step = await training.optim_step(AdamParams())
            sampler = training.save_weights_and_get_sampling_client()
            sample = sampler.sample(PROMPT, 1, PARAMS).result(20)
            again = await sampler.sample_async(PROMPT, 1, PARAMS)
            return [output, step, sample, again]

    assert all(asyncio.run(cell()))


def test_a_blocking_call_inside_a_coroutine_inside_a_blocking_call_works(
    service: ScriptedService,
) -> None:
    """As programs nest loops: a coroutine on a loop of its own, on a thread, on a running loop."""
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")

        async def inner() -> int:
            first = sampler.sample(PROMPT, 1, PARAMS).result(20)
            second = await sampler.sample(PROMPT, 1, PARAMS)
            return len(first.sequences) + len(second.sequences)

        async def outer() -> int:
            return await asyncio.to_thread(lambda: asyncio.run(inner()))

        assert asyncio.run(outer()) == 2


def test_a_custom_loss_may_use_another_client(service: ScriptedService) -> None:
    """It runs on a thread of its own, where blocking is allowed."""
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")

        class Sampled:
            def gradients(self, data: list[Datum], _: list[Any]) -> Any:
                drawn = sampler.sample(PROMPT, 1, PARAMS).result(20)
                return float(len(drawn.sequences)), [[0.0] for _ in data], {}

        output = training.forward_backward_custom([DATUM], Sampled()).result(20)

    assert output.metrics["loss:sum"] == 1.0


class Clients(NamedTuple):
    client: ServiceClient
    training: TrainingClient
    sampler: SamplingClient
    rest: RestClient


async def _drained(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


CALLS: dict[str, Callable[[Clients], Awaitable[Any]]] = {
    "capabilities": lambda has: has.client.get_server_capabilities_async(),
    "create training": lambda has: has.client.create_lora_training_client_async(
        "Qwen/Qwen3-8B", rank=2
    ),
    "create sampling": lambda has: has.client.create_sampling_client_async(
        base_model="Qwen/Qwen3-8B"
    ),
    "one spelling: create training": lambda has: has.client.create_lora_training_client(
        "Qwen/Qwen3-8B", rank=2
    ),
    "one spelling: create sampling": lambda has: has.client.create_sampling_client(
        base_model="Qwen/Qwen3-8B"
    ),
    "one spelling: save and sample": lambda has: (
        has.training.save_weights_and_get_sampling_client()
    ),
    "one spelling: forward": lambda has: has.training.forward([DATUM], "cross_entropy"),
    "one spelling: sample": lambda has: has.sampler.sample(PROMPT, 1, PARAMS),
    "one spelling: runs": lambda has: has.rest.list_training_runs(),
    "forward": lambda has: _twice(has.training.forward_async([DATUM], "cross_entropy")),
    "forward_backward": lambda has: _twice(
        has.training.forward_backward_async([DATUM], "cross_entropy")
    ),
    "optim_step": lambda has: _twice(has.training.optim_step_async(AdamParams())),
    "save_state": lambda has: _twice(has.training.save_state_async("a")),
    "save for sampler": lambda has: _twice(has.training.save_weights_for_sampler_async("b")),
    "save and sample": lambda has: has.training.save_weights_and_get_sampling_client_async(),
    "get_info": lambda has: has.training.get_info_async(),
    "sample": lambda has: has.sampler.sample_async(PROMPT, 1, PARAMS),
    "logprobs": lambda has: has.sampler.compute_logprobs_async(PROMPT),
    "stream": lambda has: _drained(has.sampler.sample_stream_async(PROMPT, 1, PARAMS)),
    "base model": lambda has: has.sampler.get_base_model_async(),
    "runs": lambda has: has.rest.list_training_runs_async(),
    "sessions": lambda has: has.rest.list_sessions_async(),
}


async def _twice(submitting: Awaitable[Awaitable[Any]]) -> Any:
    return await (await submitting)


@pytest.mark.parametrize("name", CALLS)
def test_no_async_call_blocks_the_loop(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The loop tells of every callback that took as long as the service's slow reply."""
    with (
        running_service(long_poll_s=0.2, tinsmith_stream=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        clients = Clients(
            client,
            client.create_lora_training_client("Qwen/Qwen3-8B", rank=2),
            client.create_sampling_client(base_model="Qwen/Qwen3-8B"),
            RestClient(base_url=service.base_url, api_key=service.api_key),
        )
        service.faults.add(None, times=None, delay_s=SLOW_S)

        async def scenario() -> None:
            asyncio.get_running_loop().slow_callback_duration = SLOW_S / 2
            await CALLS[name](clients)

        with caplog.at_level(logging.WARNING, logger="asyncio"):
            asyncio.run(scenario(), debug=True)
        service.faults.clear()

    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_blocking_call_would_be_detected_by_the_loop_check(
    client: ServiceClient, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    service.faults.add(None, times=None, delay_s=SLOW_S)

    async def scenario() -> None:
        asyncio.get_running_loop().slow_callback_duration = SLOW_S / 2
        client.get_server_capabilities()

    with caplog.at_level(logging.WARNING, logger="asyncio"):
        asyncio.run(scenario(), debug=True)
    service.faults.clear()

    assert "asyncio" in {record.name for record in caplog.records}


CALLS_OF_A_TRIAL = ["forward_backward"] * 3 + ["save_weights_for_sampler", "optim_step"]
"""A pass in three chunks, whose first leaves last: whoever does not wait overtakes it."""


def test_s14_a_save_for_sampling_keeps_its_queue_position_in_50_trials() -> None:
    with (
        running_service(long_poll_s=0.5, fwdbwd_max_chunk_len=1) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)

        async def trial(number: int) -> None:
            futures: list[APIFuture[Any]] = [
                await training.forward_backward_async([DATUM] * 3, "cross_entropy"),
                await training.save_weights_for_sampler_async(f"s-{number}"),
                await training.optim_step_async(AdamParams()),
            ]
            await asyncio.gather(*futures)

        for number in range(50):
            asyncio.run(trial(number))

        arrived = [
            received for received in service.requests() if received.endpoint in CALLS_OF_A_TRIAL
        ]
    assert [received.endpoint for received in arrived] == CALLS_OF_A_TRIAL * 50
    saves = [r.request.seq_id for r in arrived if r.endpoint == "save_weights_for_sampler"]
    assert saves == [4 + 5 * number for number in range(50)]
