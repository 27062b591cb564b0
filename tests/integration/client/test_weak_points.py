"""Weak points of the official SDK that we do not have, by their number in client-surface.md.

Those with a test of their own elsewhere are not here; `grep -rn test_w tests` finds them all.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

from tinsmith.client import retry
from tinsmith.client.rest import RestClient
from tinsmith.client.retry import RetryBudget
from tinsmith.client.samples.result_feed import MOST_UNCLAIMED, ResultFeed
from tinsmith.client.samples.sampler import MOST_CANCELS, Sampler
from tinsmith.client.service import ServiceClient
from tinsmith.client.settings import HOSTED_URL, settings_from
from tinsmith.client.training import TrainingClient
from tinsmith.client.upkeep import keep_alive
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    BadRequestError,
    BillingError,
    InternalServerError,
    ValidationError,
)
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import (
    AdamParams,
    ClientDynamicConfigResponse,
    Datum,
    FutureFailed,
    ImageAssetPointerChunk,
    ModelInput,
    SamplingParams,
)

WAIT_S = 60.0
PROMPT, PARAMS = ModelInput.from_ints([1]), SamplingParams(max_tokens=2, seed=1)


def a_client(service: ScriptedService, **options: Any) -> ServiceClient:
    hasty = RetryBudget(total_s=0.5, delay_base_s=0.01)
    return ServiceClient(
        base_url=service.base_url, api_key=service.api_key, **{"retry": hasty, **options}
    )


# Threads, loops, processes


def test_a_client_used_before_a_fork_is_rejected_immediately_in_the_child(
    service: ScriptedService,
) -> None:
    program = f"""
