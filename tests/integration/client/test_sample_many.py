"""Samples of many prompts: a bounded window, in order, and nothing left under way."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import APITimeoutError, BadRequestError, ValidationError
from tinsmith.testing import ReceivedRequest, ScriptedService, running_service
from tinsmith.types import ModelInput, SampleResponse, SamplingParams

WAIT_S = 60.0
PARAMS = SamplingParams(max_tokens=4, seed=1)
PLAIN: dict[str, Any] = {"long_poll_s": 2.0, "sample_cancel_enabled": True}
EXTENDED: dict[str, Any] = {
    **PLAIN,
    "tinsmith_batch_items": 32,
    "tinsmith_inline_bytes": 65536,
}


@pytest.fixture(params=[PLAIN, EXTENDED], ids=["plain", "extended"])
def service(request: pytest.FixtureRequest) -> Iterator[ScriptedService]:
    with running_service(**request.param) as service:
        yield service


@pytest.fixture
def sampler(service: ScriptedService) -> Iterator[SamplingClient]:
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        yield client.create_sampling_client(base_model="Qwen/Qwen3-8B")


def prompt(number: int) -> ModelInput:
    return ModelInput.from_ints([5, 6, number])


def prompts(count: int) -> list[ModelInput]:
    return [prompt(number) for number in range(count)]


def number_of(response: SampleResponse) -> int:
    return int(response.sequences[0].sequence_id.split(":")[-2])


def is_of_prompt(number: int) -> Any:
    def holds(received: ReceivedRequest) -> bool:
        return bool(received.request.prompt == prompt(number))

    return holds


def test_answers_are_in_the_order_of_the_prompts(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.reorder_completions("asample", count=40)

    responses = sampler.sample_many(prompts(100), PARAMS, 2, timeout=WAIT_S)

    assert [number_of(response) for response in responses] == list(range(100))
    assert {len(response.sequences) for response in responses} == {2}


def test_prompts_are_consumed_only_as_fast_as_samples_complete(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold_commands("asample")
    taken: list[int] = []

    def endless() -> Iterator[ModelInput]:
        for number in range(10**9):
            taken.append(number)
            yield prompt(number)

    outcomes = sampler.sample_as_completed(endless(), PARAMS, max_in_flight=7, timeout=WAIT_S)

    async def first_ten() -> list[tuple[int, Any]]:
        return await asyncio.to_thread(lambda: [next(outcomes) for _ in range(10)])

    async def scenario() -> list[tuple[int, Any]]:
        task = asyncio.create_task(first_ten())
        await held.wait_held_async(7)
        assert len(taken) == 7
        held.release()
        return await task

    assert len(asyncio.run(scenario())) == 10
    assert len(taken) <= 17
    outcomes.close()


def test_the_first_error_is_raised_and_the_rest_are_cancelled(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.hold_commands("asample", when=is_of_prompt(1))
    service.faults.add("asample", when=is_of_prompt(3), status=400, body={"detail": "bad prompt"})

    with pytest.raises(BadRequestError, match="bad prompt") as raised:
        sampler.sample_many(prompts(5), PARAMS, timeout=WAIT_S)

    assert any("prompt 3" in note for note in raised.value.__notes__)
    assert len(service.wait_requests("cancel_future", 1)) >= 1


def test_errors_can_be_returned_in_place_of_results(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample", when=is_of_prompt(3), status=400, body={"detail": "bad prompt"})

    outcomes = sampler.sample_many(prompts(6), PARAMS, on_error="return", timeout=WAIT_S)

    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [SampleResponse] * 3 + [BadRequestError] + [SampleResponse] * 2


def test_a_timeout_cancels_samples_in_flight(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.hold_commands("asample")

    with pytest.raises(APITimeoutError, match=r"within 2 s"):
        sampler.sample_many(prompts(3), PARAMS, timeout=2.0)

    assert len(service.wait_requests("cancel_future", 3)) == 3


@pytest.mark.parametrize("timeout", [float("nan"), "soon"])
def test_an_invalid_timeout_is_rejected_and_nothing_is_sent(
    sampler: SamplingClient, service: ScriptedService, timeout: Any
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: sampler.sample(prompt(0), 1, PARAMS, timeout=timeout),
        lambda: sampler.sample_many(prompts(3), PARAMS, timeout=timeout),
        lambda: sampler.sample_stream(prompt(0), 1, PARAMS, timeout=timeout),
        lambda: sampler.compute_logprobs(prompt(0), timeout=timeout),
    ]

    for call in calls:
        with pytest.raises(ValidationError, match=r"timeout is .*; pass seconds, or None"):
            call()

    sampler.sample(prompt(1), 1, PARAMS).result(WAIT_S)
    assert len(service.requests("asample")) == 1


def test_an_infinite_timeout_means_no_timeout(sampler: SamplingClient) -> None:
    endless = float("inf")

    assert len(sampler.sample_many(prompts(3), PARAMS, timeout=endless)) == 3
    assert len(sampler.sample(prompt(0), 1, PARAMS, timeout=endless).result(WAIT_S).sequences) == 1


def test_leaving_the_loop_cancels_samples_in_flight(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.hold_commands("asample", when=lambda r: r.request.prompt != prompt(0))
    with_first = sampler.sample_as_completed(prompts(4), PARAMS, timeout=WAIT_S)

    index, response = next(with_first)
    deadline = time.monotonic() + 60
    while len(held_ids(service)) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    with_first.close()

    assert index == 0
    assert isinstance(response, SampleResponse)
    assert len(service.wait_requests("cancel_future", 3)) == 3


def held_ids(service: ScriptedService) -> list[str]:
    """The samples that have been accepted, whichever way they came."""
    alone = [str(r.request.seq_id) for r in service.requests("asample") if r.status == 200]
    batches = [r for r in service.requests("asample_many") if r.status == 200]
    return alone + [str(fields["seq_id"]) for r in batches for fields in r.request.samples]


def test_the_async_variant_behaves_the_same(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.reorder_completions("asample", count=20)

    async def scenario() -> tuple[list[Any], list[int]]:
        whole = await sampler.sample_many_async(prompts(50), PARAMS, timeout=WAIT_S)
        indexes = [
            index
            async for index, _ in sampler.sample_as_completed_async(
                prompts(50), PARAMS, timeout=WAIT_S
            )
        ]
        return whole, indexes

    whole, indexes = asyncio.run(scenario())

    assert [number_of(response) for response in whole] == list(range(50))
    assert sorted(indexes) == list(range(50))


def test_a_cancelled_coroutine_cancels_its_samples(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold_commands("asample")

    async def scenario() -> None:
        task = asyncio.create_task(sampler.sample_many_async(prompts(5), PARAMS))
        await held.wait_held_async(5)
        await asyncio.to_thread(service.wait_ended, None, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())

    assert len(service.wait_requests("cancel_future", 5)) == 5


def test_progress_is_reported_to_a_callback(sampler: SamplingClient) -> None:
    told: list[tuple[int, int | None]] = []

    sampler.sample_many(prompts(3), PARAMS, progress=lambda *how: told.append(how), timeout=WAIT_S)
    sampler.sample_many(
        iter(prompts(2)), PARAMS, progress=lambda *how: told.append(how), timeout=WAIT_S
    )

    assert told == [(1, 3), (2, 3), (3, 3), (1, None), (2, None)]


def test_no_progress_bar_is_drawn_without_a_terminal(
    sampler: SamplingClient, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler.sample_many(prompts(3), PARAMS, progress=True, timeout=WAIT_S)

    assert capsys.readouterr() == ("", "")


def test_a_bar_is_shown_in_a_notebook(
    sampler: SamplingClient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the codes of terminals, which a cell would print."""
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))

    sampler.sample_many(prompts(3), PARAMS, progress=True, timeout=WAIT_S)

    shown = capsys.readouterr().err
    assert "3 of 3" in shown
    assert "\x1b" not in shown


