"""ClientCredentials as the service sees them: exchanged, renewed, refused, and never shown."""

from __future__ import annotations

import asyncio
import logging
import pathlib
import pickle
import socket
import time
import traceback
from collections.abc import Iterator

import pytest

import tinsmith
from tinsmith import auth
from tinsmith.client.service import ServiceClient
from tinsmith.errors import (
    APIConnectionError,
    AuthenticationError,
    BillingError,
    TinkerError,
)
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import ModelInput, SamplingParams

WAIT_S = 60.0
OTHER_KEY = "tml-other-account"


@pytest.fixture
def exchanging() -> Iterator[ScriptedService]:
    """A service that wants tokens."""
    with running_service(
        pjwt_auth_enabled=True, long_poll_s=0.5, further_api_keys=[OTHER_KEY]
    ) as service:
        yield service


@pytest.fixture
def no_credentials(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A machine on which nothing is set up."""
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def a_client(service: ScriptedService) -> ServiceClient:
    return ServiceClient(base_url=service.base_url, api_key=service.api_key)


def test_only_client_config_and_the_token_exchange_carry_the_key(
    exchanging: ScriptedService,
) -> None:
    with a_client(exchanging) as client:
        client.create_lora_training_client("Qwen/Qwen3-8B", rank=2).result()

    with_key = {
        received.endpoint
        for received in exchanging.requests()
        if received.headers["x-api-key"] == exchanging.api_key
    }
    assert with_key == {"client_config", "auth_token"}


def test_a_rejected_token_is_renewed_silently(
    exchanging: ScriptedService,
) -> None:
    """Also for polls, which are not ordinary calls; and once, however many were refused."""
    with a_client(exchanging) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        exchanging.account.revoke_tokens()

        drawn = [
            sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1))
            for _ in range(20)
        ]

        assert all(future.result(WAIT_S).sequences for future in drawn)
    assert len(exchanging.requests("auth_token")) == 2


def test_a_token_is_renewed_for_a_stream_too() -> None:
    with (
        running_service(long_poll_s=0.5, pjwt_auth_enabled=True, tinsmith_stream=True) as service,
        a_client(service) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.account.revoke_tokens()

        stream = sampler.sample_stream(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1))

        assert stream.result().sequences
    assert len(service.requests("auth_token")) == 2
    assert len(service.requests("asample_stream")) == 2


def test_a_rejected_key_is_not_retried(exchanging: ScriptedService) -> None:
    with a_client(exchanging) as client:
        client.get_server_capabilities()
        exchanging.forget_requests()
        exchanging.faults.add("get_server_capabilities", times=None, status=401)

        with pytest.raises(AuthenticationError):
            client.get_server_capabilities()

    assert len(exchanging.requests("get_server_capabilities")) == 2
    assert len(exchanging.requests("auth_token")) == 1


def test_without_tokens_a_401_is_final(service: ScriptedService, client: ServiceClient) -> None:
    service.faults.add("get_server_capabilities", times=None, status=401)

    with pytest.raises(AuthenticationError):
        client.get_server_capabilities()

    assert len(service.requests("get_server_capabilities")) == 1


def test_a_token_about_to_expire_is_renewed_before_it_is_sent() -> None:
    with (
        running_service(pjwt_auth_enabled=True, token_lifetime_s=1.0) as service,
        a_client(service) as client,
    ):
        client.get_server_capabilities()
        until = service.requests("get_server_capabilities")[0].headers["x-api-key"]
        while not client._lease.session.credentials.is_stale():
            time.sleep(0.01)
        client.get_server_capabilities()

        assert [r.status for r in service.requests("get_server_capabilities")] == [200, 200]
        assert service.requests("get_server_capabilities")[1].headers["x-api-key"] != until


@pytest.mark.parametrize("wants_tokens", [False, True])
@pytest.mark.parametrize("by_loading", [False, True])
def test_a_checkpoint_of_another_account_is_looked_up_and_loaded_with_its_token(
    wants_tokens: bool, by_loading: bool
) -> None:
    with (
        running_service(
            pjwt_auth_enabled=wants_tokens,
            create_model_via_load_weights=by_loading,
            further_api_keys=[OTHER_KEY],
        ) as service,
        a_client(service) as client,
    ):
        path = (
            client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
            .save_state("c")
            .result(WAIT_S)
            .path
        )
        service.forget_requests()

        client.create_training_client_from_state(path, weights_access_token=OTHER_KEY).result()
        asyncio.run(
            client.create_training_client_from_state_with_optimizer_async(
                path, weights_access_token=OTHER_KEY
            )
        )

        loads = service.requests("load_weights")
        assert [load.request.weights_access_token for load in loads] == [OTHER_KEY, OTHER_KEY]
        assert all(load.headers["x-api-key"] != OTHER_KEY for load in loads)
        asked_with = {
            received.headers["x-api-key"]
            for received in service.requests("get_weights_info_by_tinker_path")
        }
        exchanged = [received.headers["x-api-key"] for received in service.requests("auth_token")]
        if by_loading:
            assert asked_with == set()
        elif wants_tokens:
            assert exchanged == [OTHER_KEY, OTHER_KEY]
            assert OTHER_KEY not in asked_with and len(asked_with) == 2
        else:
            assert asked_with == {OTHER_KEY}


@pytest.mark.usefixtures("no_credentials")
def test_the_credential_command_is_used_if_the_service_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_service(
        pjwt_auth_enabled=True, credential_default_source="credential_cmd", api_key="dynamic"
    ) as service:
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo dynamic")
        with ServiceClient(base_url=service.base_url) as client:
            assert client.get_server_capabilities().supported_models


@pytest.mark.usefixtures("no_credentials")
def test_a_key_is_not_enough_if_the_service_wants_a_credential_command() -> None:
    with (
        running_service(
            pjwt_auth_enabled=True, credential_default_source="credential_cmd"
        ) as service,
        a_client(service) as client,
        pytest.raises(TinkerError, match="TINKER_CREDENTIAL_CMD"),
    ):
        client.get_server_capabilities()


def test_s40_no_log_line_error_or_pickle_shows_a_secret(
    exchanging: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    exchanging.faults.add("get_server_capabilities", times=2, status=503)
    exchanging.faults.add("get_server_capabilities", times=None, status=401)
    rest = tinsmith.RestClient(base_url=exchanging.base_url, api_key=exchanging.api_key)
    admin = tinsmith.AdminClient(base_url=exchanging.base_url, api_key=exchanging.api_key)
    with a_client(exchanging) as client:
        training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=2)
        with pytest.raises(AuthenticationError) as told:
            client.get_server_capabilities()
        token = exchanging.requests("create_session")[0].headers["x-api-key"]
        shown = [
            *(f"{thing!r} {thing}" for thing in (client, training, rest, admin)),
            *traceback.format_exception(told.value),
            repr(vars(told.value)),
            caplog.text,
            str(pickle.dumps(told.value)),
        ]
        for thing in (client, training, rest, admin):
            with pytest.raises(TypeError):
                pickle.dumps(thing)

    for secret in (exchanging.api_key, token):
        assert not any(secret in text for text in shown)


# tinsmith.auth


def test_missing_credentials_are_detected_without_a_request(
    no_credentials: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert auth.get_tinker_token() is None
    assert not auth.tinker_has_credentials()
    with pytest.raises(TinkerError, match="TINKER_API_KEY"):
        auth.raise_if_tinker_not_accessible()

    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "touch ran")
    monkeypatch.chdir(no_credentials)
    assert auth.get_tinker_token() is None
    assert auth.tinker_has_credentials()
    assert not (no_credentials / "ran").exists()


def test_a_stored_key_is_found_even_with_a_credential_command(
    no_credentials: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = no_credentials / ".tinker" / "credentials.json"
    file.parent.mkdir()
    file.write_text('{"version": 1, "default": "a", "keys": {"a": {"key": "tml-stored"}}}')
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo x")

    assert auth.get_tinker_token() == "tml-stored"

    monkeypatch.setenv("TINKER_API_KEY", "tml-set")
    assert auth.get_tinker_token() == "tml-set"
    monkeypatch.setenv("TINKER_API_KEY", "not-a-key")
    assert auth.get_tinker_token() is None


@pytest.mark.usefixtures("no_credentials")
@pytest.mark.parametrize(
    ("status", "error"), [(401, AuthenticationError), (402, BillingError), (503, TinkerError)]
)
def test_a_service_error_is_reported_immediately(
    service: ScriptedService,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    error: type[Exception],
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", service.api_key)
    monkeypatch.setenv("TINKER_BASE_URL", service.base_url)
    auth.raise_if_tinker_not_accessible()
    service.faults.add("get_server_capabilities", times=None, status=status)
    service.forget_requests()

    with pytest.raises(error):
        auth.raise_if_tinker_not_accessible()

    assert len(service.requests("get_server_capabilities")) == 1
    assert service.requests("create_session") == []


@pytest.mark.usefixtures("no_credentials")
def test_an_unreachable_service_is_reported_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("TINKER_API_KEY", "tml-x")
        with pytest.raises(APIConnectionError, match="check the base URL"):
            auth.raise_if_tinker_not_accessible()
