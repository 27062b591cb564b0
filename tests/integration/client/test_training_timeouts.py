"""Training calls whose time is over, or that are given up, wherever they are by then (S14-S18)."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tinsmith.client.retry import RetryBudget
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.errors import APITimeoutError, ValidationError
from tinsmith.testing import ReceivedRequest, ScriptedService, running_service
from tinsmith.types import AdamParams, Datum, ModelInput

WAIT_S = 60.0
GAP_WAIT_S = 3600.0
"""How long the service would wait for a number that is missing: a test that sees it has failed."""
SHORT_S = 1.0
"""Enough for a call to be sent, on a busy machine too."""
TRAINING = ("forward_backward", "optim_step", "save_weights", "save_weights_for_sampler")

NO_WORK = {"on_queue_state_change", "get_console_url", "get_telemetry"}
"""Public names that start no work."""


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    """One datum is one chunk here."""
    with running_service(long_poll_s=0.5, gap_wait_s=GAP_WAIT_S, fwdbwd_max_chunk_len=1) as service:
        yield service


@pytest.fixture(params=["parallel", "serial"])
def training(service: ScriptedService, request: pytest.FixtureRequest) -> Iterator[TrainingClient]:
    """A model whose chunks go out together, and one whose chunks go one after another."""
    with ServiceClient(
        base_url=service.base_url,
        api_key=service.api_key,
        parallel_chunks=request.param == "parallel",
        retry=RetryBudget(total_s=5.0, delay_base_s=0.01),
    ) as client:
        yield client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)


def a_datum(token: int = 1) -> Datum:
    return Datum(
        ModelInput.from_ints([token, 2, 3]),
        {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
    )


def number_of(received: ReceivedRequest) -> int:
    return int(getattr(received.request, "seq_id", 0) or 0)


def is_training_pass(received: ReceivedRequest) -> bool:
    return not received.request.forward_only


def assert_usable(training: TrainingClient, service: ScriptedService) -> None:
    """The next calls are answered at once, and the service has every number up to theirs."""
    output = training.forward_backward([a_datum(7)], "cross_entropy")
    training.optim_step(AdamParams(learning_rate=1e-3)).result(WAIT_S)

    assert output.result(WAIT_S).loss > 0
    numbers = {number_of(one) for one in service.requests() if one.endpoint in TRAINING}
    assert numbers == set(range(1, max(numbers) + 1))


def give_up(future: Any, how: str) -> None:
    """Let the call's own time run out, or cancel it."""
    if how == "cancel":
        assert future.cancel()
    else:
        with pytest.raises(APITimeoutError, match="not done within"):
            future.result(WAIT_S)


def timeout_of(how: str) -> float | None:
    return SHORT_S if how == "timeout" else None


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_s17_a_queued_call_that_is_abandoned_uses_no_seq_id(
    training: TrainingClient, service: ScriptedService, how: str
) -> None:
    held = service.faults.hold("forward_backward", times=1)
    first = training.forward_backward([a_datum()], "cross_entropy")
    held.wait_held(1)
    queued = training.forward_backward([a_datum(5)], "cross_entropy", timeout=timeout_of(how))

    give_up(queued, how)
    held.release()

    first.result(WAIT_S)
    assert_usable(training, service)
    tokens = [
        one.request.forward_backward_input.data[0].model_input.to_ints()[0]
        for one in service.requests("forward_backward")
    ]
    assert tokens == [1, 7]


