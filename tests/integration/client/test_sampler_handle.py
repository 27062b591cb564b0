"""Samplers in other processes: handles without credentials, pickles, and numbers of their own."""

from __future__ import annotations

import base64
import concurrent.futures
import multiprocessing
import pathlib
import pickle

import pytest

from tinsmith.client import upkeep
from tinsmith.client.retry import RetryBudget
from tinsmith.client.samples.sampler import NUMBERS_PER_CLONE
from tinsmith.client.samples.sampler_handle import SamplerHandle
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import AuthenticationError, ValidationError
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import ModelInput, SamplingParams

WAIT_S = 60.0
PROMPT = ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4, seed=1)


def sample_with(sampler: SamplingClient) -> int:
    return len(sampler.sample(PROMPT, 2, PARAMS).result(WAIT_S).sequences)


def test_a_handle_holds_no_credential(client: ServiceClient, service: ScriptedService) -> None:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")

    handle = sampler.get_sampler_handle()

    assert service.api_key.encode() not in base64.urlsafe_b64decode(handle)
    assert service.api_key.encode() not in pickle.dumps(SamplerHandle.from_text(handle))


def test_s40_a_pickled_client_holds_no_credential_and_uses_its_process_s(
    client: ServiceClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    pickled = pickle.dumps(sampler)
    monkeypatch.setenv("TINKER_API_KEY", service.api_key)

    clone = pickle.loads(pickled)

    assert service.api_key.encode() not in pickled
    assert sample_with(clone) == 2


def test_a_client_works_in_a_spawned_process(
    client: ServiceClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", service.api_key)
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    context = multiprocessing.get_context("spawn")

    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        counts = [pool.submit(sample_with, sampler).result(WAIT_S) for _ in range(3)]

    assert counts == [2, 2, 2]
    assert len(service.requests("create_session")) == 1


def test_a_clone_counts_seq_ids_from_its_own_start(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    handle = sampler.get_sampler_handle()

    clones = [SamplingClient.from_sampler_handle(handle, api_key=service.api_key) for _ in range(3)]
    for one in (sampler, *clones):
        sample_with(one)
        sample_with(one)

    numbers = [received.request.seq_id for received in service.requests("asample")]
    assert numbers[:2] == [0, 1]
    assert len(set(numbers)) == 8
    assert all(number >= NUMBERS_PER_CLONE for number in numbers[2:])


def test_the_service_numbers_clones_if_it_offers_to() -> None:
    with (
        running_service(sample_join_sampling_session=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        handle = client.create_sampling_client(base_model="Qwen/Qwen3-8B").get_sampler_handle()
        clone = SamplingClient.from_sampler_handle(handle, api_key=service.api_key)

        sample_with(clone)
        sample_with(clone)

        assert len(service.requests("join_sampling_session")) == 1
        numbers = [received.request.seq_id for received in service.requests("asample")]
        assert [number // NUMBERS_PER_CLONE for number in numbers] == [1, 1]


def test_a_clone_that_is_dropped_does_not_finish_the_session_of_others(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    clone = SamplingClient.from_sampler_handle(
        sampler.get_sampler_handle(), api_key=service.api_key
    )
    sample_with(clone)

    del clone

    assert sample_with(sampler) == 2
    assert service.requests("finish_session") == []


@pytest.mark.parametrize("text", ["", "nonsense", "e30=", "%%%", "bm90IGpzb24="])
def test_an_invalid_handle_is_rejected_with_a_remedy(text: str) -> None:
    with pytest.raises(ValidationError, match="get_sampler_handle"):
        SamplingClient.from_sampler_handle(text, api_key="tml-test")


def test_a_pickled_client_keeps_the_settings_of_its_service_client(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = RetryBudget(total_s=7.0, delay_max_s=2.0)
    with ServiceClient(
        base_url=service.base_url, api_key=service.api_key, retry=budget, limiter_scope="client"
    ) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        monkeypatch.setenv("TINKER_API_KEY", service.api_key)

        clone = pickle.loads(pickle.dumps(sampler))

        assert clone.retry_budget == sampler.retry_budget
        assert clone.retry_budget.total_s == 7.0
        assert clone.holder.session.settings.limiter_scope == "client"
        assert sample_with(clone) == 2


def test_s40_unpickling_without_a_key_in_the_process_says_how_to_provide_one(
    client: ServiceClient, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Official pickles carry the key. Ours do not, so there must be one where they are loaded."""
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    # On this machine there may be a service without keys, which is asked without one.
    here = sampler.get_sampler_handle()
    there = base64.urlsafe_b64decode(here).replace(b"127.0.0.1", b"host.test")
    pickled = pickle.dumps(sampler).replace(here.encode(), base64.urlsafe_b64encode(there))
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    with pytest.raises(AuthenticationError) as caught:
        pickle.loads(pickled)

    assert "set TINKER_API_KEY" in str(caught.value)
    assert "from_sampler_handle(handle, api_key=" in str(caught.value)


def test_clones_of_one_session_share_its_connections_but_no_seq_ids(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    handle = sampler.get_sampler_handle()

    clones = [SamplingClient.from_sampler_handle(handle, api_key=service.api_key) for _ in range(3)]
    for clone in clones:
        clone.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    assert len({id(clone.holder) for clone in clones}) == 1
    assert clones[0].holder is not sampler.holder
    sent = service.requests("asample")
    assert len({received.request.seq_id for received in sent}) == 3
    assert len({received.connection for received in sent}) == 1


def test_a_clone_keeps_the_session_alive_from_its_first_use_on(
    client: ServiceClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = client.create_sampling_client(base_model="Qwen/Qwen3-8B").get_sampler_handle()
    clone = SamplingClient.from_sampler_handle(handle, api_key=service.api_key)
    monkeypatch.setattr(upkeep, "HEARTBEAT_INTERVAL_S", 0.05)

    sample_with(clone)

    beats = service.wait_requests("session_heartbeat", 2)
    assert {beat.request.session_id for beat in beats} == {clone.holder.get_session_id()}


def test_a_clone_cannot_create_samplers(client: ServiceClient, service: ScriptedService) -> None:
    """Its session's numbers are the original's: one that is taken would give another's sampler."""
    handle = client.create_sampling_client(base_model="Qwen/Qwen3-8B").get_sampler_handle()
    clone = SamplingClient.from_sampler_handle(handle, api_key=service.api_key)

    with pytest.raises(ValidationError, match="cannot create further samplers"):
        SamplingClient.create(clone.holder, base_model="Qwen/Qwen3-8B").result(WAIT_S)
    again = SamplingClient.create(
        clone.holder, sampling_session_id=clone._sampling_session_id
    ).result(WAIT_S)

    assert again._sampling_session_id == clone._sampling_session_id
    assert len(service.requests("create_sampling_session")) == 1
