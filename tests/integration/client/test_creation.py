"""Clients that are created: awaited, asked for their result, or used directly."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tinsmith.client.background import background
from tinsmith.client.client_futures import ClientFuture
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.errors import APITimeoutError, ClosedError, NotFoundError, RequestFailedError
from tinsmith.testing import ScriptedService
from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams

WAIT_S = 60.0
BASE_MODEL = "Qwen/Qwen3-8B"
PROMPT = ModelInput.from_ints([1])
PARAMS = SamplingParams(max_tokens=1)
DATUM = Datum(PROMPT, {"target_tokens": [1], "weights": [1.0]})


class Stage:
    """A client, and checkpoints to create others from; made before anything is measured."""

    def __init__(self, client: ServiceClient) -> None:
        self.client = client
        self.training = client.create_lora_training_client(BASE_MODEL, rank=4).result()
        self.state = self.training.save_state("state").result(WAIT_S).path
        self.weights = self.training.save_weights_for_sampler("weights").result(WAIT_S).path


Create = Callable[[Stage], ClientFuture[Any]]
TRAINING: dict[str, Create] = {
    "lora": lambda stage: stage.client.create_lora_training_client(BASE_MODEL, rank=4),
    "from state": lambda stage: stage.client.create_training_client_from_state(stage.state),
    "with optimizer": lambda stage: stage.client.create_training_client_from_state_with_optimizer(
        stage.state
    ),
}
SAMPLING: dict[str, Create] = {
    "base model": lambda stage: stage.client.create_sampling_client(base_model=BASE_MODEL),
    "checkpoint": lambda stage: stage.training.create_sampling_client(stage.weights),
    "save": lambda stage: stage.training.save_weights_and_get_sampling_client(),
    "holder": lambda stage: SamplingClient.create(stage.client.holder, base_model=BASE_MODEL),
}
TWINS: dict[str, Callable[[Stage], Awaitable[Any]]] = {
    "lora": lambda stage: stage.client.create_lora_training_client_async(BASE_MODEL, rank=4),
    "from state": lambda stage: stage.client.create_training_client_from_state_async(stage.state),
    "with optimizer": lambda stage: (
        stage.client.create_training_client_from_state_with_optimizer_async(stage.state)
    ),
    "base model": lambda stage: stage.client.create_sampling_client_async(base_model=BASE_MODEL),
    "checkpoint": lambda stage: stage.training.create_sampling_client_async(stage.weights),
    "save": lambda stage: stage.training.save_weights_and_get_sampling_client_async(),
}
ALL = {**TRAINING, **SAMPLING}


@pytest.fixture
def stage(client: ServiceClient) -> Stage:
    return Stage(client)


def expected(name: str) -> type:
    return TrainingClient if name in TRAINING else SamplingClient


def use(client: Any) -> None:
    """One call on a client; raises if it does not work."""
    if isinstance(client, TrainingClient):
        assert client.forward([DATUM], "cross_entropy").result(WAIT_S).metrics
    else:
        assert client.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences


@pytest.mark.parametrize("name", ALL)
def test_result_gives_the_client(name: str, stage: Stage) -> None:
    created = ALL[name](stage).result(WAIT_S)

    assert type(created) is expected(name)
    use(created)


@pytest.mark.parametrize("name", ALL)
def test_await_gives_the_client(name: str, stage: Stage) -> None:
    async def scenario() -> Any:
        return await ALL[name](stage)

    created = asyncio.run(scenario())

    assert type(created) is expected(name)
    use(created)


@pytest.mark.parametrize("name", TWINS)
def test_the_twin_for_coroutines_gives_the_client(name: str, stage: Stage) -> None:
    async def scenario() -> Any:
        return await TWINS[name](stage)

    created = asyncio.run(scenario())

    assert type(created) is expected(name)
    use(created)


@pytest.mark.parametrize("name", ALL)
def test_what_is_returned_works_as_the_client(name: str, stage: Stage) -> None:
    created = ALL[name](stage)

    assert isinstance(created, expected(name))
    use(created)


@pytest.mark.parametrize("name", ALL)
def test_what_is_returned_works_as_the_client_in_a_running_loop(name: str, stage: Stage) -> None:
    """As a notebook's cell that was written for blocking calls."""

    async def cell() -> None:
        use(ALL[name](stage))

    asyncio.run(cell())


