from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.client import embedding
from tinsmith.client.embedding import chosen_url
from tinsmith.client.settings import EMBEDDED, settings_from
from tinsmith.errors import ValidationError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a stored key."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def _no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the interpreter's exit alone: nothing is started here."""
    monkeypatch.setattr(embedding._choices, "is_taken", True)


def test_without_any_setting_the_embedded_service_is_used() -> None:
    assert chosen_url(None, None, {}) == EMBEDDED


@pytest.mark.parametrize(
    ("base_url", "api_key", "environment"),
    [
        ("http://h", None, {}),
        (None, "tml-x", {}),
        (None, None, {"TINKER_BASE_URL": "http://h"}),
        (None, None, {"TINKER_API_KEY": "tml-x"}),
        (None, None, {"TINKER_CREDENTIAL_CMD": "echo x"}),
    ],
)
def test_any_configured_service_is_respected(
    base_url: str | None, api_key: str | None, environment: dict[str, str]
) -> None:
    assert chosen_url(base_url, api_key, environment) == base_url


@pytest.mark.parametrize("stored", ["tml-stored", "not-a-key"])
def test_a_stored_login_selects_the_hosted_service(home: Path, stored: str) -> None:
    """Also with a key that is none: that is told when it is used."""
    (home / ".tinker").mkdir()
    text = f'{{"default": "a", "keys": {{"a": {{"key": "{stored}"}}}}}}'
    (home / ".tinker" / "credentials.json").write_text(text)

    assert chosen_url(None, None, {}) is None


def test_without_the_server_extra_only_an_explicit_embedded_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedding, "NEEDED", ("numpy", "no_such_package"))
    monkeypatch.setattr(embedding, "NEEDED_UNASKED", ("numpy", "no_such_package"))

    assert chosen_url(None, None, {}) is None
    for base_url, environment in ((EMBEDDED, {}), (None, {"TINKER_BASE_URL": EMBEDDED})):
        with pytest.raises(ValidationError, match=r"pip install 'tinsmith\[server\]'"):
            chosen_url(base_url, None, environment)


def test_a_key_for_another_service_is_not_sent_to_the_embedded_one() -> None:
    environment = {
        "TINKER_API_KEY": "tml-hosted",
        "TINKER_CREDENTIAL_CMD": "echo x",
        "CLOUDFLARE_ACCESS_CLIENT_SECRET": "s",
    }

    settings = settings_from(base_url=EMBEDDED, environment=environment)

    assert settings.api_key is None
    assert settings.credential_command is None
    assert settings.default_headers == {}
