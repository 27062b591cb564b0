"""Where the settings of a client come from."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.client.settings import settings_from
from tinsmith.errors import ValidationError

ADDRESS = "http://127.0.0.1:8000"


def test_tags_are_read_from_the_environment() -> None:
    settings = settings_from(base_url=ADDRESS, environment={"TINKER_TAGS": "one,two"})

    assert settings.tags == ("one", "two")


def test_a_tags_argument_takes_precedence_over_the_environment() -> None:
    environment = {"TINKER_TAGS": "one,two"}

    settings = settings_from(base_url=ADDRESS, environment=environment, tags=("mine",))

    assert settings.tags == ("mine",)


def test_cloudflare_headers_come_from_the_environment_unless_the_caller_sets_them() -> None:
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


def test_a_string_is_rejected_as_a_list_of_tags() -> None:
    with pytest.raises(ValidationError, match="tags is 'mine'; pass a list of strings"):
        settings_from(base_url=ADDRESS, environment={}, tags="mine")


@pytest.mark.parametrize(
    "url", [8000, "ftp://host", "http://", "http://h:x", "http://bücher..example"]
)
def test_an_invalid_base_url_is_rejected_with_a_remedy(url: Any) -> None:
    with pytest.raises(ValidationError, match="is not an http or https address; pass one like"):
        settings_from(base_url=url, environment={})


def test_a_base_url_may_have_a_non_ascii_host_name() -> None:
    url = "http://bücher.example:8000"

    assert settings_from(base_url=url, environment={}).base_url == url
