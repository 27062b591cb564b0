"""Where the settings of a client come from."""

from __future__ import annotations

from tinsmith.client.settings import settings_from

ADDRESS = "http://127.0.0.1:8000"


def test_tags_are_those_of_the_environment() -> None:
    settings = settings_from(base_url=ADDRESS, environment={"TINKER_TAGS": "one,two"})

    assert settings.tags == ("one", "two")


def test_tags_that_are_an_argument_count_before_the_environment() -> None:
    environment = {"TINKER_TAGS": "one,two"}

    settings = settings_from(base_url=ADDRESS, environment=environment, tags=("mine",))

    assert settings.tags == ("mine",)
