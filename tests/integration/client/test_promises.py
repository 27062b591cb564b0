"""Parts of requirements that no other test holds us to."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tinsmith.client import upkeep
from tinsmith.client.admin import AdminClient
from tinsmith.client.background import Background
from tinsmith.client.futures import APIFuture
from tinsmith.client.rest import RestClient
from tinsmith.client.retry import RetryBudget
from tinsmith.client.samples import sender
from tinsmith.client.samples.sampler import NUMBERS_PER_CLONE
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import APIConnectionError, ClosedError, InternalServerError, TinkerError
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams

WAIT_S = 60.0
PROMPT = ModelInput.from_ints([1])
PARAMS = SamplingParams(max_tokens=1)
DATUM = Datum(PROMPT, {"target_tokens": [1], "weights": [1.0]})


def test_s2_every_kind_of_client_rejects_calls_once_it_is_closed(service: ScriptedService) -> None:
    client = ServiceClient(base_url=service.base_url, api_key=service.api_key)
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    sampler.limiter.rate_limited(60.0)  # not even a pause is waited for
    client.close().result(WAIT_S)
    service.forget_requests()

    for call in (
        lambda: training.forward([DATUM], "cross_entropy").result(WAIT_S),
        lambda: training.optim_step(AdamParams()).result(WAIT_S),
        lambda: training.save_state("a").result(WAIT_S),
        training.get_info,
        lambda: sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S),
        lambda: sampler.compute_logprobs(PROMPT).result(WAIT_S),
        lambda: list(sampler.sample_stream(PROMPT, 1, PARAMS)),
        sampler.get_base_model,
        client.get_server_capabilities,
        lambda: client.create_lora_training_client("Qwen/Qwen3-8B", rank=2),
    ):
        with pytest.raises(ClosedError):
            call()

    assert service.requests() == []


def test_s9_a_limiter_with_client_scope_is_not_shared(service: ScriptedService) -> None:
    clients = [
        ServiceClient(base_url=service.base_url, api_key=service.api_key, limiter_scope=scope)
        for scope in ("client", "client", "key", "key")
    ]
    alone, other, shared, also_shared = (
        client.create_sampling_client(base_model="Qwen/Qwen3-8B") for client in clients
    )

    assert shared.limiter is also_shared.limiter
    assert len({id(sampler.limiter) for sampler in (alone, other, shared)}) == 3
    alone.limiter.rate_limited(60.0)
    assert other.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences
    assert shared.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences
    for client in clients:
        client.close().result(WAIT_S)


def test_s39_clients_of_two_sockets_share_no_limiter() -> None:
    one, again, other = (
        ServiceClient(base_url="http://local", api_key="tml-a", unix_socket=socket)
        for socket in ("/run/one", "/run/one", "/run/other")
    )

    assert one.holder.session.limiter is again.holder.session.limiter
    assert one.holder.session.limiter is not other.holder.session.limiter


def test_s7_samples_that_wait_retry_or_poll_hold_no_slot_and_no_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is one slot, and room for one prompt: each sample leaves when the last has arrived."""
    monkeypatch.setattr(sender, "MOST_REQUESTS", 1)
    with (
        running_service(long_poll_s=5.0, sample_dispatch_bytes_semaphore_size=1) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        held = service.faults.hold_commands("asample", times=20)
        service.faults.add("asample", status=429, headers={"retry-after-ms": "100"})
        service.faults.add("asample", status=503, headers={"retry-after-ms": "3000"})

        waiting = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(20)]

        # The one that was told to come again in three seconds holds nobody up: it comes last.
        sent = service.wait_requests("asample", 22, WAIT_S)
        assert len(sent) == 22
        assert sent[-1].request.seq_id == sent[1].request.seq_id
        assert not any(sample.done() for sample in waiting)
        held.release()
        for sample in waiting:
            sample.result(WAIT_S)


