from __future__ import annotations

import base64
import json
import logging
import math
from typing import Any

import pytest

from tinsmith.client.retry import RetryBudget
from tinsmith.client.samples.sampler_handle import SamplerHandle, shareable
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.settings import ClientSettings, settings_from
from tinsmith.errors import ValidationError

PLACE: dict[str, Any] = {"base_url": "http://local", "api_key": "tml-first"}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy and no project but what a test names."""
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "TINKER_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)


def handle_of(settings: ClientSettings) -> str:
    return SamplerHandle(
        **shareable(settings), session_id="session-0", sampling_session_id="sampler-0"
    ).to_text()


def clone_of(handle: str, **given: Any) -> ClientSettings:
    sampler = SamplingClient.from_sampler_handle(handle, api_key="tml-second", **given)
    return sampler.holder.session.settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retry", RetryBudget(total_s=7, jitter=0.5)),
        ("retry", RetryBudget(total_s=math.inf, billing_s=0.0)),
        ("limiter_scope", "client"),
        ("project_id", "project-7"),
        ("proxy", "http://proxy:3128"),
        ("ca_file", "/etc/authorities.pem"),
        ("unix_socket", "/run/tinsmith"),
    ],
)
def test_a_clone_has_the_settings_of_its_original(name: str, value: Any) -> None:
    first = settings_from(**PLACE, **{name: value})

    clone = clone_of(handle_of(first))

    assert getattr(clone, name) == value
    assert getattr(clone, name) != getattr(settings_from(**PLACE), name)


@pytest.mark.parametrize(
    "proxy",
    [
        "http://user:hunter2@proxy:3128",
        "user:hunter2@proxy:3128",
        "http://user:p@ss/hunter2?#@proxy:3128/?token=hunter2#hunter2",
        "user:x://hunter2@proxy:3128/hunter2",
        "HTTP://hunter2:@proxy:3128",
    ],
)
def test_s40_a_handle_holds_no_key_no_proxy_login_and_no_secret_header(
    proxy: str,
) -> None:
    first = settings_from(
        base_url="http://local",
        api_key="tml-hunter2",
        proxy=proxy,
        default_headers={
            "X-Team": "blue",
            "Cookie": "hunter2",
            "CF-Access-Client-Secret": "hunter2",
        },
    )

    text = base64.urlsafe_b64decode(handle_of(first)).decode()

    assert "hunter2" not in text
    assert "proxy:3128" in text


def test_settings_that_a_handle_omits_can_be_given_to_the_clone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = settings_from(
        **PLACE,
        proxy="http://user:hunter2@proxy:3128",
        ca_file="/first/authorities.pem",
        unix_socket="/first/socket",
        default_headers={"X-Team": "blue", "X-Token": "hunter2"},
    )

    clone = clone_of(
        handle_of(first),
        proxy="http://user:hunter2@proxy:3128",
        ca_file="/second/authorities.pem",
        unix_socket="/second/socket",
        default_headers_overrides={"x-team": "red", "x-token": "hunter2"},
    )

    assert clone.api_key is not None
    assert clone.api_key.reveal() == "tml-second"
    assert clone.proxy == "http://user:hunter2@proxy:3128"
    assert (clone.ca_file, clone.unix_socket) == ("/second/authorities.pem", "/second/socket")
    assert clone.default_headers == {"x-team": "red", "x-token": "hunter2"}
    assert caplog.text == ""


def test_a_proxy_login_is_taken_from_the_environment_of_the_other_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = handle_of(settings_from(**PLACE, proxy="http://user:hunter2@proxy:3128"))

    monkeypatch.setenv("http_proxy", "http://me:mine@proxy:3128")
    assert clone_of(handle).proxy == "http://me:mine@proxy:3128"
    monkeypatch.setenv("http_proxy", "http://me:mine@elsewhere:3128")
    assert clone_of(handle).proxy == "http://proxy:3128"


def test_headers_that_the_clone_lacks_are_logged_by_name(caplog: pytest.LogCaptureFixture) -> None:
    headers = {"X-Team": "blue", "X-Token": "hunter2", "Cookie": "hunter2"}
    handle = handle_of(settings_from(**PLACE, default_headers=headers))

    with caplog.at_level(logging.WARNING):
        clone = clone_of(handle, default_headers_overrides={"Cookie": "mine"})

    assert clone.default_headers == {"X-Team": "blue", "Cookie": "mine"}
    assert "the headers X-Token, whose" in caplog.text
    assert "default_headers_overrides" in caplog.text


def test_a_handle_of_an_earlier_release_is_read() -> None:
    known = {
        "base_url": "http://local",
        "session_id": "session-0",
        "sampling_session_id": "sampler-0",
        "headers": {"X-Team": "blue"},
        "record_stability_info": True,
        "flags": {},
        "dynamic_flags": {},
    }
    handle = base64.urlsafe_b64encode(json.dumps(known).encode()).decode()

    clone = clone_of(handle)

    assert clone == settings_from(
        base_url="http://local", api_key="tml-second", default_headers={"X-Team": "blue"}
    )


@pytest.mark.parametrize("told", [{"limiter_scope": "galaxy"}, {"retry": {"total_s": -1}}])
def test_a_handle_with_unknown_settings_is_rejected(told: dict[str, Any]) -> None:
    handle = SamplerHandle(base_url="http://local", session_id="s", sampling_session_id="s")
    plain = json.loads(base64.urlsafe_b64decode(handle.to_text()))

    text = base64.urlsafe_b64encode(json.dumps({**plain, **told}).encode()).decode()

    with pytest.raises(ValidationError):
        clone_of(text)
