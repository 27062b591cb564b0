"""Training against a service: order, chunks, and calls that fail or give up."""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinsmith.client import dispatch
from tinsmith.client.futures import APIFuture
from tinsmith.client.poller import MOST_BAD_REQUESTS
from tinsmith.client.retry import RetryBudget
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RequestErrorCategory,
    RequestFailedError,
    ResultExpiredError,
    UnprocessableEntityError,
    UnreadableResultError,
    ValidationError,
)
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import AdamParams, Datum, ModelInput
from tinsmith.wire import content

WAIT_S = 60.0
FOREVER_S = 3600.0
"""How long a service waits for a missing number in tests that must not leave one missing."""
TRAINING = ("forward_backward", "optim_step", "save_weights", "save_weights_for_sampler")


def a_datum(token: int = 1) -> Datum:
    return Datum(
        ModelInput.from_ints([token, 2, 3]),
        {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
    )


def sent_numbers(service: ScriptedService) -> list[int]:
    """The numbers of all training requests, in order of arrival."""
    return [
        received.request.seq_id
        for received in service.requests()
        if received.endpoint in TRAINING and received.request is not None
    ]


def test_a_training_loop_lowers_the_loss(training: TrainingClient) -> None:
    losses = []

    for _ in range(3):
        output = training.forward_backward([a_datum()], "cross_entropy")
        step = training.optim_step(AdamParams(learning_rate=1e-3))
        losses.append(output.result(WAIT_S).metrics["loss:sum"])
        step.result(WAIT_S)

    assert losses[0] > losses[1] > losses[2]


def test_the_loss_per_token_does_not_depend_on_the_scale_of_weights_or_the_size_of_a_batch(
    training: TrainingClient,
) -> None:
    """The service says no more than `loss:sum`, as the official one does."""
    tokens = ModelInput.from_ints([1, 2, 3])

    def per_token(*weights: list[float]) -> float:
        data = [Datum(tokens, {"target_tokens": [2, 3, 4], "weights": each}) for each in weights]
        output = training.forward(iter(data), "cross_entropy").result(WAIT_S)  # type: ignore[arg-type]
        assert set(output.metrics) == {"loss:sum"}
        return output.loss_per_token

    once = training.forward([a_datum()], "cross_entropy").result(WAIT_S)
    lp = once.loss_fn_outputs[0]["logprobs"].tolist()

    expected = pytest.approx(-(lp[1] + lp[2]) / 2)
    assert once.loss_per_token == expected
    assert once.loss_per_token != once.loss
    assert per_token([0.0, 0.5, 0.5]) == expected
    assert per_token(*[[0.0, 0.1, 0.1]] * 7) == expected
    assert per_token([0.0, 3.0, 1.0]) == pytest.approx(-(3 * lp[1] + lp[2]) / 4)


def test_the_loss_per_token_of_rl_losses_counts_tokens_with_an_advantage(
    training: TrainingClient,
) -> None:
    inputs = {
        "target_tokens": [2, 3, 4],
        "logprobs": [-1.0, -1.0, -1.0],
        "advantages": [0.0, 2.0, -1.0],
    }
    advantages = np.array(inputs["advantages"], dtype=np.float32)
    data = [Datum(ModelInput.from_ints([1, 2, 3]), {**inputs, "advantages": advantages})]

    asked = training.forward_backward(data, "importance_sampling")
    advantages[0] = 5.0  # later changes count no more than they are sent
    output = asked.result(WAIT_S)

    assert output.loss_per_token == pytest.approx(output.metrics["loss:sum"] / 2)
    assert math.isfinite(pickle.loads(pickle.dumps(output)).loss_per_token)


@pytest.mark.parametrize(
    ("loss_fn", "inputs"),
    [
        ("cross_entropy", {"weights": [1.0, 1.0]}),
        ("ppo", {"logprobs": [-1.0] * 3, "advantages": [1.0] * 4}),
    ],
)
def test_loss_inputs_of_different_lengths_are_rejected_before_sending(
    training: TrainingClient, service: ScriptedService, loss_fn: Any, inputs: dict[str, Any]
) -> None:
    tokens = ModelInput.from_ints([1, 2, 3])
    bad = Datum(tokens, {"target_tokens": [2, 3, 4], **inputs})

    with pytest.raises(
        ValidationError, match=r"data\[1\]: loss_fn_inputs.*target_tokens has length 3"
    ):
        _ = training.forward_backward([a_datum(), bad], loss_fn)

    assert service.requests("forward_backward") == []
    assert training.forward([a_datum()], "cross_entropy").result(WAIT_S).loss > 0


def test_async_calls_submit_immediately_and_return_awaitable_futures(
    training: TrainingClient,
) -> None:
    async def scenario() -> tuple[float, Any]:
        output = await training.forward_backward_async([a_datum()], "cross_entropy")
        step = await training.optim_step_async(AdamParams())
        return (await output).loss, await step

    loss, step = asyncio.run(scenario())

    assert loss > 0
    assert step.metrics is not None


def test_s14_seq_ids_on_the_wire_increase_by_exactly_1(
    training: TrainingClient, service: ScriptedService
) -> None:
    pending: list[Any] = []
    for _ in range(5):
        pending.append(training.forward_backward([a_datum()], "cross_entropy"))
        pending.append(training.optim_step(AdamParams()))
    pending.append(training.save_weights_for_sampler("s"))
    pending.append(training.optim_step(AdamParams()))
    for future in pending:
        future.result(WAIT_S)

    assert sent_numbers(service) == list(range(1, 13))
    assert [r.endpoint for r in service.requests() if r.endpoint in TRAINING][-2:] == [
        "save_weights_for_sampler",
        "optim_step",
    ]


@pytest.mark.parametrize(
    "flags",
    [
        {"parallel_fwdbwd_chunks": True},
        {"parallel_fwdbwd_chunks": False, "tinsmith_parallel_chunks": True},
    ],
    ids=["plain", "ours"],
)
def test_s16_chunks_are_sent_in_parallel_and_the_first_one_last(flags: dict[str, bool]) -> None:
    with (
        running_service(long_poll_s=0.5, fwdbwd_max_chunk_len=2, **flags) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        others = service.faults.hold("forward_backward", when=lambda r: _number(r) in (2, 3, 4))

        output = training.forward_backward([a_datum() for _ in range(8)], "cross_entropy")
        others.wait_held(3)
        assert sorted(sent_numbers(service)) == [2, 3, 4]
        others.release()

        assert len(output.result(WAIT_S).loss_fn_outputs) == 8
        assert sent_numbers(service)[-1] == 1


def test_s16_a_serial_mode_sends_one_chunk_after_another() -> None:
    with (
        running_service(long_poll_s=0.5, fwdbwd_max_chunk_len=2) as service,
        ServiceClient(
            base_url=service.base_url, api_key=service.api_key, parallel_chunks=False
        ) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)

        training.forward_backward([a_datum() for _ in range(8)], "cross_entropy").result(WAIT_S)

        assert sent_numbers(service) == [1, 2, 3, 4]


def test_bodies_of_a_model_in_flight_respect_the_service_s_byte_budget() -> None:
    flags = {"fwdbwd_max_chunk_len": 1, "fwdbwd_dispatch_bytes_semaphore_size": 40_000}
    tokens = list(range(1, 1001))
    large = Datum(
        model_input=ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": tokens, "weights": [1.0] * 1000},
    )
    with (
        running_service(long_poll_s=0.5, **flags) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        models = [client.create_lora_training_client("Qwen/Qwen3-8B", rank=4) for _ in range(2)]
        held = service.faults.hold("forward_backward")
        outputs = [model.forward_backward([large] * 6, "cross_entropy") for model in models]
        held.wait_held(4)
        held.release()

        assert [len(output.result(WAIT_S).loss_fn_outputs) for output in outputs] == [6, 6]
        assert held.most_held == 4  # two of about 16 kB of each


@pytest.mark.parametrize("tokens", [3, 20_000])
def test_small_and_large_bodies_are_compressed_where_the_service_asks(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small one on the event loop, since handing it to a thread would gain nothing."""
    on_threads = []
    to_thread = asyncio.to_thread

    async def noted(function: Any, *arguments: Any) -> Any:
        on_threads.append(function)
        return await to_thread(function, *arguments)

    with (
        running_service(proto_compress_fwdbwd=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        monkeypatch.setattr("tinsmith.client.submission.asyncio.to_thread", noted)
        data = Datum(
            ModelInput.from_ints([1] * tokens),
            {"target_tokens": [2] * tokens, "weights": [1.0] * tokens},
        )
        training.forward_backward([data], "cross_entropy").result(WAIT_S)

        [received] = service.requests("forward_backward")
        assert received.headers["content-encoding"] == "zstd"
        assert (content.compress in on_threads) == (tokens > 3)


def _number(received: Any) -> int:
    return int(getattr(received.request, "seq_id", 0) or 0)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize("status", [422, 500])
def test_s17_a_failing_chunk_leaves_the_client_usable(
    failing: int, status: int, parallel: bool
) -> None:
    retry = RetryBudget(total_s=0.2, delay_base_s=0.01)
    with (
        running_service(long_poll_s=0.5, gap_wait_s=FOREVER_S, fwdbwd_max_chunk_len=1) as service,
        ServiceClient(
            base_url=service.base_url,
            api_key=service.api_key,
            retry=retry,
            parallel_chunks=parallel,
        ) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        service.faults.add(
            "forward_backward",
            times=None,
            status=status,
            when=lambda r: _number(r) == failing and len(_data(r)) == 1 and not _is_filler(r),
        )

        broken = training.forward_backward([a_datum(i) for i in (1, 2, 3)], "cross_entropy")
        with pytest.raises((UnprocessableEntityError, InternalServerError)) as caught:
            broken.result(WAIT_S)
        training.optim_step(AdamParams()).result(WAIT_S)  # far below gap_wait_s

        assert "of 3 chunks the server has" in caught.value.__notes__[-1]


def _data(received: Any) -> list[Datum]:
    data: list[Datum] = received.request.forward_backward_input.data
    return data


def _is_filler(received: Any) -> bool:
    return bool(received.request.forward_only)


def test_s17_a_call_cancelled_in_the_queue_leaves_no_gap_in_seq_ids(
    training: TrainingClient, service: ScriptedService
) -> None:
    first_reply = service.faults.hold("forward_backward", times=1)
    first = training.forward_backward([a_datum()], "cross_entropy")
    first_reply.wait_held(1)
    queued = training.forward_backward([a_datum()], "cross_entropy")
    last = training.optim_step(AdamParams())

    queued.cancel()
    first_reply.release()

    first.result(WAIT_S)
    last.result(WAIT_S)
    assert sent_numbers(service) == [1, 2]


SINGLE_CALLS: dict[str, Callable[[TrainingClient], APIFuture[Any]]] = {
    "optim_step": lambda training: training.optim_step(AdamParams()),
    "save_weights": lambda training: training.save_state("a"),
    "save_weights_for_sampler": lambda training: training.save_weights_for_sampler("a"),
    "load_weights": lambda training: training.load_weights(
        "tinker://run/weights/a", with_optimizer=False
    ),
}


@pytest.mark.parametrize(
    "failure",
    [{"status": 422}, {"status": 500}, {"reset": True}],
    ids=["refused", "failed", "never arrived"],
)
@pytest.mark.parametrize("endpoint", SINGLE_CALLS)
def test_s17_a_call_that_fails_while_it_is_sent_leaves_the_client_usable(
    endpoint: str, failure: dict[str, Any]
) -> None:
    retry = RetryBudget(total_s=0.2, delay_base_s=0.01)
    with (
        running_service(long_poll_s=0.5, gap_wait_s=FOREVER_S) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=retry) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        service.faults.add(endpoint, times=None, **failure)

        with pytest.raises(APIError):
            SINGLE_CALLS[endpoint](training).result(WAIT_S)
        output = training.forward_backward([a_datum()], "cross_entropy").result(WAIT_S)

        assert output.loss > 0
        sent = service.wait_requests("forward_backward", 2, WAIT_S)
        passes = {_number(r): _is_filler(r) for r in sent}
        assert passes == {1: True, 2: False}


@pytest.mark.parametrize("failure", [{}, {"status": 500}], ids=["arrives", "does not arrive"])
@pytest.mark.parametrize("endpoint", SINGLE_CALLS)
def test_s17_a_call_cancelled_while_it_is_sent_leaves_the_client_usable(
    endpoint: str, failure: dict[str, Any]
) -> None:
    with (
        running_service(long_poll_s=0.5, gap_wait_s=FOREVER_S) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        held = service.faults.hold(endpoint, times=1, **failure)
        sending = SINGLE_CALLS[endpoint](training)
        held.wait_held(1)

        sending.cancel()
        output = training.forward_backward([a_datum()], "cross_entropy")

        assert output.result(WAIT_S).loss > 0
        held.release()


def test_a_call_sends_its_arrays_as_they_were_at_the_call(
    training: TrainingClient, service: ScriptedService
) -> None:
    """However the caller changes them while it waits in the line."""
    held = service.faults.hold("optim_step", times=1)
    step = training.optim_step(AdamParams())
    held.wait_held(1)
    tokens, weights = [1] * 5000, np.ones(5000, dtype=np.float32)
    datum = Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens, "weights": weights})
    waiting = training.forward_backward([datum], "cross_entropy")

    weights[:] = 0.0
    held.release()

    step.result(WAIT_S)
    waiting.result(WAIT_S)
    [sent] = service.requests("forward_backward")
    received: Any = _data(sent)[0].loss_fn_inputs["weights"]
    assert set(received.tolist()) == {1.0}


def test_after_a_lost_reply_the_call_is_resent_under_its_seq_id_and_runs_once(
    training: TrainingClient, service: ScriptedService
) -> None:
    service.faults.add("optim_step", times=2, lose_reply=True)

    training.optim_step(AdamParams()).result(WAIT_S)
    training.optim_step(AdamParams()).result(WAIT_S)

    numbers = [_number(received) for received in service.requests("optim_step")]
    assert set(numbers) == {1, 2}
    keys = {
        received.headers["x-idempotency-key"]
        for received in service.requests("optim_step")
        if _number(received) == 1
    }
    assert len(keys) == 1


def test_s15_results_and_get_info_are_not_delayed_by_a_long_send(
    training: TrainingClient, service: ScriptedService
) -> None:
    early = training.forward_backward([a_datum()], "cross_entropy")
    early.result(WAIT_S)
    held = service.faults.hold("forward_backward", times=1)
    stuck = training.forward_backward([a_datum()], "cross_entropy")
    held.wait_held(1)

    info = training.get_info()

    assert info.model_id == training.model_id
    held.release()
    stuck.result(WAIT_S)


def test_s15_sixty_four_results_arrive_while_a_send_is_stuck() -> None:
    with (
        running_service(long_poll_s=60.0) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        work = service.faults.hold_commands("forward_backward")
        pending = [training.forward_backward([a_datum()], "cross_entropy") for _ in range(64)]
        service.wait_requests("retrieve_future", 65)  # the first was for the model
        stuck_reply = service.faults.hold("optim_step", times=1)
        stuck = training.optim_step(AdamParams())
        stuck_reply.wait_held(1)

        assert service.in_flight("retrieve_future") == 64
        work.release()
        for future in pending:
            assert future.result(WAIT_S).loss > 0
        assert not stuck.done()
        stuck_reply.release()
        stuck.result(WAIT_S)


def test_s15_closing_does_not_wait_for_a_stuck_send(service: ScriptedService) -> None:
    client = ServiceClient(base_url=service.base_url, api_key=service.api_key)
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
    held = service.faults.hold("forward_backward", times=1)
    stuck = training.forward_backward([a_datum()], "cross_entropy")
    held.wait_held(1)

    client.close("interrupted").result(WAIT_S)

    with pytest.raises((APIConnectionError, RuntimeError)):
        stuck.result(WAIT_S)
    held.release()


@pytest.mark.usefixtures("eager_switching")
def test_s14_many_threads_with_multi_chunk_calls_leave_no_gap_in_seq_ids() -> None:
    with (
        running_service(long_poll_s=0.5, fwdbwd_max_chunk_len=2, gap_wait_s=30.0) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                pending: list[Any] = []
                for number in range(100):
                    data = [a_datum() for _ in range(1 + number % 5)]
                    pending.append(training.forward_backward(data, "cross_entropy"))
                    pending.append(training.optim_step(AdamParams()))
                for future in pending:
                    future.result(60)
            except BaseException as error:  # noqa: BLE001 - told by the assertion below
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        numbers = sent_numbers(service)
        assert errors == []
        assert sorted(numbers) == list(range(1, len(numbers) + 1))


def test_arrays_are_read_at_the_call(training: TrainingClient, service: ScriptedService) -> None:
    np = pytest.importorskip("numpy")
    weights = np.ones(3, np.float32)
    datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": weights})
    held = service.faults.hold("optim_step", times=1)
    step = training.optim_step(AdamParams())
    held.wait_held(1)

    queued = training.forward_backward([datum], "cross_entropy")
    weights[:] = 99.0
    held.release()
    step.result(WAIT_S)
    queued.result(WAIT_S)

    arrived = service.requests("forward_backward")[0].request.forward_backward_input.data[0]
    assert arrived.loss_fn_inputs["weights"].tolist() == [1.0, 1.0, 1.0]


def test_empty_data_is_rejected_at_the_call(training: TrainingClient) -> None:
    with pytest.raises(ValidationError, match="empty"):
        _ = training.forward_backward([], "cross_entropy")


def test_optim_step_takes_one_set_of_parameters(training: TrainingClient) -> None:
    with pytest.raises(ValidationError):
        _ = training.optim_step(AdamParams(), adam_params=AdamParams())
    with pytest.raises(TypeError):
        _ = training.optim_step()


@pytest.mark.parametrize("category", ["user", "server", "unknown"])
def test_s21_a_failed_command_raises_its_error_with_its_category(
    training: TrainingClient, service: ScriptedService, category: str
) -> None:
    service.faults.fail_command("optim_step", category=category, error="no gradients")

    with pytest.raises(RequestFailedError, match="no gradients") as caught:
        training.optim_step(AdamParams()).result(WAIT_S)

    assert caught.value.category is RequestErrorCategory(category)
    assert caught.value.request_id


def test_s19_polls_are_numbered_from_0_and_typed(
    training: TrainingClient, service: ScriptedService
) -> None:
    service.faults.delay_commands("optim_step", delay_s=1.2)

    training.optim_step(AdamParams()).result(WAIT_S)

    polls = [
        received.headers
        for received in service.requests("retrieve_future")
        if received.headers["x-tinker-request-type"] == "OptimStep"
    ]
    assert [poll["x-tinker-request-iteration"] for poll in polls] == [
        str(number) for number in range(len(polls))
    ]
    assert len(polls) > 1
    has_roundtrip = ["x-tinker-create-promise-roundtrip-time" in poll for poll in polls]
    assert has_roundtrip == [True] + [False] * (len(polls) - 1)


def test_polls_back_off_from_a_failing_server(
    training: TrainingClient, service: ScriptedService
) -> None:
    service.faults.add("retrieve_future", times=3, status=500)

    training.optim_step(AdamParams()).result(WAIT_S)

    times = [r.arrived_at for r in service.requests("retrieve_future")[-4:]]
    assert all(later - earlier > 0.2 for earlier, later in itertools.pairwise(times))


def test_a_result_that_the_server_lost_is_an_api_error(
    training: TrainingClient, service: ScriptedService
) -> None:
    service.faults.expire_results("optim_step")

    with pytest.raises(APIStatusError) as caught:
        training.optim_step(AdamParams()).result(WAIT_S)

    assert caught.value.status_code == 410


def test_a_large_result_is_fetched_in_two_steps() -> None:
    with (
        running_service(long_poll_s=0.5, inline_bytes=100) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        datum = Datum(
            ModelInput.from_ints([1] * 500),
            {"target_tokens": [1] * 500, "weights": [1.0] * 500},
        )

        output = training.forward([datum], "cross_entropy").result(WAIT_S)

        polls = [r.request for r in service.requests("retrieve_future")]
        assert len(output.loss_fn_outputs[0]["logprobs"].tolist()) == 500
        assert [poll.allow_metadata_only for poll in polls[-2:]] == [True, False]


def test_a_timeout_in_a_coroutine_cancels_the_call_and_the_next_one_works(
    training: TrainingClient, service: ScriptedService
) -> None:
    held = service.faults.hold_commands("optim_step", times=1)

    async def scenario() -> float:
        step = await training.optim_step_async(AdamParams())
        with pytest.raises(APITimeoutError):
            await step.result_async(timeout=0.2)
        held.release()
        return (await (await training.forward_async([a_datum()], "cross_entropy"))).loss

    assert asyncio.run(scenario()) > 0


def test_training_continues_from_a_saved_state(
    client: ServiceClient, training: TrainingClient
) -> None:
    _ = training.forward_backward([a_datum()], "cross_entropy")
    _ = training.optim_step(AdamParams(learning_rate=1e-3))
    path = training.save_state("first").result(WAIT_S).path
    before = training.forward([a_datum()], "cross_entropy").result(WAIT_S).loss

    resumed = client.create_training_client_from_state_with_optimizer(path)

    assert resumed.model_id != training.model_id
    assert resumed.forward([a_datum()], "cross_entropy").result(WAIT_S).loss == before


def test_save_weights_and_get_sampling_client_ignores_a_name_with_a_warning(
    training: TrainingClient, service: ScriptedService
) -> None:
    with pytest.warns(DeprecationWarning, match="name .* is deprecated"):
        training.save_weights_and_get_sampling_client(name="mine", timeout=WAIT_S).result()
    with pytest.warns(DeprecationWarning, match="name .* is deprecated"):
        asyncio.run(training.save_weights_and_get_sampling_client_async("mine", timeout=WAIT_S))

    sent = service.requests("save_weights_for_sampler")
    assert [save.request.path for save in sent] == [None, None]


def test_s18_closing_settles_pending_futures(service: ScriptedService) -> None:
    client = ServiceClient(base_url=service.base_url, api_key=service.api_key)
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
    service.faults.hold_commands("optim_step")
    pending = training.optim_step(AdamParams())
    service.wait_requests("optim_step", 1)

    client.close("success").result(WAIT_S)

    with pytest.raises((APIConnectionError, RuntimeError)):
        pending.result(60)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequestError),
        (401, AuthenticationError),
        (403, PermissionDeniedError),
        (404, NotFoundError),
        (409, ConflictError),
        (410, ResultExpiredError),
        (422, UnprocessableEntityError),
    ],
)
def test_a_rejected_result_poll_is_an_api_error_and_a_value_error(
    service: ScriptedService, status: int, kind: type[APIStatusError]
) -> None:
    retry = RetryBudget(delay_base_s=0.01)
    with ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=retry) as client:
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        refusal = service.faults.add("retrieve_future", times=None, status=status)

        with pytest.raises(ValueError, match=str(status)) as caught:
            training.optim_step(AdamParams()).result(WAIT_S)

    # A refusal is final, but for a few 400s, which a proxy may have given.
    assert refusal.struck == (1 + MOST_BAD_REQUESTS if status == 400 else 1)
    assert isinstance(caught.value, kind)
    assert caught.value.request_id
    assert isinstance(caught.value.__cause__, APIStatusError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.status_code) == (type(caught.value), status)


@pytest.mark.parametrize("call", ["forward_backward", "optim_step"])
def test_s18_an_unreadable_result_fails_only_its_own_call(
    training: TrainingClient, service: ScriptedService, call: str
) -> None:
    service.faults.add("retrieve_future", status=200, body=["nonsense"])

    broken: Any = (
        training.optim_step(AdamParams())
        if call == "optim_step"
        else training.forward_backward([a_datum()], "cross_entropy")
    )
    with pytest.raises(UnreadableResultError) as caught:
        broken.result(WAIT_S)

    assert isinstance(caught.value, ValueError)
    assert caught.value.request_id
    assert training.forward([a_datum()], "cross_entropy").result(WAIT_S).loss > 0


def test_s18_an_internal_error_in_joining_chunks_reaches_the_caller(
    training: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(_: object) -> Any:
        raise ZeroDivisionError("a mistake")

    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "join", join)
        broken = training.forward_backward([a_datum()], "cross_entropy")
        with pytest.raises(ZeroDivisionError, match="a mistake"):
            broken.result(WAIT_S)

    assert training.forward([a_datum()], "cross_entropy").result(WAIT_S).loss > 0


def test_s18_a_program_with_calls_in_flight_exits_immediately(
    service: ScriptedService,
) -> None:
    service.faults.hold_commands("optim_step")
    program = f"""
import tinsmith
client = tinsmith.ServiceClient(base_url={service.base_url!r}, api_key={service.api_key!r})
training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
pending = training.optim_step(tinsmith.AdamParams())
pending.add_done_callback(lambda future: print("settled", future.cancelled(), flush=True))
try:
    pending.result(0.1)
except TimeoutError:
    pass
"""

    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )

    assert (finished.returncode, finished.stderr) == (0, "")
    assert len(service.requests("finish_session")) == 1


@pytest.mark.parametrize(
    ("data", "loss_fn", "message"),
    [
        (a_datum(), "cross_entropy", "data must be a list of Datum, not Datum"),
        (None, "cross_entropy", "data must be a list of Datum, not NoneType"),
        ([{"model_input": [1]}], "cross_entropy", r"data\[0\] must be a Datum, not dict"),
        ([a_datum()], print, "to forward_backward_custom"),
        ([a_datum()], None, "the name of a loss"),
    ],
)
def test_invalid_forward_backward_arguments_raise_and_the_next_call_works(
    data: Any, loss_fn: Any, message: str, client: ServiceClient
) -> None:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)

    with pytest.raises(TypeError, match=message):
        training.forward_backward(data, loss_fn).result()

    assert (
        training.forward_backward([a_datum()], "cross_entropy").result(timeout=30).loss is not None
    )