def test_s14_each_thread_s_calls_keep_their_order_and_each_call_s_chunks_stay_together() -> None:
    with (
        running_service(long_poll_s=0.5, fwdbwd_max_chunk_len=1) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)

        def work(thread: int) -> None:
            pending = []
            for call in range(10):
                mark = 1000 * (thread + 1) + 10 * call
                data = [
                    Datum(
                        ModelInput.from_ints([mark + chunk]),
                        {"target_tokens": [1], "weights": [1.0]},
                    )
                    for chunk in range(3)
                ]
                pending.append(training.forward_backward(data, "cross_entropy"))
            for future in pending:
                future.result(60)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        by_number = sorted(
            (received.request.seq_id, _first_token(received))
            for received in service.requests("forward_backward")
        )
        marks = [mark for _, mark in by_number]
        blocks = [marks[start : start + 3] for start in range(0, len(marks), 3)]
        assert len(blocks) == 80
        assert all(block == [block[0], block[0] + 1, block[0] + 2] for block in blocks)
        firsts = [block[0] for block in blocks]
        for thread_number in range(1, 9):
            own = [mark for mark in firsts if mark // 1000 == thread_number]
            assert own == sorted(own)


def _first_token(received: Any) -> int:
    chunk = received.request.forward_backward_input.data[0].model_input.chunks[0]
    return int(next(iter(chunk.tokens)))


def test_s19_poll_numbers_continue_across_failures_and_size_replies() -> None:
    with (
        running_service(long_poll_s=0.2, inline_bytes=100) as service,
        ServiceClient(
            base_url=service.base_url,
            api_key=service.api_key,
            retry=RetryBudget(delay_base_s=0.01),
        ) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
        datum = Datum(
            ModelInput.from_ints([1] * 500), {"target_tokens": [1] * 500, "weights": [1.0] * 500}
        )
        service.faults.delay_commands("forward_backward", delay_s=0.5)
        service.faults.add("retrieve_future", times=1, status=503)
        service.faults.add("retrieve_future", times=1, lose_reply=True)
        service.forget_requests()

        training.forward([datum], "cross_entropy").result(WAIT_S)

        polls = service.requests("retrieve_future")
        numbers = [int(poll.headers["x-tinker-request-iteration"]) for poll in polls]
        sizes = [poll.request.allow_metadata_only for poll in polls if poll.request is not None]
        # A poll that a lost connection repeats under its own number is still one poll.
        assert sorted(set(numbers)) == list(range(max(numbers) + 1))
        assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(numbers))
        assert sizes[-1] is False and sizes[0] is True
        assert {poll.headers["x-tinker-request-type"] for poll in polls} == {"Forward"}


def test_s39_a_hanging_tenant_does_not_delay_heartbeats_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upkeep, "HEARTBEAT_INTERVAL_S", 0.05)
    with (
        running_service(api_key="tml-a") as hung,
        running_service(api_key="tml-b") as well,
        ServiceClient(base_url=hung.base_url, api_key="tml-a") as first,
        ServiceClient(base_url=well.base_url, api_key="tml-b") as second,
    ):
        sampler = first.create_sampling_client(base_model="Qwen/Qwen3-8B")
        second.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
        held = hung.faults.hold(None)
        pending = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(400)]
        held.wait_held(100)
        well.forget_requests()

        beats = well.wait_requests("session_heartbeat", 20, WAIT_S)

        assert {beat.headers["x-api-key"] for beat in beats} == {"tml-b"}
        held.release()
        for sample in pending:
            sample.cancel()


def test_s40_no_secret_and_no_prompt_is_logged(
    service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    secret, token = "tml-very-secret", 198_765
    caplog.set_level(logging.DEBUG)
    service.faults.add("asample", times=2, status=500)
    service.faults.add("asample", times=1, reset=True)
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        sampler.sample(ModelInput.from_ints([token]), 1, PARAMS).result(WAIT_S)
    wrong = ServiceClient(base_url=service.base_url, api_key=secret)
    with pytest.raises(TinkerError):
        wrong.get_server_capabilities()

    ours = [r.getMessage() for r in caplog.records if r.name.startswith("tinsmith.client")]
    assert ours, "nothing was logged, and so nothing was looked at"
    for message in ours:
        assert secret not in message
        assert service.api_key not in message
        assert str(token) not in message


def test_the_error_after_the_last_retry_names_the_retry_budget(service: ScriptedService) -> None:
    budget = RetryBudget(total_s=0.3, delay_base_s=0.01)
    with ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=budget) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.add("get_sampler", times=None, status=500)

        with pytest.raises(InternalServerError) as caught:
            sampler.get_base_model()

    assert "attempt(s)" in caught.value.__notes__[-1]
    assert "RetryBudget allows total_s=0.3" in caught.value.__notes__[-1]


NOBODY = "http://127.0.0.1:9"
"""The port for discarding, where nothing listens."""


