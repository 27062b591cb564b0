"""No wait is silent: whatever a user waits for, the log says what, since when and why."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tinsmith.client import waits
from tinsmith.client.background import background
from tinsmith.client.service import ServiceClient
from tinsmith.client.tokenization import lookup as tokenizers
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams

PROMPT = ModelInput.from_ints([1])
PARAMS = SamplingParams(max_tokens=1)
DATUM = Datum(PROMPT, {"target_tokens": [1], "weights": [1.0]})
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Ten seconds pass in a fraction of one."""
    monkeypatch.setattr(waits, "LOOK_EVERY_S", 0.05)
    soon = msgspec.structs.replace(waits.FUTURES, after_s=0.2, every_s=0.2)
    monkeypatch.setattr(background().waits, "_telling", soon)
    caplog.set_level(logging.INFO, logger="tinsmith.client.waits")


def in_the_background(work: Callable[[], object]) -> None:
    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the end of the test ends it
            logging.getLogger(__name__).debug("%r", error)

    threading.Thread(target=run, daemon=True).start()


def a_result(service: ScriptedService, client: ServiceClient) -> object:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
    service.faults.hold_commands("optim_step")
    return training.optim_step(AdamParams())


def a_paused_queue(service: ScriptedService, client: ServiceClient) -> object:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
    service.faults.pause("optim_step", reason="out of GPUs", poll_after_s=0.1)
    return training.optim_step(AdamParams())


def a_hung_step(service: ScriptedService, client: ServiceClient) -> object:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
    service.faults.hold("optim_step")
    return training.optim_step(AdamParams())


def a_hung_sample(service: ScriptedService, client: ServiceClient) -> object:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    service.faults.hold("asample")
    return sampler.sample(PROMPT, 1, PARAMS)


def calls_before_it(service: ScriptedService, client: ServiceClient) -> object:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
    service.faults.hold("optim_step")
    return [training.optim_step(AdamParams()), training.forward([DATUM], "cross_entropy")]


def a_second_try(service: ScriptedService, client: ServiceClient) -> object:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
    service.faults.add("optim_step", times=None, status=503, headers={"retry-after": "20"})
    return training.optim_step(AdamParams())


def a_limiter(_: ScriptedService, client: ServiceClient) -> object:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    sampler.limiter.rate_limited(20.0, "429 of the test")
    return sampler.sample(PROMPT, 1, PARAMS)


def samples(service: ScriptedService, client: ServiceClient) -> object:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    service.faults.hold_commands("asample")
    return [sampler.sample(PROMPT, 1, PARAMS) for _ in range(7)]


def a_paused_sample(service: ScriptedService, client: ServiceClient) -> object:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    service.faults.pause("asample", reason="out of GPUs", poll_after_s=0.1)
    return sampler.sample(PROMPT, 1, PARAMS)


def a_paused_stream(service: ScriptedService, client: ServiceClient) -> object:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    service.faults.pause("asample", reason="out of GPUs", poll_after_s=0.1)
    in_the_background(lambda: list(sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S)))
    return None


def many_samples(service: ScriptedService, client: ServiceClient) -> object:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    service.faults.hold_commands("asample")
    in_the_background(lambda: list(sampler.sample_many([PROMPT] * 3, PARAMS)))
    return None


def a_session(service: ScriptedService, client: ServiceClient) -> object:
    service.faults.hold("create_session")
    in_the_background(lambda: client.create_sampling_client(base_model="Qwen/Qwen3-8B"))
    return None


def a_loss(_: ScriptedService, client: ServiceClient) -> object:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)

    class Slow:
        def gradients(self, data: list[Datum], _: list[Any]) -> Any:
            time.sleep(1.0)
            return 0.0, [[0.0] for _ in data], {}

    return training.forward_backward_custom([DATUM], Slow())


def a_tokenizer(_: ScriptedService, client: ServiceClient) -> object:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    in_the_background(sampler.get_tokenizer)
    return None


@pytest.mark.parametrize(
    ("begin", "what", "why"),
    [
        (a_result, "optim_step of", "still running after"),
        (a_paused_queue, "optim_step of", "paused_capacity: out of GPUs"),
        (calls_before_it, "forward of", "queued behind 1 call"),
        (a_second_try, "optim_step of", "retrying optim_step after"),
        (a_limiter, "sample of", "429 of the test"),
        (samples, "sample of", "the oldest of 7"),
        (many_samples, "sample", "the oldest of 3"),
        (a_session, "create_sampling_client", ""),
        (a_loss, "forward_backward_custom of", "running the loss function in this process"),
        (a_tokenizer, "get_tokenizer", "loading the tokenizer of Qwen"),
    ],
)
def test_a_long_wait_is_logged_with_its_name_duration_and_reason(
    begin: Callable[[ScriptedService, ServiceClient], object],
    what: str,
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizers, "load_tokenizer", lambda *_, **__: time.sleep(1.0))
    with (
        running_service(long_poll_s=20.0) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        pending = begin(service, client)

        deadline = time.monotonic() + WAIT_S
        while not any(what in m and why in m and " after " in m for m in caplog.messages):
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.02)

        service.faults.clear()
        del pending


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (a_hung_step, "no answer to optim_step yet"),
        (a_hung_sample, "not accepted yet"),
        (a_session, "no answer to create_session yet"),
    ],
)
def test_an_unanswered_request_is_logged_once_with_the_call_that_waits(
    begin: Callable[[ScriptedService, ServiceClient], object],
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One wait is one line: not one for the call and another for its request."""
    soon = msgspec.structs.replace(waits.ANSWERS, after_s=0.2)
    with (
        running_service(long_poll_s=20.0) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        monkeypatch.setattr(client._lease.session.retrier._unanswered, "_telling", soon)
        pending = begin(service, client)

        deadline = time.monotonic() + WAIT_S
        while sum(why in m for m in caplog.messages) < 2:
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.02)

        assert not [m for m in caplog.messages if waits.ANSWERS.text in m]
        service.faults.clear()
        del pending


@pytest.mark.parametrize(
    ("begin", "flags"),
    [
        (a_paused_sample, {}),
        (a_paused_sample, {"tinsmith_inline_bytes": 65536}),
        (a_paused_stream, {"tinsmith_stream": True}),
    ],
    ids=["poll", "feed", "stream"],
)
def test_a_wait_for_samples_is_logged_with_the_queue_state_and_its_reason(
    begin: Callable[[ScriptedService, ServiceClient], object],
    flags: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        running_service(long_poll_s=20.0, **flags) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        pending = begin(service, client)

        deadline = time.monotonic() + WAIT_S
        while not any("paused_capacity: out of GPUs" in m for m in caplog.messages):
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.02)

        service.faults.clear()
        del pending


def test_quick_calls_are_not_logged(
    client: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    client.get_server_capabilities()

    assert caplog.messages == []
