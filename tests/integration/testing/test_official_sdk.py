"""The official SDK, unchanged, spends a working day with the service."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.official_process import said_by
from tests.integration.testing.official_scenario import ABANDONED_LENGTH
from tinsmith.testing import Faults, ReceivedRequest, ScriptedService, running_service
from tinsmith.types.requests import SampleRequest

SCENARIO = Path(__file__).with_name("official_scenario.py")
ALL_FLAGS = {
    "sample_use_retrieve_futures": True,
    "sample_cancel_enabled": True,
    "proto_compress_fwdbwd": True,
    "create_model_via_load_weights": True,
    "sample_join_sampling_session": True,
    # Ours, which it does not know:
    "tinsmith_batch_items": 64,
    "tinsmith_inline_bytes": 65536,
    "tinsmith_stream": True,
}


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "all": ALL_FLAGS,
    "httpx-and-peeks": {
        "inline_bytes": 64,
        "use_pyqwest_transport": False,
        "parallel_fwdbwd_chunks": False,
    },
    "tokens": {"pjwt_auth_enabled": True},
    "bad-weather": {},
}
Day = tuple[ScriptedService, dict[str, Any]]


def make_bad_weather(faults: Faults) -> None:
    """One of each fault that a client is to live with."""
    faults.add(on="create_session", reset=True)
    faults.add(on="create_model", lose_reply=True)
    faults.add(on="forward_backward", nth=1, lose_reply=True)
    faults.add(on="forward_backward", nth=5, status=503, after_work=True)
    faults.add(on="optim_step", half_reply=True)
    faults.add(on="save_weights", empty_400=True)
    faults.add(on="asample", status=429)
    faults.add(on="retrieve_future", times=3, status=500)
    faults.add(on="list_training_runs", status=409)
    faults.expire_results(on="asample", nth=2)
    faults.pause(on="optim_step", queue_state="paused_rate_limit", polls=2, poll_after_s=0.0)
    faults.reorder_completions(on="forward_backward", count=2)


@pytest.fixture(scope="module")
def days() -> Iterator[dict[str, Day]]:
    """A day for each case, all in one program: starting it takes longer than the days do."""
    with contextlib.ExitStack() as stack:
        services = {
            name: stack.enter_context(
                running_service(**{"long_poll_s": 5.0, "fwdbwd_max_chunk_len": 2, **options})
            )
            for name, options in CASES.items()
        }
        make_bad_weather(services["bad-weather"].faults)
        for service in services.values():
            service.faults.hold_commands(on="asample", when=is_abandoned)
        urls = [service.base_url for service in services.values()]
        said = said_by(str(SCENARIO), "tml-test", *urls)
        seen = [json.loads(line) for line in said.splitlines()]
        yield dict(zip(services, zip(services.values(), seen, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_official_sdk_trains_saves_samples_and_manages(days: dict[str, Day], case: str) -> None:
    service, seen = days[case]

    check_results(seen)
    check_requests(service, CASES[case])
    if case != "bad-weather":
        check_nothing_was_refused(service)


def test_the_official_sdk_ignores_offered_extensions(days: dict[str, Day]) -> None:
    service, _ = days["all"]

    assert not any(received.path.startswith("/api/v1/tinsmith/") for received in service.requests())


def check_results(seen: dict[str, Any]) -> None:
    assert seen["losses"] == sorted(seen["losses"], reverse=True)
    assert seen["custom"] > 0
    sampled = seen["sample"]
    assert sampled["tokens"] == sampled["clone_tokens"]
    assert [len(tokens) for tokens in sampled["tokens"]] == [6, 6]
    assert sampled["reasons"] == ["length", "length"]
    assert sampled["prompt_logprobs"][0] is None
    assert sampled["computed"] == sampled["prompt_logprobs"]
    assert sampled["topk"] == [None, 3, 3]
    assert len(seen["named"]) == 2
    assert seen["resumed"] == seen["original"]
    model, *described = seen["info"]
    assert described == ["Qwen/Qwen3-8B", 8]
    assert seen["models"] == ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B"]
    managed = seen["rest"]
    assert managed["published"] == [f"tinker://{model}/weights/c1"]
    assert managed["left"] == [f"tinker://{model}/sampler_weights/s1"]
    assert (managed["rank"], managed["run"]) == (8, "Qwen/Qwen3-8B")
    assert managed["runs"] == [model.replace(":train:0", ":train:1"), model]
    assert managed["sessions"] == [model.partition(":train:")[0]]


def is_abandoned(received: ReceivedRequest) -> bool:
    request: SampleRequest = received.request
    return request.sampling_params.max_tokens == ABANDONED_LENGTH


def check_nothing_was_refused(service: ScriptedService) -> None:
    refused = [one for one in service.requests() if one.status is None or one.status >= 400]
    refused = [one for one in refused if not one.client_left]
    # A clone of the sampler beats on when the session has been finished.
    assert {(one.endpoint, one.status) for one in refused} <= {("session_heartbeat", 410)}


def check_requests(service: ScriptedService, options: dict[str, Any]) -> None:
    batches = service.requests("forward_backward")
    is_parallel = options.get("parallel_fwdbwd_chunks", True)
    assert batches[0].request.seq_id == (2 if is_parallel else 1)  # the first chunk goes last
    is_packed = [one.headers.get("content-encoding") == "zstd" for one in batches]
    assert is_packed == [options.get("proto_compress_fwdbwd", False)] * len(batches)
    makes_by_load = options.get("create_model_via_load_weights", False)
    made = {one.request.model_seq_id for one in service.requests("create_model")}
    assert made == ({0} if makes_by_load else {0, 1})
    has_poller = options.get("sample_use_retrieve_futures", False)
    assert bool(service.requests("retrieve_futures")) == has_poller
    cancels = options.get("sample_cancel_enabled", False)
    assert len(service.requests("cancel_future")) == (1 if cancels else 0)
    joins = options.get("sample_join_sampling_session", False)
    assert len(service.requests("join_sampling_session")) == (1 if joins else 0)
    if options.get("pjwt_auth_enabled"):
        assert {one.headers["x-api-key"][:3] for one in batches} == {"eyJ"}
    (finished,) = service.requests("finish_session")
    assert (finished.request.reason.type, finished.request.detail) == ("success", "done")
