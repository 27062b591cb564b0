"""The end of a client, and of the process that holds it: nothing pending, nothing left, no harm."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import pathlib
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tinsmith.client import lease as sessions
from tinsmith.client import session as session_module
from tinsmith.client.background import background
from tinsmith.client.limits import _shared as shared_limiters
from tinsmith.client.service import ServiceClient
from tinsmith.errors import APITimeoutError, ClosedError, PermissionDeniedError
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams

WAIT_S = 60.0
SETTLED_S = 5.0
"""Far below the waits that are ended here, which last half a minute and more."""
PROMPT = ModelInput.from_ints([1])
PARAMS = SamplingParams(max_tokens=1)
DATUM = Datum(PROMPT, {"target_tokens": [1], "weights": [1.0]})


def a_client(service: ScriptedService) -> ServiceClient:
    return ServiceClient(base_url=service.base_url, api_key=service.api_key)


# What is pending when a client is closed

Pending = list[concurrent.futures.Future[Any]]


def held_back_by_a_pause(_: ScriptedService, client: ServiceClient) -> Pending:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    sampler.limiter.rate_limited(60.0)
    return [sampler.sample(PROMPT, 1, PARAMS)]


def between_two_tries(service: ScriptedService, client: ServiceClient) -> Pending:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    service.faults.add("asample", times=None, status=503, headers={"retry-after": "50"})
    samples: Pending = [sampler.sample(PROMPT, 1, PARAMS)]
    service.wait_requests("asample", 1)
    return samples


def between_two_polls(service: ScriptedService, client: ServiceClient) -> Pending:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
    service.faults.add("retrieve_future", times=None, status=503, headers={"retry-after": "50"})
    seen = len(service.requests("retrieve_future"))
    steps: Pending = [training.optim_step(AdamParams())]
    service.wait_requests("retrieve_future", seen + 1)
    return steps


def between_two_polls_for_a_model(service: ScriptedService, client: ServiceClient) -> Pending:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
    service.faults.add("retrieve_future", times=None, status=503, headers={"retry-after": "50"})
    seen = len(service.requests("retrieve_future"))
    pool = concurrent.futures.ThreadPoolExecutor(1)
    models: Pending = [training.unload_model()]
    models.append(pool.submit(client.create_lora_training_client, "Qwen/Qwen3-8B", rank=2))
    pool.shutdown(wait=False)
    service.wait_requests("retrieve_future", seen + 2)
    return models


def in_the_line(service: ScriptedService, client: ServiceClient) -> Pending:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
    held = service.faults.hold("optim_step", times=1)
    steps: Pending = [training.optim_step(AdamParams()) for _ in range(3)]
    held.wait_held(1)
    return steps


def at_the_start(service: ScriptedService, client: ServiceClient) -> Pending:
    held = service.faults.hold("client_config", times=1)
    pool = concurrent.futures.ThreadPoolExecutor(1)
    creating: Pending = [pool.submit(client.create_sampling_client, base_model="Qwen/Qwen3-8B")]
    pool.shutdown(wait=False)
    held.wait_held(1)
    return creating


def waiting_for_results(service: ScriptedService, client: ServiceClient) -> Pending:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    service.faults.hold_commands("asample")
    samples: Pending = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(20)]
    service.wait_requests("asample", 20)
    return samples


def in_a_loss(_: ScriptedService, client: ServiceClient) -> Pending:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
    begun, over = threading.Event(), threading.Event()

    class Slow:
        def gradients(self, data: list[Datum], _: list[Any]) -> Any:
            begun.set()
            over.wait(WAIT_S)
            return 0.0, [[0.0] for _ in data], {}

    passes: Pending = [training.forward_backward_custom([DATUM], Slow())]
    passes.append(training.optim_step(AdamParams()))
    begun.wait(WAIT_S)
    passes[0].add_done_callback(lambda _: over.set())
    return passes


@pytest.mark.parametrize("has_session_poller", [False, True])
@pytest.mark.parametrize(
    "begin",
    [
        held_back_by_a_pause,
        between_two_tries,
        between_two_polls,
        between_two_polls_for_a_model,
        in_the_line,
        at_the_start,
        waiting_for_results,
        in_a_loss,
    ],
)
def test_s18_closing_a_client_settles_every_call_whatever_it_waits_for(
    begin: Callable[[ScriptedService, ServiceClient], Pending], has_session_poller: bool
) -> None:
    with running_service(
        long_poll_s=20.0, sample_use_retrieve_futures=has_session_poller
    ) as service:
        client = a_client(service)
        pending = begin(service, client)

        client.close().result(WAIT_S)

        for future in pending:
            with pytest.raises(ClosedError):
                future.result(SETTLED_S)


def test_s18_closing_settles_pending_calls_before_the_session_is_finished(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "FINISH_TIMEOUT_S", 1.0)
    client = a_client(service)
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    sampler.limiter.rate_limited(60.0)
    pending = sampler.sample(PROMPT, 1, PARAMS)
    held = service.faults.hold("finish_session")

    closing = client.close()
    with pytest.raises(ClosedError):
        pending.result(SETTLED_S)
    held.wait_held(1)

    with pytest.raises(APITimeoutError, match="it will expire"):
        closing.result(WAIT_S)
    held.release()


def test_a_call_cancelled_as_the_client_closes_raises_no_other_error(
    service: ScriptedService,
) -> None:
    client = a_client(service)
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    sampler.limiter.rate_limited(60.0)

    async def scenario() -> None:
        sampling = asyncio.create_task(sampler.sample_async(PROMPT, 1, PARAMS))
        await asyncio.sleep(0)
        sampling.cancel()
        await client.close_async()
        with pytest.raises(asyncio.CancelledError):
            await sampling

    asyncio.run(scenario())


# Clients that come and go


@pytest.mark.parametrize("is_closed", [True, False])
def test_s2_a_thousand_clients_leave_nothing_behind(
    service: ScriptedService, is_closed: bool
) -> None:
    def one_client() -> None:
        client = a_client(service)
        client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
        if is_closed:
            client.close().result(WAIT_S)

    def kept() -> tuple[int, int, int]:
        gc.collect()
        return (
            len(background()._tasks),
            len(sessions._open_sessions),
            len(shared_limiters.limiters),
        )

    of_others = kept()  # tests before this one may have left some behind

    def counts() -> dict[str, int]:
        deadline = time.monotonic() + WAIT_S
        while any(now > then for now, then in zip(kept(), of_others, strict=True)):
            assert time.monotonic() < deadline, f"{kept()} are still there, not {of_others}"
            time.sleep(0.01)
        return {
            "threads": sum(
                not thread.name.startswith("tinsmith-io")  # the service's own
                for thread in threading.enumerate()
            ),
            "tasks": background().run(_count_tasks()),
            "client sockets": _sockets_to(service),
        }

    one_client()
    before = counts()
    for _ in range(1000):
        one_client()

    after = counts()
    assert all(after[what] <= before[what] for what in before), (before, after)
    assert len(service.wait_requests("finish_session", 1001, WAIT_S)) == 1001


@pytest.mark.parametrize("failing", ["client_config", "create_session", "finish_session"])
def test_s2_a_client_whose_calls_failed_is_freed_too(
    service: ScriptedService, failing: str
) -> None:
    """The error knows the frame that holds the client; nothing of ours may hold the error."""
    service.faults.add(failing, times=None, status=403)

    def one_client() -> None:
        client = a_client(service)
        with contextlib.suppress(PermissionDeniedError):
            client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
            client.close().result(WAIT_S)

    gc.collect()
    of_others = len(sessions._open_sessions)
    one_client()

    deadline = time.monotonic() + SETTLED_S
    while len(sessions._open_sessions) > of_others:
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)


async def _count_tasks() -> int:
    return len(asyncio.all_tasks())


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"sample_use_retrieve_futures": True},
        {"tinsmith_batch_items": 8, "tinsmith_inline_bytes": 65536},
    ],
    ids=["poll-each", "session-poll", "extensions"],
)
def test_s2_a_finished_sample_is_freed_without_the_garbage_collector(flags: dict[str, Any]) -> None:
    with running_service(**flags) as service, a_client(service) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        sampler.sample(ModelInput.from_ints([1, 2]), 1, SamplingParams(max_tokens=2)).result(WAIT_S)
        gc.collect()
        gc.disable()
        try:
            futures = [
                sampler.sample(ModelInput.from_ints([1, 2]), 1, SamplingParams(max_tokens=2))
                for _ in range(20)
            ]
            concurrent.futures.wait(futures, WAIT_S)
            assert all(future.result(0).sequences for future in futures)
            left = weakref.WeakSet(futures)
            del futures
            deadline = time.monotonic() + WAIT_S
            while left and time.monotonic() < deadline:
                time.sleep(0.01)  # the loop has yet to leave the frames that settled them

            assert not left
        finally:
            gc.enable()


def _sockets_to(service: ScriptedService) -> int:
    """How many connections to the service this process has open, seen from their own end."""
    port = f"{int(service.base_url.rsplit(':', 1)[1].split('/')[0]):04X}"
    established = "01"
    rows = [row.split() for row in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port}") and row[3] == established for row in rows)


# The end of the process


def run_program(
    service: ScriptedService, lines: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program that has a client and a sampler."""
    start = f"""
import gc, os, signal, sys, threading, time
import tinsmith
client = tinsmith.ServiceClient(base_url={service.base_url!r}, api_key={service.api_key!r})
sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
prompt, params = tinsmith.ModelInput.from_ints([1]), tinsmith.SamplingParams(max_tokens=1)
def in_child(work):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    work()
    sys.exit(7)  # as a program ends, exit handlers and all
"""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", start + lines],
        timeout=300,
        check=False,
        capture_output=True,
        text=True,
        **options,
    )


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("", "success"),
        ("raise KeyError('oops')", "errored"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", "interrupted"),
        ("client.close('interrupted').result()", "interrupted"),
    ],
)
def test_a_session_is_finished_once_however_its_program_ends(
    service: ScriptedService, ending: str, reason: str
) -> None:
    run_program(service, ending)

    finished = service.requests("finish_session")
    assert [received.request.reason.type for received in finished] == [reason]