def test_no_prompts_give_no_answers(sampler: SamplingClient, service: ScriptedService) -> None:
    assert sampler.sample_many([], PARAMS) == []
    assert held_ids(service) == []


def test_invalid_options_are_rejected_before_a_prompt_is_consumed(sampler: SamplingClient) -> None:
    untouched = iter(prompts(1))

    with pytest.raises(ValidationError):
        sampler.sample_many(untouched, PARAMS, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        sampler.sample_many(untouched, PARAMS, max_in_flight=0)
    with pytest.raises(ValidationError):
        sampler.sample_many(untouched, PARAMS, prompt_alt_tokens_k=-1)

    assert len(list(untouched)) == 1


INTERRUPTED = """
import sys, tinsmith
client = tinsmith.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
prompts = (tinsmith.ModelInput.from_ints([1, 2, n]) for n in range(10**6))
try:
    sampler.sample_many(
        prompts, tinsmith.SamplingParams(max_tokens=2), max_in_flight=5, progress=True
    )
except KeyboardInterrupt:
    print("interrupted")
    input()  # the session would end here, and the samples with it
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a terminal and signals")
def test_ctrl_c_cancels_samples_in_flight(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED, encoding="utf-8")
    with running_service(**EXTENDED) as service:
        terminal, stderr = pty.openpty()
        held = service.faults.hold_commands("asample", when=lambda r: r.request.seq_id >= 5)
        program = subprocess.Popen(
            [sys.executable, str(script), service.base_url, service.api_key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        held.wait_held(5, timeout_s=30)
        service.wait_requests("retrieve_results", 1)
        program.send_signal(signal.SIGINT)
        cancelled = service.wait_requests("cancel_future", 5)
        out, _ = program.communicate("\n", timeout=30)
        os.close(stderr)

        shown = os.read(terminal, 10_000).decode()
        os.close(terminal)
        assert out.strip() == "interrupted"
        assert len(cancelled) == 5
    assert "samples  5" in shown  # the bar, without a total


@pytest.mark.usefixtures("eager_switching")
def test_s44_thousands_of_prompts_from_several_threads_all_complete(
    sampler: SamplingClient,
) -> None:
    async def scenario() -> list[list[Any]]:
        work = [
            asyncio.to_thread(sampler.sample_many, prompts(300), PARAMS, max_in_flight=64)
            for _ in range(4)
        ]
        return await asyncio.gather(*work)

    results = asyncio.run(scenario())

    numbers = [number_of(response) for responses in results for response in responses]
    assert sorted(numbers) == list(range(1200))


@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_a_prompt_of_none_raises(sampler: SamplingClient, on_error: Any) -> None:
    asked: Any = [prompt(0), None, prompt(2)]

    with pytest.raises(ValidationError, match="prompt"):
        sampler.sample_many(asked, PARAMS, on_error=on_error, timeout=WAIT_S)