@pytest.mark.parametrize(
    "ask",
    [
        lambda: ServiceClient(base_url=NOBODY, api_key="tml-k").create_lora_training_client(
            "Qwen/Qwen3-8B"
        ),
        lambda: ServiceClient(base_url=NOBODY, api_key="tml-k").create_sampling_client(
            base_model="Qwen/Qwen3-8B"
        ),
        lambda: RestClient(base_url=NOBODY, api_key="tml-k").list_training_runs().result(),
        lambda: AdminClient(base_url=NOBODY, api_key="tml-k").get_audit_log().result(),
    ],
    ids=["training", "sampling", "rest", "admin"],
)
def test_a_closed_port_fails_within_seconds_for_every_client(ask: Callable[[], object]) -> None:
    with pytest.raises(APIConnectionError, match="check the base URL") as caught:
        ask()

    assert caught.value.__notes__[-1].endswith("the RetryBudget allows first_contact_s=5")


def test_large_results_are_fetched_within_the_response_byte_budget() -> None:
    """All are announced by their size; those that do not fit are fetched one at a time."""
    with (
        running_service(
            long_poll_s=5.0, inline_bytes=100, inflight_response_bytes_semaphore_size=1
        ) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
        targets = {"target_tokens": [1] * 500, "weights": [1.0] * 500}
        datum = Datum(ModelInput.from_ints([1] * 500), targets)
        held = service.faults.hold(
            "retrieve_future", when=lambda poll: not poll.request.allow_metadata_only
        )

        results: list[APIFuture[Any]] = [
            training.forward([datum], "cross_entropy") for _ in range(5)
        ]
        for count in range(5):
            held.wait_held(1)
            assert sum(result.done() for result in results) == count
            held.release(1)
            _wait_until_done(results, count + 1)

        assert held.most_held == 1


def _wait_until_done(results: list[APIFuture[Any]], count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while sum(result.done() for result in results) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_there_is_no_thread_before_the_first_call_and_one_loop_after_it(
    service: ScriptedService,
) -> None:
    program = f"""
import threading
import tinsmith
client = tinsmith.ServiceClient(base_url={service.base_url!r}, api_key={service.api_key!r})
rest = tinsmith.RestClient(base_url={service.base_url!r}, api_key={service.api_key!r})
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
client.get_server_capabilities()
rest.list_training_runs().result()
client.create_sampling_client(base_model="Qwen/Qwen3-8B")
names = sorted(thread.name for thread in threading.enumerate())
assert names == ["MainThread", "tinsmith-loop"], names
from tinsmith.client import held_gil
assert isinstance(client.holder.get_loop(), held_gil.HeldLoop) == held_gil.IS_AVAILABLE
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        timeout=300,
        check=False,
        capture_output=True,
        text=True,
    )

    assert result.returncode == 0, result.stderr


def test_a_burst_of_calls_wakes_the_loop_once() -> None:
    loop = Background()
    wakes: list[None] = []
    blocked, over = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        over.wait(WAIT_S)

    async def work() -> None:
        return None

    loop.call_soon(block)
    blocked.wait(WAIT_S)
    drain = loop._drain

    def counted() -> None:
        wakes.append(None)
        drain()

    loop._drain = counted  # type: ignore[method-assign]
    futures = [loop.start(work()) for _ in range(1000)]
    over.set()
    for future in futures:
        future.result(WAIT_S)
    loop.stop()

    assert len(wakes) == 1


@pytest.mark.parametrize("is_counted", [True, False], ids=["by the service", "by chance"])
def test_no_two_clones_of_a_sampler_use_the_same_seq_ids(is_counted: bool) -> None:
    with (
        running_service(sample_join_sampling_session=is_counted) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        handle = sampler.get_sampler_handle()
        clones = [
            SamplingClient.from_sampler_handle(handle, api_key=service.api_key) for _ in range(3)
        ]
        for drawing in (sampler, *clones):
            for _ in range(2):
                drawing.sample(PROMPT, 1, PARAMS).result(WAIT_S)

        numbers = [received.request.seq_id for received in service.requests("asample")]
        by_clone = {number // NUMBERS_PER_CLONE for number in numbers}
        assert len(set(numbers)) == 8
        assert len(by_clone) == 4 and 0 in by_clone
        assert bool(service.requests("join_sampling_session")) == is_counted
