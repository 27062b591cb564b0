"""Queues that the server says are paused, as the user is told of them."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import pytest

from tinsmith.client.futures import run_callback
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.client.waits import QueueState, QueueStateLogger, StateTeller
from tinsmith.testing import ScriptedService
from tinsmith.types import AdamParams, ModelInput, SamplingParams

WAIT_S = 60.0
Told = queue.SimpleQueue[tuple[QueueState, str | None, str]]


def tells_to(told: Told) -> Any:
    """A method to put in the place of `on_queue_state_change`."""

    def on_queue_state_change(_: object, state: QueueState, reason: str | None) -> None:
        told.put((state, reason, threading.current_thread().name))

    return on_queue_state_change


@pytest.mark.parametrize("poll_status", [200, 408])
def test_a_training_client_hears_of_a_paused_queue_on_the_callback_thread(
    training: TrainingClient,
    service: ScriptedService,
    monkeypatch: pytest.MonkeyPatch,
    poll_status: int,
) -> None:
    told: Told = queue.SimpleQueue()
    monkeypatch.setattr(TrainingClient, "on_queue_state_change", tells_to(told))
    paused = service.faults.pause(
        "optim_step", reason="no room", poll_after_s=0.05, poll_status=poll_status, times=1
    )

    step = training.optim_step(AdamParams())
    state, reason, thread = told.get(timeout=WAIT_S)
    paused.release()

    assert (state, reason) == (QueueState.PAUSED_CAPACITY, "no room")
    assert thread == "tinsmith-callbacks"
    step.result(WAIT_S)


def test_a_replaced_on_queue_state_change_of_a_sampling_client_is_called(
    client: ServiceClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: Told = queue.SimpleQueue()
    monkeypatch.setattr(SamplingClient, "on_queue_state_change", tells_to(told))
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    paused = service.faults.pause(
        "asample", queue_state="paused_rate_limit", poll_after_s=0.05, times=1
    )

    answer = sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=2))
    state, reason, _ = told.get(timeout=WAIT_S)
    paused.release()

    assert (state, reason) == (QueueState.PAUSED_RATE_LIMIT, None)
    answer.result(WAIT_S)


def test_an_observer_that_raises_or_blocks_delays_no_result(
    training: TrainingClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def on_queue_state_change(*_: object) -> None:
        begun.set()
        may_end.wait(WAIT_S)
        raise RuntimeError("user code")

    monkeypatch.setattr(TrainingClient, "on_queue_state_change", on_queue_state_change)
    service.faults.pause("optim_step", polls=2, poll_after_s=0.01, times=1)

    step = training.optim_step(AdamParams())

    assert begun.wait(WAIT_S)
    step.result(WAIT_S)
    may_end.set()
    after_all_callbacks = threading.Event()  # or their log lines would be the next test's
    run_callback(after_all_callbacks.set)
    assert after_all_callbacks.wait(WAIT_S)


def test_a_paused_queue_is_logged_once_a_minute_and_an_active_one_never(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    logger = QueueStateLogger("model-1", "Training", clock=lambda: now[0])

    with caplog.at_level(logging.WARNING, logger="tinsmith"):
        logger.on_queue_state_change(QueueState.ACTIVE, None)
        for second in (0.0, 30.0, 59.0, 60.0):
            now[0] = second
            logger.on_queue_state_change(QueueState.PAUSED_CAPACITY, f"at {second:g}")

    assert [record.getMessage() for record in caplog.records] == [
        "Training for model-1 is paused. Reason: at 0",
        "Training for model-1 is paused. Reason: at 60",
    ]


def test_an_unknown_queue_state_without_a_reason_is_logged_as_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert QueueState.parse("on fire") is QueueState.UNKNOWN
    with caplog.at_level(logging.WARNING, logger="tinsmith"):
        QueueStateLogger("s", "Sampling").on_queue_state_change(QueueState.UNKNOWN, None)

    assert caplog.records[0].getMessage() == "Sampling for s is paused. Reason: unknown"


def test_the_latest_queue_state_is_described_until_results_arrive() -> None:
    class Observer:
        def on_queue_state_change(self, state: QueueState, reason: str | None) -> None:
            pass

    teller = StateTeller(Observer())
    states = [teller.latest]
    teller.tell("paused_capacity", "no room")
    states.append(teller.latest)
    teller.queue_moves()
    states.append(teller.latest)

    assert states == ["", "the queue is paused_capacity: no room", "the queue is active"]


def test_pending_replies_are_not_logged_individually(
    training: TrainingClient, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    paused = service.faults.pause("optim_step", poll_after_s=0.01, poll_status=200, times=1)

    with caplog.at_level(logging.WARNING, logger="tinsmith"):
        step = training.optim_step(AdamParams())
        service.wait_requests("retrieve_future", 5)
        paused.release()
        step.result(WAIT_S)

    assert len(caplog.records) <= 1  # that it is paused, which is told once a minute


def test_a_freed_observer_is_not_called() -> None:
    class Observer:
        def on_queue_state_change(self, *_: object) -> None:
            raise AssertionError("it was dropped")

    observer = Observer()
    teller = StateTeller(observer)
    del observer

    teller.tell("paused_capacity", "")
    teller._call()
