"""Start, life and end of a client: what is sent, what is kept, and what is let go."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import pathlib
import pickle
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from tinsmith.client import upkeep, waits
from tinsmith.client.background import background
from tinsmith.client.rest import RestClient
from tinsmith.client.retry import RetryBudget
from tinsmith.client.service import ServiceClient
from tinsmith.client.session import EMPTY_400_BUDGET
from tinsmith.client.settings import HOSTED_URL, Secret, settings_from
from tinsmith.errors import (
    APIConnectionError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ClosedError,
    TinkerError,
    ValidationError,
)
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import DimuonOptimizerConfig, ModelInput, SamplingParams

WAIT_S = 60.0
PROMPT = ModelInput.from_ints([1])
PARAMS = SamplingParams(max_tokens=1)


def test_making_a_client_sends_nothing(service: ScriptedService) -> None:
    ServiceClient(base_url=service.base_url, api_key=service.api_key)

    assert service.requests() == []


def test_the_first_use_fetches_the_config_and_opens_one_session(
    client: ServiceClient, service: ScriptedService
) -> None:
    client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
    client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()

    first, *beside, third, fourth = [str(received.endpoint) for received in service.requests()]
    assert first == "client_config"
    assert sorted(beside) == ["client_dynamic_config", "create_session"]
    assert (third, fourth) == ("create_sampling_session", "create_sampling_session")


def test_startup_requests_that_are_independent_run_concurrently(
    client: ServiceClient, service: ScriptedService
) -> None:
    held = service.faults.hold("client_dynamic_config")

    assert client.get_server_capabilities().supported_models  # needs no such flags
    opening = threading.Thread(
        target=client.create_sampling_client, kwargs={"base_model": "Qwen/Qwen3-8B"}
    )
    opening.start()
    service.wait_requests("create_session", 1, WAIT_S)
    assert not service.requests("create_sampling_session")
    held.release()
    opening.join(WAIT_S)

    assert len(service.requests("client_config")) == 1
    assert len(service.requests("create_sampling_session")) == 1


def test_unreadable_flags_are_replaced_by_defaults_with_a_warning(
    service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    service.faults.add("client_dynamic_config", times=None, status=403)

    with (
        caplog.at_level(logging.WARNING, logger="tinsmith"),
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()

    assert "default values of the service's flags" in caplog.text


def test_many_threads_that_start_together_open_one_session(
    client: ServiceClient, service: ScriptedService
) -> None:
    threads = [
        threading.Thread(
            target=client.create_sampling_client, kwargs={"base_model": "Qwen/Qwen3-8B"}
        )
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(service.requests("create_session")) == 1
    assert len(service.requests("create_sampling_session")) == 16


def test_read_only_calls_open_no_session(client: ServiceClient, service: ScriptedService) -> None:
    models = client.get_server_capabilities().supported_models

    assert models
    assert service.requests("create_session") == []


def test_an_async_create_call_does_not_block_the_caller_s_loop(
    client: ServiceClient, service: ScriptedService
) -> None:
    service.faults.add("client_config", delay_s=0.5)

    async def scenario() -> int:
        creating = asyncio.create_task(
            client.create_sampling_client_async(base_model="Qwen/Qwen3-8B")
        )
        ticks = 0
        while not creating.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await creating
        return ticks

    assert asyncio.run(scenario()) > 10


@pytest.mark.parametrize("status", ["success", "errored", "interrupted"])
def test_closing_finishes_the_session_with_its_outcome(
    service: ScriptedService, status: str
) -> None:
    client = ServiceClient(base_url=service.base_url, api_key=service.api_key)
    client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()

    client.close(status, "a word").result(WAIT_S)  # type: ignore[arg-type]
    client.close("success").result(WAIT_S)

    finished = service.requests("finish_session")
    assert len(finished) == 1
    assert (finished[0].request.reason.type, finished[0].request.detail) == (status, "a word")


def test_a_with_block_reports_how_it_ended(service: ScriptedService) -> None:
    def run(ending: type[BaseException] | None) -> None:
        with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
            client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
            if ending is not None:
                raise ending

    run(None)
    for ending in (KeyError, KeyboardInterrupt):
        with pytest.raises(ending):
            run(ending)

    reasons = [received.request.reason.type for received in service.requests("finish_session")]
    assert reasons == ["success", "errored", "interrupted"]


def test_s2_a_call_on_a_closed_client_raises_immediately_and_sends_nothing(
    service: ScriptedService,
) -> None:
    client = ServiceClient(base_url=service.base_url, api_key=service.api_key)
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    client.close("success").result(WAIT_S)
    service.forget_requests()

    with pytest.raises(ClosedError):
        sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)
    with pytest.raises(ClosedError):
        client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
    with pytest.raises(ClosedError), pytest.warns(FutureWarning):
        client.create_rest_client()

    assert service.requests() == []


def test_closing_a_client_during_startup_logs_nothing(
    service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where nobody waits for the start any more; asyncio tells of errors that nobody saw."""
    client = ServiceClient(base_url=service.base_url, api_key=service.api_key)
    service.faults.add("client_config", times=None, status=503)
    with pytest.raises(APITimeoutError):
        client.create_sampling_client(base_model="Qwen/Qwen3-8B", timeout=0.1).result()

    client.close("success").result(WAIT_S)

    time.sleep(0.1)
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_forked_child_can_create_its_own_clients(service: ScriptedService) -> None:
    program = f"""
import os
from tinsmith.client.service import ServiceClient
client = ServiceClient(base_url={service.base_url!r}, api_key={service.api_key!r})
client.create_sampling_client(base_model='Qwen/Qwen3-8B')
child = os.fork()
if child == 0:
    own = ServiceClient(base_url={service.base_url!r}, api_key={service.api_key!r})
    own.create_sampling_client(base_model='Qwen/Qwen3-8B')
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    result = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)

    assert result.returncode == 0
    assert len(service.requests("create_session")) == 2


def test_a_closed_port_fails_in_seconds_with_a_remedy() -> None:
    client = ServiceClient(base_url="http://127.0.0.1:9", api_key="tml-test")

    with pytest.raises(APIConnectionError, match="check the base URL") as caught:
        client.get_server_capabilities()

    assert caught.value.__notes__[-1].endswith("the RetryBudget allows first_contact_s=5")


def test_a_failed_start_is_retried_by_the_next_call(service: ScriptedService) -> None:
    client = ServiceClient(
        base_url=service.base_url, api_key=service.api_key, retry=RetryBudget(total_s=0)
    )
    service.faults.add("client_config", times=1, status=500)

    with pytest.raises(TinkerError):
        client.get_server_capabilities()

    assert client.get_server_capabilities().supported_models


def test_a_402_on_opening_a_session_is_raised_immediately(
    client: ServiceClient, service: ScriptedService
) -> None:
    service.faults.add("create_session", times=None, status=402)

    with pytest.raises(BillingError):
        client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()


def test_an_empty_400_is_retried_as_a_broken_proxy(
    client: ServiceClient, service: ScriptedService
) -> None:
    service.faults.add("create_sampling_session", times=2, empty_400=True)

    client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()

    assert len(service.requests("create_sampling_session")) == 3


QUICK = RetryBudget(total_s=30.0, delay_base_s=0.001, delay_max_s=0.001)


def test_consecutive_empty_400s_are_raised_after_a_limit(service: ScriptedService) -> None:
    with ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=QUICK) as client:
        client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
        empty = service.faults.add("create_sampling_session", times=None, empty_400=True)

        with pytest.raises(BadRequestError):
            client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()

    assert empty.struck > EMPTY_400_BUDGET


def test_successful_calls_reset_the_empty_400_budget(service: ScriptedService) -> None:
    with ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=QUICK) as client:
        for _ in range(EMPTY_400_BUDGET + 4):
            service.faults.add("create_sampling_session", empty_400=True)
            client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()


def test_a_wrong_key_is_an_authentication_error(service: ScriptedService) -> None:
    client = ServiceClient(base_url=service.base_url, api_key="tml-wrong")

    with pytest.raises(AuthenticationError):
        client.get_server_capabilities()


def test_a_key_is_exchanged_for_a_token_where_the_service_says_so() -> None:
    with (
        running_service(pjwt_auth_enabled=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()

        exchanged = service.requests("auth_token")
        used = service.requests("create_session")[0].headers["x-api-key"]
        assert exchanged[0].headers["x-api-key"] == service.api_key
        assert used.startswith("eyJ") or used != service.api_key


def test_s12_s39_two_tenants_in_one_process_never_mix() -> None:
    with (
        running_service(api_key="tml-a") as one,
        running_service(api_key="tml-b") as two,
        ServiceClient(base_url=one.base_url, api_key="tml-a") as first,
        ServiceClient(base_url=two.base_url, api_key="tml-b") as second,
    ):
        samplers = [c.create_sampling_client(base_model="Qwen/Qwen3-8B") for c in (first, second)]
        futures = [samplers[n % 2].sample(PROMPT, 1, PARAMS) for n in range(64)]
        for future in futures:
            future.result(WAIT_S)

        for service, key in ((one, "tml-a"), (two, "tml-b")):
            assert {r.headers["x-api-key"] for r in service.requests()} == {key}
            assert len(service.requests("asample")) == 32
        samplers[0].limiter.rate_limited(60.0)
        samplers[1].sample(PROMPT, 1, PARAMS).result(WAIT_S)


def test_s40_settings_are_fixed_when_the_client_is_made(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", service.base_url)
    monkeypatch.setenv("TINKER_API_KEY", service.api_key)
    with ServiceClient() as client:
        monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("TINKER_API_KEY", "tml-other")

        assert client.get_server_capabilities().supported_models


def test_s40_no_secret_shows_in_repr_or_pickle() -> None:
    settings = settings_from(
        base_url="http://host", api_key="tml-secret", default_headers={"X-Token": "hidden"}
    )
    client = ServiceClient(base_url="http://127.0.0.1:9", api_key="tml-secret")

    for shown in (repr(settings), repr(client), repr(settings.api_key)):
        assert "tml-secret" not in shown
        assert "hidden" not in shown
    with pytest.raises(TypeError):
        pickle.dumps(Secret("tml-secret"))


def test_pickling_an_unpicklable_client_says_what_to_do_instead(client: ServiceClient) -> None:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    future = sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1))

    remedies = {
        client: "create one in the other process",
        RestClient(client.holder): "create one in the other process",
        training: "pass a SamplingClient",
        future: "pass its result",
    }

    for held, remedy in remedies.items():
        with pytest.raises(TypeError, match=f"cannot be pickled.*{remedy}"):
            pickle.dumps(held)


def test_s40_no_secret_shows_in_an_error(service: ScriptedService) -> None:
    client = ServiceClient(base_url=service.base_url, api_key="tml-secret-key")

    with pytest.raises(AuthenticationError) as caught:
        client.get_server_capabilities()

    assert "tml-secret-key" not in repr(caught.value)
    assert "tml-secret-key" not in repr(caught.value.__dict__)


def test_without_a_credential_the_client_says_where_to_put_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    with pytest.raises(AuthenticationError, match="TINKER_API_KEY"):
        ServiceClient(base_url="http://service.test:9")


def test_a_base_url_without_http_is_rejected() -> None:
    with pytest.raises(ValidationError, match="http"):
        ServiceClient(base_url="localhost:8000", api_key="tml-test")


def test_an_unknown_option_causes_a_warning(service: ScriptedService) -> None:
    with pytest.warns(FutureWarning, match="colour"):
        ServiceClient(base_url=service.base_url, api_key=service.api_key, colour="red")
    with pytest.warns(FutureWarning, match="credential_command, default_headers"):
        ServiceClient(
            base_url=service.base_url,
            api_key=service.api_key,
            credential_command="echo",  # has a variable of the environment
            default_headers={},  # are default_headers_overrides
        )


def test_a_failing_with_block_raises_its_own_error(service: ScriptedService) -> None:
    """That the session could not be finished either is no reason to hide what went wrong."""
    service.faults.add("finish_session", times=None, status=422)

    def run() -> None:
        with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
            client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()


def test_a_closed_client_cannot_be_entered_again(service: ScriptedService) -> None:
    client = ServiceClient(base_url=service.base_url, api_key=service.api_key)
    client.close().result(WAIT_S)

    with pytest.raises(RuntimeError, match="closed"), client:
        pass
    with pytest.raises(ValidationError, match="success"):
        _ = client.close("fine")  # type: ignore[arg-type]


def test_console_urls_are_built_without_a_request(
    client: ServiceClient, service: ScriptedService
) -> None:
    before = client.get_console_url()
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)

    # This service has no console.
    assert (before, client.get_console_url(), training.get_console_url()) == (None, None, None)
    with ServiceClient(base_url=HOSTED_URL, api_key="tml-x") as hosted:
        assert hosted.get_console_url() == "https://tinker.thinkingmachines.ai/sessions"
    assert len(service.requests("create_session")) == 1


def test_a_model_is_unloaded_after_all_earlier_calls(
    client: ServiceClient, service: ScriptedService
) -> None:
    first, second = (client.create_lora_training_client("Qwen/Qwen3-8B", rank=2) for _ in range(2))
    saved = first.save_state("c1")

    gone = first.unload_model().result(WAIT_S)
    also_gone = client.unload_model(second.model_id).result(WAIT_S)

    assert saved.result(WAIT_S).path
    assert (gone.model_id, also_gone.model_id) == (first.model_id, second.model_id)
    names = [received.endpoint for received in service.requests()]
    assert names.index("save_weights") < names.index("unload_model")


@pytest.mark.parametrize("by_loading", [False, True])
def test_training_continues_from_a_checkpoint_with_and_without_the_flag(by_loading: bool) -> None:
    """With the flag one call makes the model and loads it; its id is known without asking."""
    with (
        running_service(create_model_via_load_weights=by_loading) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        first = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
        path = first.save_state("c1").result(WAIT_S).path
        service.forget_requests()

        second = client.create_training_client_from_state_with_optimizer(
            path, user_metadata={"a": "b"}
        )
        again = second.save_state("c2").result(WAIT_S)

        assert second.model_id == first.model_id.replace(":train:0", ":train:1")
        assert again.path.startswith(f"tinker://{second.model_id}/")
        names = [received.endpoint for received in service.requests()]
        made = ["create_model", "load_weights"] if not by_loading else ["load_weights"]
        assert [name for name in names if name in ("create_model", "load_weights")] == made
        assert ("get_weights_info_by_tinker_path" in names) != by_loading
        assert service.requests("load_weights")[0].request.optimizer is True
        assert service.requests("save_weights")[0].request.seq_id == (1 if by_loading else 2)


def test_new_optimizer_state_is_adamw_by_default(
    client: ServiceClient, service: ScriptedService
) -> None:
    dimuon = DimuonOptimizerConfig()
    path = (
        client.create_lora_training_client("Qwen/Qwen3-8B", rank=2, optimizer=dimuon)
        .save_state("c1")
        .result(WAIT_S)
        .path
    )

    client.create_training_client_from_state(path).result()
    client.create_training_client_from_state(path, optimizer=dimuon).result()
    client.create_training_client_from_state_with_optimizer(path).result()

    kinds = [
        received.request.optimizer_config.type for received in service.requests("create_model")
    ]
    assert kinds == ["dimuon", "adamw", "dimuon", "dimuon"]


def test_a_long_wait_for_a_plain_call_is_logged(
    client: ServiceClient,
    service: ScriptedService,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soon = msgspec.structs.replace(waits.FUTURES, after_s=0.2)
    monkeypatch.setattr(background().waits, "_telling", soon)
    monkeypatch.setattr(waits, "LOOK_EVERY_S", 0.05)
    told = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "no answer to get_server_capabilities yet" in record.getMessage():
                told.set()

    listener = Listener()
    logging.getLogger("tinsmith").addHandler(listener)
    try:
        with service.faults.hold("get_server_capabilities"):
            asking = threading.Thread(target=client.get_server_capabilities)
            asking.start()
            assert told.wait(WAIT_S)
        asking.join(WAIT_S)
    finally:
        logging.getLogger("tinsmith").removeHandler(listener)
    assert "still running after" in caplog.text


def test_flags_that_change_reach_a_running_client(
    client: ServiceClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SHORTEST_REFRESH_S", 0.05)
    service.account.dynamic_flags["refresh_interval_sec"] = 0
    client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
    session = client._lease.session
    before = session.dynamic_flags.sample_cancel_enabled

    service.account.dynamic_flags["sample_cancel_enabled"] = True
    seen = len(service.requests("client_dynamic_config"))
    service.wait_requests("client_dynamic_config", seen + 2)

    assert not before
    assert session.dynamic_flags.sample_cancel_enabled


def test_read_only_clients_refresh_no_flags_and_closing_stops_refreshes(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SHORTEST_REFRESH_S", 0.02)
    service.account.dynamic_flags["refresh_interval_sec"] = 0
    client = ServiceClient(base_url=service.base_url, api_key=service.api_key)
    client.get_server_capabilities()
    deadline = time.monotonic() + WAIT_S
    while client._lease.session._tasks and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(service.requests("client_dynamic_config")) == 1

    client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()
    service.wait_requests("client_dynamic_config", 3)
    client.close().result(WAIT_S)

    assert all(task.cancelling() or task.done() for task in client._lease.session._tasks)


def test_abandoned_samples_are_cancelled_in_batches() -> None:
    with (
        running_service(
            long_poll_s=5.0, sample_cancel_enabled=True, sample_cancel_max_batch_size=3
        ) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        with service.faults.hold_commands("asample"):
            drawn = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(10)]
            service.wait_requests("retrieve_future", 10)
            with service.faults.hold("cancel_future") as held:
                for sample in drawn:
                    sample.cancel()
                held.wait_held(3)
                most = held.most_held
            cancelled = service.wait_requests("cancel_future", 10)

        assert most == 3
        assert len({received.request.request_id for received in cancelled}) == 10


def test_a_create_call_that_times_out_leaves_the_client_usable(
    client: ServiceClient, service: ScriptedService
) -> None:
    with service.faults.hold("client_config"), pytest.raises(APITimeoutError):
        client.create_lora_training_client("Qwen/Qwen3-8B", rank=2, timeout=0.2).result()
    with service.faults.hold("create_model"), pytest.raises(APITimeoutError):
        asyncio.run(client.create_lora_training_client_async("Qwen/Qwen3-8B", rank=2, timeout=0.2))

    made = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)

    assert made.save_state("c1").result(WAIT_S).path
    assert len(service.requests("create_session")) == 1


def test_closing_waits_no_longer_than_its_timeout(service: ScriptedService) -> None:
    client = ServiceClient(base_url=service.base_url, api_key=service.api_key)
    client.create_sampling_client(base_model="Qwen/Qwen3-8B").result()

    with service.faults.hold("finish_session"):
        with pytest.raises(APITimeoutError):
            client.close("success", timeout=0.2).result(WAIT_S)
        with pytest.raises(ClosedError):
            client.get_server_capabilities()

    client.close().result(WAIT_S)
    assert len(service.requests("finish_session")) == 1


@pytest.mark.usefixtures("eager_switching")
def test_session_seq_ids_are_unique_across_threads(
    client: ServiceClient,
) -> None:
    session = client.holder.session

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        taken = pool.map(
            lambda _: [session.next_number("sampling_session") for _ in range(5_000)], range(8)
        )
        numbers = sorted(number for numbers in taken for number in numbers)

    assert numbers == list(range(40_000))
