"""Where the settings of a client come from."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.client.settings import settings_from
from tinsmith.errors import ValidationError

ADDRESS = "http://127.0.0.1:8000"


def test_tags_are_those_of_the_environment() -> None:
    settings = settings_from(base_url=ADDRESS, environment={"TINKER_TAGS": "one,two"})

    assert settings.tags == ("one", "two")


def test_tags_that_are_an_argument_count_before_the_environment() -> None:
    environment = {"TINKER_TAGS": "one,two"}

    settings = settings_from(base_url=ADDRESS, environment=environment, tags=("mine",))

    assert settings.tags == ("mine",)


def test_b15_cloudflare_s_headers_are_those_of_the_environment_under_the_caller_s_own() -> None:
    environment = {
        "CLOUDFLARE_ACCESS_CLIENT_ID": "an id",
        "CLOUDFLARE_ACCESS_CLIENT_SECRET": "a secret",
    }
    mine = {"CF-Access-Client-Id": "mine", "x-team": "blue"}

    plain = settings_from(base_url=ADDRESS, environment=environment)
    overridden = settings_from(base_url=ADDRESS, environment=environment, default_headers=mine)

    assert plain.default_headers == {
        "CF-Access-Client-Id": "an id",
        "CF-Access-Client-Secret": "a secret",
    }
    assert overridden.default_headers == {"CF-Access-Client-Secret": "a secret", **mine}


def test_a_text_is_no_list_of_tags() -> None:
    with pytest.raises(ValidationError, match="tags is 'mine'; give a list of texts"):
        settings_from(base_url=ADDRESS, environment={}, tags="mine")


@pytest.mark.parametrize(
    "url", [8000, "ftp://host", "http://", "http://h:x", "http://bücher..example"]
)
def test_an_address_that_is_none_is_refused_with_the_remedy(url: Any) -> None:
    with pytest.raises(ValidationError, match="is not an http or https address; give one like"):
        settings_from(base_url=url, environment={})


def test_an_address_may_have_a_name_outside_ascii() -> None:
    url = "http://bücher.example:8000"

    assert settings_from(base_url=url, environment={}).base_url == url