def test_calls_on_the_future_and_on_the_client_are_one_queue(
    stage: Stage, service: ScriptedService
) -> None:
    service.forget_requests()
    future = stage.client.create_lora_training_client(BASE_MODEL, rank=4)
    client = future.result()

    calls = [
        future.forward_backward([DATUM], "cross_entropy"),
        client.forward_backward([DATUM], "cross_entropy"),
        future.forward_backward([DATUM], "cross_entropy"),
    ]
    for call in calls:
        call.result(WAIT_S)

    assert [r.request.seq_id for r in service.requests("forward_backward")] == [1, 2, 3]


# Failures


def test_without_a_loop_a_failed_creation_raises_from_the_line_that_asked(
    client: ServiceClient, service: ScriptedService
) -> None:
    service.faults.fail_command("create_model", category="user", error="no such model", times=1)

    with pytest.raises(RequestFailedError, match="no such model"):
        client.create_lora_training_client(BASE_MODEL)  # type: ignore[unused-awaitable]


def test_without_a_loop_a_missing_checkpoint_raises_from_the_line_that_asked(
    stage: Stage,
) -> None:
    missing = stage.weights.replace("/weights", "/missing")

    with pytest.raises((NotFoundError, RequestFailedError)):
        stage.client.create_sampling_client(missing)  # type: ignore[unused-awaitable]


def test_in_a_running_loop_the_await_and_every_use_raise_the_error(
    client: ServiceClient, service: ScriptedService
) -> None:
    service.faults.fail_command("create_model", category="user", error="no such model", times=1)

    async def scenario() -> None:
        training = client.create_lora_training_client(BASE_MODEL)
        with pytest.raises(RequestFailedError, match="no such model"):
            await training
        with pytest.raises(RequestFailedError, match="no such model"):
            training.model_id  # noqa: B018
        with pytest.raises(RequestFailedError, match="no such model"):
            training.forward([DATUM], "cross_entropy")  # type: ignore[unused-awaitable]

    asyncio.run(scenario())


def test_arguments_that_are_wrong_raise_from_the_call_in_a_running_loop_too(
    client: ServiceClient,
) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match="pass model_path or base_model"):
            client.create_sampling_client()  # type: ignore[unused-awaitable]

    asyncio.run(scenario())


def test_a_property_waits_for_the_creation_in_a_running_loop(
    client: ServiceClient, service: ScriptedService
) -> None:
    held = service.faults.hold_commands("create_model", times=1)

    async def scenario() -> str:
        training = client.create_lora_training_client(BASE_MODEL)
        assert not training.done()
        threading.Timer(0.2, held.release).start()
        return training.model_id  # blocks this loop meanwhile

    assert ":train:" in asyncio.run(scenario())