import os, sys
import tinsmith
client = tinsmith.ServiceClient(base_url={service.base_url!r}, api_key={service.api_key!r})
unused = tinsmith.ServiceClient(base_url={service.base_url!r}, api_key={service.api_key!r})
training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
child = os.fork()
if child == 0:
    try:
        training.optim_step(tinsmith.AdamParams()).result(20)
    except RuntimeError as error:
        assert "forked" in str(error), error
        client.close().result(20)
        unused.create_sampling_client(base_model="Qwen/Qwen3-8B").compute_logprobs(
            tinsmith.ModelInput.from_ints([1])
        ).result(20)
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
training.optim_step(tinsmith.AdamParams()).result(20)
"""

    finished = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        timeout=300,
        check=False,
        capture_output=True,
        text=True,
    )

    assert finished.returncode == 0, finished.stderr
    assert len(service.requests("optim_step")) == 1
    finished_sessions = [one.request.session_id for one in service.requests("finish_session")]
    begun = [one.request.session_id for one in service.requests("create_model")]
    assert len(set(finished_sessions)) == 2
    assert set(begun) <= set(finished_sessions)


def test_saving_for_a_sampler_does_not_block_the_caller_s_loop(
    training: TrainingClient, service: ScriptedService
) -> None:
    held = service.faults.hold_commands("save_weights_for_sampler", times=1)

    async def scenario() -> str:
        saving = asyncio.create_task(
            training.save_weights_and_get_sampling_client_async(timeout=WAIT_S)
        )
        await service.wait_requests_async("save_weights_for_sampler", 1)
        held.release()  # reached while it is being awaited, or never
        return (await saving)._sampling_session_id

    assert asyncio.run(scenario())


def test_a_callback_may_wait_for_another_result(training: TrainingClient) -> None:
    seen: list[Any] = []
    done = threading.Event()

    def wait_for_another(_: object) -> None:
        seen.append(training.optim_step(AdamParams()).result(WAIT_S))
        done.set()

    training.optim_step(AdamParams()).add_done_callback(wait_for_another)

    assert done.wait(WAIT_S)
    assert seen[0].metrics is not None


def test_a_blocking_call_within_a_coroutine_works_without_a_warning(
    training: TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> str:
        return training.get_info(timeout=WAIT_S).model_id

    with caplog.at_level(logging.INFO, logger="tinsmith"):
        assert asyncio.run(scenario()) == training.model_id

    assert caplog.records == []


def test_unclaimed_results_and_cancellations_are_bounded(client: ServiceClient) -> None:
    session = client.holder.session
    feed = ResultFeed(session, "s", 0, retrier=session.retrier, fetch=print, fail=print)
    sampler = Sampler(session, "s")

    for number in range(MOST_UNCLAIMED + 10):
        feed._deliver([FutureFailed(request_id=str(number))])
    for number in range(MOST_CANCELS + 10):
        sampler._cancels.append(str(number))

    assert len(feed._unclaimed) == MOST_UNCLAIMED
    assert "0" not in feed._unclaimed  # the oldest are dropped first
    assert str(MOST_UNCLAIMED + 9) in feed._unclaimed
    assert len(sampler._cancels) == MOST_CANCELS


# Hangs


def test_polls_that_always_fail_raise_within_the_retry_budget(
    service: ScriptedService,
) -> None:
    with a_client(service) as client:
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        service.faults.add("retrieve_future", times=None, status=500)

        with pytest.raises(InternalServerError) as caught:
            training.optim_step(AdamParams()).result(WAIT_S)

    polls = len(service.requests("retrieve_future"))
    assert polls < 40
    assert any("failed poll(s)" in note for note in caught.value.__notes__)


def test_a_400_to_a_poll_is_retried_three_times(service: ScriptedService) -> None:
    with a_client(service) as client:
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        service.forget_requests()
        service.faults.add("retrieve_future", times=None, status=400)

        with pytest.raises(BadRequestError):
            training.optim_step(AdamParams()).result(WAIT_S)

    assert len(service.requests("retrieve_future")) == 4


def test_only_consecutive_400s_are_counted() -> None:
    with running_service(long_poll_s=0.05) as service, a_client(service) as client:
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        service.forget_requests()
        held = service.faults.hold_commands("optim_step")
        for nth in (2, 4, 6, 8, 10):
            service.faults.add("retrieve_future", nth=nth, status=400)

        stepping = training.optim_step(AdamParams())
        service.wait_requests("retrieve_future", 12)
        held.release()

        stepping.result(WAIT_S)


def test_a_402_pauses_no_longer_than_the_service_says() -> None:
    with (
        running_service(billing_exception_max_pause_duration_sec=0) as service,
        a_client(service) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        service.faults.add("optim_step", times=None, status=402)

        with pytest.raises(BillingError):
            training.optim_step(AdamParams()).result(WAIT_S)

        assert len(service.requests("optim_step")) == 1


@pytest.mark.parametrize(
    ("endpoint", "flags"),
    [
        ("client_config", {}),
        ("asample", {}),
        ("asample", {"tinsmith_batch_items": 32, "tinsmith_inline_bytes": 65536}),
        ("retrieve_future", {}),
        ("retrieve_futures", {"sample_use_retrieve_futures": True}),
        ("retrieve_results", {"tinsmith_inline_bytes": 65536}),
    ],
)
def test_a_402_also_pauses_startup_and_samples(
    endpoint: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "BILLING_PAUSE_S", 0.05)
    with running_service(long_poll_s=0.5, **flags) as service, a_client(service) as client:
        refusal = service.faults.add(endpoint, times=2, status=402)
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")

        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]

        assert all(len(future.result(WAIT_S).sequences) == 1 for future in futures)
        assert refusal.struck == 2


# Errors


def test_an_adapter_that_trains_no_layers_raises_a_validation_error(
    client: ServiceClient,
) -> None:
    with pytest.raises(ValidationError, match="all False"):
        client.create_lora_training_client(
            "Qwen/Qwen3-8B", train_mlp=False, train_attn=False, train_unembed=False
        ).result()


@pytest.mark.parametrize("kind", ["service", "training", "rest"])
def test_pickling_an_unpicklable_client_raises(
    client: ServiceClient, training: TrainingClient, kind: str
) -> None:
    rest = RestClient(client.holder)
    unpicklable = {"service": client, "training": training, "rest": rest}[kind]

    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(unpicklable)


def test_json_replies_without_sequence_ids_are_accepted(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    service.faults.add("asample", status=200, body={"request_id": "r-1"})
    plain = {"stop_reason": "length", "tokens": [5, 6], "logprobs": [-0.5, -1.0]}
    service.faults.add("retrieve_future", status=200, body={"type": "sample", "sequences": [plain]})

    answer = sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    assert list(answer.sequences[0].tokens) == [5, 6]
    assert answer.sequences[0].logprobs == [-0.5, -1.0]


# Behaviours that are kept


def test_session_messages_from_the_service_are_logged(
    service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"info_message": "welcome", "warning_message": "soon", "error_message": "now"}
    service.faults.add("create_session", status=200, body={"session_id": "session-9", **said})

    with caplog.at_level(logging.INFO, logger="tinsmith"):
        a_client(service).holder.get_session_id()

    levels = {record.levelname: record.getMessage() for record in caplog.records}
    assert levels["INFO"].endswith("welcome")
    assert levels["WARNING"].endswith("soon")
    assert levels["ERROR"].endswith("now")


@pytest.mark.parametrize(("level", "shown"), [("error", "ERROR"), ("notice", "WARNING")])
def test_a_deprecation_notice_from_the_service_is_logged(
    training: TrainingClient,
    service: ScriptedService,
    caplog: pytest.LogCaptureFixture,
    level: str,
    shown: str,
) -> None:
    headers = {"x-deprecation-note": "use another", "x-deprecation-level": level}
    service.faults.add("get_info", headers=headers, delay_s=0.01)

    with caplog.at_level(logging.WARNING, logger="tinsmith"):
        training.get_info()

    said = [one for one in caplog.records if one.getMessage().startswith("the service says")]
    assert [(one.levelname, one.getMessage()) for one in said] == [
        (shown, "the service says: use another")
    ]


def test_a_service_without_dynamic_flags_gets_the_defaults(
    service: ScriptedService,
) -> None:
    service.faults.add("client_dynamic_config", times=None, status=404)

    with a_client(service) as client:
        holder = client.holder
        assert holder.get_session_id()
        assert holder.get_client_dynamic_config() == ClientDynamicConfigResponse()


def test_training_on_an_image_asset_pointer_raises_at_the_call(
    training: TrainingClient, service: ScriptedService
) -> None:
    pointer = ImageAssetPointerChunk(format="png", location="x://y", expected_tokens=2)
    inputs = {"target_tokens": [1, 2], "weights": [1.0, 1.0]}
    datum = Datum(ModelInput(chunks=[pointer]), inputs)

    with pytest.raises(ValueError, match="ImageAssetPointerChunk"):
        _ = training.forward_backward([datum], "cross_entropy")

    training.optim_step(AdamParams()).result(WAIT_S)
    assert [one.request.seq_id for one in service.requests("optim_step")] == [1]


@pytest.mark.parametrize("body", [{}, {"model_id": 7}, []])
def test_a_reply_of_the_wrong_shape_raises_a_response_validation_error(
    training: TrainingClient, service: ScriptedService, body: Any
) -> None:
    service.faults.add("get_info", status=200, body=body)

    with pytest.raises(APIResponseValidationError, match="get_info"):
        training.get_info(timeout=WAIT_S)


def test_a_save_without_a_name_keeps_its_number_across_retries(
    service: ScriptedService,
) -> None:
    with a_client(service) as client:
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        service.faults.add("save_weights_for_sampler", times=2, status=503)

        training.save_weights_and_get_sampling_client().result()

    sent = [one.request for one in service.requests("save_weights_for_sampler")]
    assert [(one.seq_id, one.sampling_session_seq_id) for one in sent] == [(1, 0)] * 3


def test_heartbeats_end_with_the_session_and_failures_are_logged_after_2_minutes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    failures = [APIConnectionError("no way")] * 14 + [APIStatusError("gone", status_code=410)]

    async def call(*_: object) -> None:
        raise failures.pop(0)

    async def sleep(delay_s: float) -> None:
        now[0] += delay_s

    with caplog.at_level(logging.WARNING, logger="tinsmith"):
        asyncio.run(keep_alive(call, "session-1", clock=lambda: now[0], sleep=sleep))

    assert failures == []
    assert now[0] == 150.0
    assert len(caplog.records) == 2  # at 130 and at 140 seconds


def test_an_empty_base_url_is_ignored_and_a_trailing_slash_is_stripped() -> None:
    assert settings_from(environment={"TINKER_BASE_URL": ""}).base_url == HOSTED_URL
    assert settings_from(base_url="http://h:1/a/", environment={}).base_url == "http://h:1/a"
    assert settings_from(environment={"TINKER_BASE_URL": "http://h:2"}).base_url == "http://h:2"
