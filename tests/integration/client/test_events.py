"""What listeners of `on_event` are told, and that they can break nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import TypeVar

import pytest

import tinsmith
from tinsmith.client import events
from tinsmith.client.background import background
from tinsmith.client.events import Event
from tinsmith.client.limits import Limiter
from tinsmith.client.poller import Poll
from tinsmith.client.retry import RetryBudget
from tinsmith.client.service import ServiceClient
from tinsmith.client.upkeep import keep_alive
from tinsmith.errors import APIConnectionError
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams

WAIT_S = 60.0
E = TypeVar("E", bound=Event)


class Heard:
    """The events so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.came = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self.came:
            self.events.append(event)
            self.came.notify_all()

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    remove = tinsmith.on_event(heard)
    yield heard
    remove()


def run_a_step(service: ScriptedService) -> None:
    with ServiceClient(
        base_url=service.base_url,
        api_key=service.api_key,
        retry=RetryBudget(delay_base_s=0.01),
    ) as client:
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        datum = Datum(
            ModelInput.from_ints([11111, 22222]),
            {"target_tokens": [22222, 33333], "weights": [1.0, 1.0]},
        )
        training.forward_backward([datum], "cross_entropy").result(WAIT_S)
        training.optim_step(AdamParams()).result(WAIT_S)


def test_calls_retries_results_and_sessions_emit_events(
    service: ScriptedService, heard: Heard
) -> None:
    service.faults.add("optim_step", times=1, status=503)

    run_a_step(service)

    opened, closed = heard.of(events.SessionOpened)[0], heard.of(events.SessionClosed)[0]
    assert opened.session_id == closed.session_id
    assert opened.base_url == service.base_url
    assert closed.reason == "success"
    answers = [one for one in heard.of(events.CallAnswered) if one.endpoint == "optim_step"]
    assert [(one.attempt, one.status) for one in answers] == [(0, 503), (1, 200)]
    assert all(one.duration_s >= 0 and one.body_bytes > 0 for one in answers)
    sent = [one for one in heard.of(events.CallSent) if one.endpoint == "optim_step"]
    assert [one.attempt for one in sent] == [0, 1]
    assert sent[0].body_bytes > 10
    planned = heard.of(events.RetryPlanned)[0]
    assert (planned.endpoint, planned.attempt) == ("optim_step", 0)
    assert planned.reason == "InternalServerError 503"
    assert planned.delay_s > 0
    settled = {one.kind: one for one in heard.of(events.ResultSettled)}
    assert set(settled) == {"CreateModel", "ForwardBackward", "OptimStep"}
    assert all(one.error is None and one.polls >= 1 for one in settled.values())
    times = [event.at for event in heard.events]
    assert times == sorted(times)


def test_no_event_holds_a_credential_or_a_token(service: ScriptedService, heard: Heard) -> None:
    service.faults.add("forward_backward", times=1, status=400, body={"detail": "11111"})

    with pytest.raises(tinsmith.BadRequestError):
        run_a_step(service)

    assert heard.of(events.CallAnswered)
    told = " ".join(map(repr, heard.events))
    for secret in (service.api_key, "11111", "22222", "33333"):
        assert secret not in told


def test_an_unanswered_call_emits_an_event_with_its_error(heard: Heard) -> None:
    retry = RetryBudget(first_contact_s=0.0)
    client = ServiceClient(base_url="http://127.0.0.1:9", api_key="tml-x", retry=retry)

    with pytest.raises(APIConnectionError):
        client.get_server_capabilities()

    failed = heard.of(events.CallFailed)[0]
    assert (failed.endpoint, failed.attempt) == ("client_config", 0)
    assert failed.error == "APIConnectionError"


def test_a_pause_emits_events_when_it_begins_and_when_the_first_sample_leaves(
    client: ServiceClient, service: ScriptedService, heard: Heard
) -> None:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    service.faults.add("asample", times=3, status=429, headers={"retry-after-ms": "50"})
    params = SamplingParams(max_tokens=2)

    pending = [sampler.sample(ModelInput.from_ints([1]), 1, params) for _ in range(3)]
    for answer in pending:
        answer.result(WAIT_S)

    begun, ended = heard.of(events.PauseBegun), heard.of(events.PauseEnded)
    assert begun[0].state == "rate_limited"
    assert begun[0].for_s == pytest.approx(0.05)
    assert len(begun) == len(ended)