@pytest.mark.parametrize("how", ["timeout", "cancel"])
@pytest.mark.parametrize("stuck", [1, 2, 3])
def test_s17_a_call_abandoned_while_a_chunk_is_sent_leaves_no_gap_in_seq_ids(
    training: TrainingClient, service: ScriptedService, stuck: int, how: str
) -> None:
    held = service.faults.hold(
        "forward_backward", when=lambda one: number_of(one) == stuck and is_training_pass(one)
    )
    sending = training.forward_backward(
        [a_datum(token) for token in (1, 2, 3)], "cross_entropy", timeout=timeout_of(how)
    )
    held.wait_held(1)

    give_up(sending, how)

    assert_usable(training, service)
    held.release()


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_s18_a_call_abandoned_while_awaiting_its_result_delays_no_other(
    training: TrainingClient, service: ScriptedService, how: str
) -> None:
    held = service.faults.hold_commands("forward_backward", times=1)
    timeout = 5 * SHORT_S if how == "timeout" else None  # it has to get as far as its first poll
    waiting = training.forward_backward([a_datum()], "cross_entropy", timeout=timeout)
    service.wait_requests("retrieve_future", 2)  # the first was for the model

    give_up(waiting, how)
    held.release()

    assert_usable(training, service)


class _SlowLoss:
    """A loss that knows its own gradient, and waits for leave to give it."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def gradients(self, data: list[Datum], logprobs: list[Any]) -> Any:
        del data
        self.begun.set()
        assert self.may_end.wait(WAIT_S)
        return 0.0, [[0.0] * len(one) for one in logprobs], {}


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_s17_a_custom_loss_abandoned_while_it_runs_frees_both_seq_ids(
    training: TrainingClient, service: ScriptedService, how: str
) -> None:
    loss = _SlowLoss()
    custom = training.forward_backward_custom([a_datum()], loss, timeout=timeout_of(how))
    assert loss.begun.wait(WAIT_S)

    give_up(custom, how)

    assert_usable(training, service)
    loss.may_end.set()


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_s17_a_custom_loss_abandoned_in_its_second_pass_leaves_no_seq_id_gap(
    training: TrainingClient, service: ScriptedService, how: str
) -> None:
    loss = _SlowLoss()
    loss.may_end.set()
    held = service.faults.hold("forward_backward", times=1, when=is_training_pass)
    custom = training.forward_backward_custom([a_datum()], loss, timeout=timeout_of(how))
    held.wait_held(1)

    give_up(custom, how)

    assert_usable(training, service)
    held.release()


def test_s17_an_abandoned_save_leaves_the_client_usable(
    training: TrainingClient, service: ScriptedService
) -> None:
    held = service.faults.hold("save_weights_for_sampler", times=1)

    with pytest.raises(APITimeoutError):
        training.save_weights_and_get_sampling_client(timeout=SHORT_S).result()

    assert_usable(training, service)
    held.release()


def test_timeouts_apply_to_async_calls_too(
    training: TrainingClient, service: ScriptedService
) -> None:
    held = service.faults.hold("get_info", times=1)

    async def scenario() -> None:
        with pytest.raises(APITimeoutError):
            await training.get_info_async(timeout=SHORT_S)
        step = await training.optim_step_async(AdamParams(), timeout=WAIT_S)
        assert (await step).metrics is not None

    asyncio.run(scenario())
    held.release()


def test_an_invalid_timeout_is_rejected_immediately_and_the_next_call_works(
    training: TrainingClient, service: ScriptedService
) -> None:
    nan = float("nan")

    def never(*_: Any) -> Any:
        raise AssertionError("its call was refused")

    calls: list[Callable[[], object]] = [
        lambda: training.forward_backward([a_datum()], "cross_entropy", timeout=nan),
        lambda: training.forward_backward_custom([a_datum()], never, timeout=nan),
        lambda: training.optim_step(AdamParams(), timeout=nan),
        lambda: training.save_state("a", timeout=nan),
        lambda: training.get_info(timeout=nan),
    ]
    for call in calls:
        with pytest.raises(ValidationError, match="timeout is nan; pass seconds, or None"):
            call()

    assert_usable(training, service)


def test_every_call_of_a_training_client_takes_a_timeout() -> None:
    calls = {
        name: inspect.signature(call)
        for name, call in inspect.getmembers(TrainingClient, inspect.isfunction)
        if not name.startswith("_") and name not in NO_WORK
    }

    without = [name for name, call in calls.items() if "timeout" not in call.parameters]

    assert len(calls) > 20
    assert without == []
    kinds = {call.parameters["timeout"].kind for call in calls.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
