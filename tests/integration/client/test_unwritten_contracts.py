"""What Tinker programs rely on without anybody having promised it (client-surface.md, 1.5)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tinsmith.client.rest import RestClient
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.testing import ScriptedService
from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams

WAIT_S = 60.0
PROMPT = ModelInput.from_ints([1, 2])
PARAMS = SamplingParams(max_tokens=2)

PATCHED_TRAINING = (
    "forward_async",
    "forward_backward",
    "forward_backward_async",
    "forward_backward_custom_async",
    "get_info_async",
    "optim_step",
    "optim_step_async",
    "save_state_async",
    "load_state_async",
    "load_state_with_optimizer_async",
    "save_weights_for_sampler",
    "save_weights_for_sampler_async",
    "save_weights_external_async",
    "save_weights_and_get_sampling_client_async",
    "create_sampling_client_async",
)
PATCHED_SAMPLING = ("sample", "sample_async", "compute_logprobs_async", "get_base_model_async")
PATCHED = [
    *((TrainingClient, name) for name in PATCHED_TRAINING),
    *((SamplingClient, name) for name in PATCHED_SAMPLING),
]


def a_datum() -> Datum:
    return Datum(
        ModelInput.from_ints([1, 2, 3]),
        {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
    )


def sampler_of(client: ServiceClient) -> SamplingClient:
    return client.create_sampling_client(base_model="Qwen/Qwen3-8B")


@pytest.mark.parametrize(("owner", "name"), PATCHED, ids=str)
def test_methods_that_programs_wrap_are_plain_functions_of_their_class(
    owner: type, name: str
) -> None:
    method = inspect.getattr_static(owner, name)

    assert inspect.isfunction(method)
    assert inspect.iscoroutinefunction(method) == name.endswith("_async")


@pytest.mark.parametrize(
    ("method", "first"),
    [
        (SamplingClient.sample, ["prompt", "num_samples", "sampling_params"]),
        (SamplingClient.sample_async, ["prompt", "num_samples", "sampling_params"]),
        (TrainingClient.optim_step, ["optim_params"]),
        (TrainingClient.optim_step_async, ["optim_params"]),
        (TrainingClient.forward_backward, ["data", "loss_fn", "loss_fn_config"]),
        (TrainingClient.forward_backward_async, ["data", "loss_fn", "loss_fn_config"]),
        (TrainingClient.save_weights_for_sampler, ["name"]),
        (TrainingClient.save_weights_for_sampler_async, ["name"]),
    ],
)
def test_the_first_positional_arguments_keep_their_order(
    method: Callable[..., Any], first: list[str]
) -> None:
    assert list(inspect.signature(method).parameters)[1 : 1 + len(first)] == first


def test_a_wrapper_on_the_class_sees_every_call_once(
    client: ServiceClient, training: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture layer wraps both faces and uses a context variable to record once."""
    seen: list[str] = []
    inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)

    def wrap(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def record(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not inside.get():
                seen.append(name)
            return original(self, *args, **kwargs)

        async def record_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            token = inside.set(True)
            try:
                return await original(self, *args, **kwargs)
            finally:
                inside.reset(token)

        monkeypatch.setattr(owner, name, record_async if name.endswith("_async") else record)

    for name in ("sample", "sample_async"):
        wrap(SamplingClient, name)
    for name in ("forward_backward", "forward_backward_async", "optim_step", "optim_step_async"):
        wrap(TrainingClient, name)
    sampler = sampler_of(client)

    async def scenario() -> None:
        await sampler.sample_async(PROMPT, 1, PARAMS)
        sampler.sample(prompt=PROMPT, num_samples=1, sampling_params=PARAMS).result(WAIT_S)
        await (await training.forward_backward_async(data=[a_datum()], loss_fn="cross_entropy"))
        await (await training.optim_step_async(AdamParams()))
        training.optim_step(AdamParams()).result(WAIT_S)

    asyncio.run(scenario())

    assert seen == [
        "sample_async",
        "sample",
        "forward_backward_async",
        "optim_step_async",
        "optim_step",
    ]


def test_a_retry_wrapper_on_the_class_can_repeat_a_failed_call(
    training: TrainingClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TrainingClient.forward_backward

    def patient(self: TrainingClient, data: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            original(self, data, *args, **kwargs).result(WAIT_S)
        except ValueError:
            return original(self, data, *args, **kwargs)
        raise AssertionError("the first was to fail")

    monkeypatch.setattr(TrainingClient, "forward_backward", patient)
    service.faults.expire_results("forward_backward", times=1)

    assert training.forward_backward([a_datum()], "cross_entropy").result(WAIT_S).loss > 0


def test_sample_returns_a_concurrent_future(client: ServiceClient) -> None:
    called = threading.Event()

    future = sampler_of(client).sample(PROMPT, 1, PARAMS)
    future.add_done_callback(lambda _: called.set())

    assert isinstance(future, concurrent.futures.Future)
    assert future.exception(WAIT_S) is None
    assert future.result() is future.result()
    assert called.wait(WAIT_S)
    assert future.cancel() is False


def test_the_future_of_a_training_call_accepts_callbacks(training: TrainingClient) -> None:
    called = threading.Event()

    future = training.optim_step(AdamParams())
    future.add_done_callback(lambda _: called.set())

    assert called.wait(WAIT_S)
    assert future.future().done()


def test_ids_can_be_read(client: ServiceClient, training: TrainingClient) -> None:
    assert training.model_id.startswith("session-")
    assert sampler_of(client)._sampling_session_id


def test_the_first_await_submits_and_the_second_waits_for_the_result(
    training: TrainingClient, service: ScriptedService
) -> None:
    """The pipelining idiom: submit two, then wait for both."""
    held = service.faults.hold_commands("forward_backward", times=1)

    async def scenario() -> None:
        forward = await training.forward_backward_async([a_datum()], "cross_entropy")
        step = await training.optim_step_async(AdamParams())
        await asyncio.to_thread(service.wait_requests, "optim_step", 1)
        assert not forward.done()
        held.release()
        assert (await forward.result_async()).metrics
        assert (await step.result_async()).metrics is not None

    asyncio.run(scenario())


def test_the_holder_of_every_client_exposes_its_session(
    client: ServiceClient, training: TrainingClient
) -> None:
    holder = client.holder

    async def answer() -> int:
        return 42

    assert training.holder is holder is sampler_of(client).holder
    assert training.model_id.startswith(holder.get_session_id())
    assert holder.get_client_config().fwdbwd_max_chunk_len > 0
    assert holder.get_client_dynamic_config().refresh_interval_sec > 0
    assert RestClient(holder).holder is holder
    assert holder.get_loop().is_running()
    assert holder.run_coroutine_threadsafe(answer()).result(WAIT_S) == 42


def test_create_rest_client_still_works(client: ServiceClient) -> None:
    with pytest.warns(FutureWarning):
        rest = client.create_rest_client()

    assert rest.list_training_runs().result(WAIT_S).training_runs == []