def test_a_paused_queue_emits_an_event_with_its_reason(heard: Heard) -> None:
    limiter = Limiter()

    limiter.queue_paused(2.5, "no room")
    limiter.queue_paused(5.0, "still none")

    (begun,) = heard.of(events.PauseBegun)
    assert (begun.state, begun.reason) == ("queue_paused", "no room")
    assert begun.for_s == pytest.approx(2.5)


def test_a_long_wait_for_a_result_emits_an_event(
    client: ServiceClient, service: ScriptedService, heard: Heard
) -> None:
    paused = service.faults.pause("optim_step", reason="no room", poll_after_s=0.0, times=1)
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
    step = training.optim_step(AdamParams())
    service.wait_requests("retrieve_future", 3)
    request_id = service.requests("retrieve_future")[-1].request.request_id
    now = [0.0]

    async def sleep(_: float) -> None:
        now[0] += 11.0
        if now[0] > 30:
            paused.release()

    poll = Poll(client._lease.session, request_id, "OptimStep", clock=lambda: now[0], sleep=sleep)
    background().run(poll.result())
    step.result(WAIT_S)

    awaited = heard.of(events.ResultAwaited)[0]
    assert (awaited.kind, awaited.queue_state) == ("OptimStep", "paused_capacity")
    assert awaited.waited_s > 10
    assert awaited.reason == "no room"


class _EnoughError(Exception):
    """Ends the heartbeats of a test."""


def test_a_failed_heartbeat_emits_an_event(heard: Heard) -> None:
    beats = 0

    async def call(*_: object) -> None:
        nonlocal beats
        beats += 1
        if beats > 1:
            raise _EnoughError
        raise APIConnectionError("gone")

    async def sleep(_: float) -> None:
        return None

    with pytest.raises(_EnoughError):
        asyncio.run(keep_alive(call, "session-7", clock=lambda: float(beats), sleep=sleep))

    failed = heard.of(events.HeartbeatFailed)
    assert [(one.session_id, one.error) for one in failed] == [("session-7", "APIConnectionError")]


def test_a_listener_that_raises_is_logged_once_and_breaks_no_call(
    service: ScriptedService, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Event) -> None:
        raise RuntimeError("user code")

    remove = tinsmith.on_event(broken)

    with caplog.at_level(logging.ERROR, logger="tinsmith"):
        run_a_step(service)
    remove()

    assert len(heard.of(events.CallAnswered)) > 5
    assert len([record for record in caplog.records if "on_event" in record.message]) == 1


def test_a_removed_listener_gets_no_events() -> None:
    first, second = Heard(), Heard()
    remove_first, remove_second = tinsmith.on_event(first), tinsmith.on_event(second)

    remove_first()
    remove_first()
    events.tell(events.PauseEnded())
    remove_second()

    assert first.events == []
    assert len(second.events) == 1
    assert events.listeners == ()


def test_no_telemetry_is_sent_whatever_fails(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    service.faults.add("optim_step", times=None, status=422)

    with pytest.raises(tinsmith.UnprocessableEntityError):
        run_a_step(service)

    assert service.requests("finish_session")
    assert not service.requests("telemetry")


def test_streams_emit_events_for_response_heads_and_rejections(heard: Heard) -> None:
    params = SamplingParams(max_tokens=3, seed=1, stop=[])
    with (
        running_service(tinsmith_stream=True) as service,
        ServiceClient(
            base_url=service.base_url,
            api_key=service.api_key,
            retry=RetryBudget(delay_base_s=0.01),
        ) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.add("asample_stream", times=1, status=503)

        assert list(sampler.sample_stream(ModelInput.from_ints([1]), 1, params, timeout=WAIT_S))

    answers = [one for one in heard.of(events.CallAnswered) if one.endpoint == "asample_stream"]
    assert [one.status for one in answers] == [503, 200]
    assert len([one for one in heard.of(events.CallSent) if one.endpoint == "asample_stream"]) == 2