def test_giving_up_on_an_awaited_creation_cancels_it(
    client: ServiceClient, service: ScriptedService
) -> None:
    held = service.faults.hold_commands("create_model", times=1)

    async def scenario() -> TrainingClient:
        training = client.create_lora_training_client(BASE_MODEL)
        await held.wait_held_async(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(training, 0.01)
        assert training.cancelled()
        with pytest.raises(concurrent.futures.CancelledError):
            training.model_id  # noqa: B018
        held.release()
        return await client.create_lora_training_client(BASE_MODEL)  # the next one is not affected

    use(asyncio.run(scenario()))


def test_a_creation_that_takes_longer_than_its_timeout_fails(
    client: ServiceClient, service: ScriptedService
) -> None:
    held = service.faults.hold_commands("create_model", times=1)

    with pytest.raises(APITimeoutError):
        client.create_lora_training_client(BASE_MODEL, timeout=0.2)  # type: ignore[unused-awaitable]
    held.release()


def test_closing_the_service_client_ends_a_creation(
    client: ServiceClient, service: ScriptedService
) -> None:
    held = service.faults.hold_commands("create_model", times=1)

    async def scenario() -> None:
        training = client.create_lora_training_client(BASE_MODEL)
        await held.wait_held_async(1)
        await client.close()
        with pytest.raises(ClosedError):
            await training

    asyncio.run(scenario())
    held.release()


# Event loops


def test_creations_run_at_the_same_time_and_are_numbered_in_the_order_of_the_calls(
    client: ServiceClient, service: ScriptedService
) -> None:
    """Three replies are held until all three were asked for."""
    held = service.faults.hold_commands("create_model", times=3)

    async def scenario() -> list[TrainingClient]:
        asked = [client.create_lora_training_client(BASE_MODEL, rank=rank) for rank in (1, 2, 3)]
        await held.wait_held_async(3)
        held.release()
        return await asyncio.gather(*asked)

    created = asyncio.run(scenario())

    assert [one.model_id.partition(":train:")[2] for one in created] == ["0", "1", "2"]
    numbers = {
        received.request.model_seq_id: received.request.lora_config.rank
        for received in service.requests("create_model")
    }
    assert numbers == {0: 1, 1: 2, 2: 3}


def test_an_unawaited_save_keeps_its_place_in_the_queue(
    stage: Stage, service: ScriptedService
) -> None:
    service.forget_requests()

    async def scenario() -> None:
        first = stage.training.forward_backward([DATUM], "cross_entropy")
        sampler = stage.training.save_weights_and_get_sampling_client()
        step = stage.training.optim_step(AdamParams())
        await asyncio.gather(first, step, sampler)

    asyncio.run(scenario())

    numbered = [r for r in service.requests() if getattr(r.request, "seq_id", None) is not None]
    by_number = [r.endpoint for r in sorted(numbered, key=lambda one: one.request.seq_id)]
    assert by_number == ["forward_backward", "save_weights_for_sampler", "optim_step"]


def test_on_the_clients_own_loop_a_creation_is_awaited_and_direct_use_is_refused(
    stage: Stage,
) -> None:
    """As a coroutine of the program that was started there."""

    async def on_own_loop() -> TrainingClient:
        training = stage.client.create_lora_training_client(BASE_MODEL, rank=4)
        with pytest.raises(RuntimeError, match="own event loop would wait for itself; await"):
            training.model_id  # noqa: B018
        with pytest.raises(RuntimeError, match="await its _async variant"):
            stage.training.get_info()
        return await training

    use(background().start(on_own_loop()).result(WAIT_S))


def test_a_creation_in_a_thread_of_a_running_loop_waits_in_that_thread(stage: Stage) -> None:
    async def scenario() -> Any:
        return await asyncio.to_thread(SAMPLING["base model"], stage)

    created = asyncio.run(scenario())

    assert created.done()
    use(created)


def test_callbacks_and_standard_futures_of_a_creation(stage: Stage) -> None:
    called = threading.Event()

    async def scenario() -> ClientFuture[Any]:
        created = TRAINING["lora"](stage)
        created.add_done_callback(lambda _: called.set())
        await asyncio.to_thread(concurrent.futures.wait, [created.future()])
        return created

    created = asyncio.run(scenario())

    assert called.wait(WAIT_S)
    use(created.future().result())


def test_a_sampler_that_was_not_awaited_can_be_pickled(stage: Stage) -> None:
    sampler = SAMPLING["base model"](stage)

    restored = pickle.loads(pickle.dumps(sampler))

    assert type(restored) is SamplingClient
    assert restored.get_sampler_handle() == sampler.get_sampler_handle()  # type: ignore[attr-defined]