@pytest.mark.parametrize(
    "waiting",
    ["sampler.sample(prompt, 1, params).result()", "sampler.sample_many([prompt], params)"],
)
def test_a_program_ended_by_ctrl_c_dies_of_sigint(service: ScriptedService, waiting: str) -> None:
    """Whatever finishes its session: shells stop a loop of programs only where one ended so."""
    service.faults.hold_commands("asample")

    result = run_program(
        service, f"threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()\n{waiting}"
    )

    assert result.returncode == -signal.SIGINT, result.stderr
    assert len(service.requests("finish_session")) == 1


def test_a_program_whose_server_is_gone_exits_within_seconds(service: ScriptedService) -> None:
    service.faults.hold("finish_session")

    result = run_program(service, "")  # which has a limit of its own

    assert result.returncode == 0, result.stderr


def test_a_program_whose_dns_server_does_not_answer_can_exit(service: ScriptedService) -> None:
    result = run_program(
        service,
        """
import socket
asked = threading.Event()
numeric = socket.getaddrinfo
def silent(host, port, **wanted):
    if wanted.get("flags", 0) & socket.AI_NUMERICHOST:
        return numeric(host, port, **wanted)
    asked.set()
    threading.Event().wait()
socket.getaddrinfo = silent
other = tinsmith.ServiceClient(base_url="http://service.invalid", api_key="tml-key")
call = threading.Thread(target=other.get_server_capabilities, daemon=True)
threading.excepthook = lambda _: None  # it fails, now or at the end
call.start()
assert asked.wait(20)
""",
    )

    assert result.returncode == 0, result.stderr


needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")


@needs_fork
@pytest.mark.parametrize(
    "work",
    [
        "pass",
        "del globals()['client'], globals()['sampler']; gc.collect()",
        "client.close().result()",
    ],
)
def test_a_forked_child_that_exits_does_not_finish_its_parent_s_session(
    service: ScriptedService, work: str
) -> None:
    result = run_program(
        service,
        f"""
def work():
    {work}
assert in_child(work) == 7
assert sampler.sample(prompt, 1, params).result(20)
""",
    )

    assert result.returncode == 0, result.stderr
    finished = service.requests("finish_session")
    assert len(finished) == 1, "by the parent, at its own end"


@needs_fork
def test_a_forked_child_cannot_use_its_parent_s_client_and_is_told_the_remedy(
    service: ScriptedService,
) -> None:
    result = run_program(
        service,
        """
training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
rest = tinsmith.RestClient(base_url=client.holder.session.settings.base_url, api_key="tml-x")
def work():
    for call in (
        lambda: sampler.sample(prompt, 1, params).result(20),
        lambda: training.optim_step(tinsmith.AdamParams()).result(20),
        lambda: client.create_sampling_client(base_model="Qwen/Qwen3-8B"),
        lambda: client.get_server_capabilities(),
        lambda: training.get_info(),
    ):
        try:
            call()
        except tinsmith.ClosedError as error:
            assert "create a new one here" in error.remedy
        else:
            raise AssertionError("not refused")
assert in_child(work) == 7
""",
    )

    assert result.returncode == 0, result.stderr


@needs_fork
def test_a_forked_child_samples_through_a_handle_while_its_parent_does(
    service: ScriptedService,
) -> None:
    result = run_program(
        service,
        f"""
handle = sampler.get_sampler_handle()
sampler.sample(prompt, 1, params).add_done_callback(lambda _: None)  # starts the callbacks' thread
def work():
    own = tinsmith.SamplingClient.from_sampler_handle(handle, api_key={service.api_key!r})
    called = threading.Event()
    future = own.sample(prompt, 1, params)
    future.add_done_callback(lambda _: called.set())
    assert future.result(20) and called.wait(20)
assert in_child(work) == 7
assert sampler.sample(prompt, 1, params).result(20)
""",
    )

    assert result.returncode == 0, result.stderr
    numbers = [received.request.seq_id for received in service.requests("asample")]
    assert len(set(numbers)) == 3, "no two processes use one number"


def test_freeing_an_unused_client_starts_no_thread() -> None:
    """To start one while memory is freed, which may be at any moment, could wait for itself."""
    finished = subprocess.run(
        [sys.executable, "-c", UNUSED], capture_output=True, text=True, timeout=WAIT_S, check=False
    )

    assert finished.stderr == ""
    assert finished.stdout == "1\n1\n"


UNUSED = """
import atexit, gc, threading
tell = lambda: print(threading.active_count(), flush=True)
atexit.register(tell)  # the first that is registered is the last that runs
import tinsmith
settings = {"base_url": "http://127.0.0.1:9", "api_key": "tml-x"}
dropped, kept = tinsmith.ServiceClient(**settings), tinsmith.ServiceClient(**settings)
del dropped
gc.collect()
tell()
"""
