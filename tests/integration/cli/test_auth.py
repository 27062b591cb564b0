"""Signing in and out, and what is told of the credential."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.cli.command import Commands
from tinsmith.testing import ScriptedService, running_service

NO_KEY: dict[str, str | None] = {"TINKER_API_KEY": None}


@pytest.fixture
def tinsmith(service: ScriptedService, tmp_path: pathlib.Path) -> Commands:
    """The command without a key in its environment."""
    commands = Commands(service, tmp_path)
    del commands.environment["TINKER_API_KEY"]
    return commands


def credentials_of(tinsmith: Commands) -> pathlib.Path:
    return tinsmith.home / ".tinker" / "credentials.json"


def test_a_login_is_verified_stored_privately_and_used(
    tinsmith: Commands, service: ScriptedService
) -> None:
    before = tinsmith.run("model", "list")
    login = tinsmith.run("auth", "login", text=f"{service.api_key}\n")
    after = tinsmith.run("model", "list")

    file = credentials_of(tinsmith)
    assert before.status == 1
    assert login.status == 0, login.err
    assert login.out.startswith("Logged in as default@tinsmith.invalid (default).")
    assert after.status == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert service.api_key not in login.out + login.err
    asked = service.requests("get_api_key")
    assert [one.headers["x-api-key"] for one in asked] == [service.api_key]


def test_the_official_sdk_can_read_the_credentials_file(
    tinsmith: Commands, service: ScriptedService
) -> None:
    from tinker.lib.credentials import JsonCredentialStore

    tinsmith.run("auth", "login", text=service.api_key)

    store = JsonCredentialStore(credentials_of(tinsmith))
    record = store.get_default_key()
    assert str(store.get_default_key_id()).isdigit()
    assert record is not None
    assert (record.type, record.key, record.name) == ("manual", service.api_key, "test key")


def test_after_a_login_commands_and_programs_use_its_base_url(
    tinsmith: Commands, service: ScriptedService
) -> None:
    tinsmith.run("auth", "login", text=service.api_key)
    del tinsmith.environment["TINKER_BASE_URL"]

    listed = tinsmith.run("model", "list")
    elsewhere = tinsmith.run("model", "list", "--base-url", "http://elsewhere.invalid")
    lines = "import tinsmith; print(tinsmith.ServiceClient().get_server_capabilities())"
    program = subprocess.run(
        [sys.executable, "-c", lines],
        env=tinsmith.environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert listed.status == 0, listed.err
    assert "no credential" in elsewhere.err
    assert program.returncode == 0, program.stderr
    assert len(service.requests("get_server_capabilities")) == 2


def test_a_key_that_the_service_rejects_is_not_stored(tinsmith: Commands) -> None:
    ended = tinsmith.run("auth", "login", "-f", "json", text="tml-wrong\n")

    assert (ended.status, ended.out) == (1, "")
    assert ended.error["status"] == 401
    assert not credentials_of(tinsmith).exists()
    assert "tml-wrong" not in ended.err


@pytest.mark.parametrize("text", ["", "\n", "hunter2\n", "tml-\x1b[2J\n"])
def test_a_malformed_key_is_rejected_without_being_sent_or_printed(
    tinsmith: Commands, service: ScriptedService, text: str
) -> None:
    ended = tinsmith.run("auth", "login", text=text)

    assert ended.status == 2
    assert "invalid API key" in ended.err
    assert "hunter2" not in ended.err
    assert service.requests() == []


def test_a_second_login_asks_to_log_out_first(tinsmith: Commands, service: ScriptedService) -> None:
    tinsmith.run("auth", "login", text=service.api_key)

    ended = tinsmith.run("auth", "login", text=service.api_key)

    assert ended.status == 1
    assert "tinsmith auth logout" in ended.err


def test_a_logout_forgets_a_pasted_key_but_does_not_delete_it_on_the_server(
    tinsmith: Commands, service: ScriptedService
) -> None:
    tinsmith.run("auth", "login", text=service.api_key)

    ended = tinsmith.run("auth", "logout", "-f", "json")
    again = tinsmith.run("auth", "logout")

    assert ended.json == {"key_name": "test key", "deleted_on_server": False}
    assert service.requests("delete_api_key") == []
    assert json.loads(credentials_of(tinsmith).read_text()) == {"version": 1, "keys": {}}
    assert again.status == 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_logout_deletes_a_key_that_was_made_for_this_machine(
    tinsmith: Commands, service: ScriptedService, is_refused: bool
) -> None:
    file = credentials_of(tinsmith)
    file.parent.mkdir()
    record = {"type": "generated", "key": service.api_key, "name": "mine"}
    other = {"type": "manual", "key": "tml-other", "name": "other"}
    stored = {"version": 1, "default": "7", "keys": {"7": record, "8": other}}
    file.write_text(json.dumps(stored))
    if is_refused:
        service.faults.add(on="delete_api_key", times=None, status=403)

    ended = tinsmith.run("auth", "logout")

    assert ended.status == int(is_refused)
    assert len(service.requests("delete_api_key")) == 1
    assert json.loads(file.read_text())["keys"] == {"8": other}
    assert ("/keys/7" in ended.err) == is_refused


@pytest.mark.parametrize("text", ["tml-secret", '{"version": 2}', '{"keys": 3}', "[]"])
def test_an_unknown_credentials_file_is_neither_printed_nor_overwritten(
    tinsmith: Commands, service: ScriptedService, text: str
) -> None:
    file = credentials_of(tinsmith)
    file.parent.mkdir()
    file.write_text(text)

    ended = tinsmith.run("auth", "login", text=service.api_key)

    assert ended.status == 1
    assert "tml-secret" not in ended.out + ended.err
    assert file.read_text() == text


def test_the_status_is_ok_with_a_working_key(tinsmith: Commands, service: ScriptedService) -> None:
    with_key = {"TINKER_API_KEY": service.api_key}

    shown = tinsmith.run("auth", "status", environment=with_key)
    plain = tinsmith.run("auth", "status", "-f", "json", environment=with_key)

    assert shown.out == "Credentials available: yes\nTinker accessible: yes\n"
    assert plain.json == {"credentials_available": True, "tinker_accessible": True}


def test_a_missing_key_is_not_reported_as_a_connection_error(tinsmith: Commands) -> None:
    status = tinsmith.run("auth", "status", "-f", "json")
    other = tinsmith.run("run", "list", "-f", "json")

    assert status.status == 1
    assert status.json == {"credentials_available": False, "tinker_accessible": False}
    for ended in (status, other):
        assert ended.status == 1
        assert "key" in ended.error["message"]
        assert "TINKER_API_KEY" in ended.error["remedy"]
        assert "onnect" not in ended.err


def test_a_malformed_key_is_reported_and_never_printed(tinsmith: Commands) -> None:
    ended = tinsmith.run("run", "list", environment={"TINKER_API_KEY": "hunter2"})

    assert ended.status == 1
    assert "tml-" in ended.err
    assert "onnect" not in ended.err
    assert "hunter2" not in ended.err


def test_a_rejected_key_makes_the_status_command_fail(tinsmith: Commands) -> None:
    ended = tinsmith.run(
        "auth", "status", "-f", "json", environment={"TINKER_API_KEY": "tml-wrong"}
    )

    assert ended.status == 1
    assert ended.json == {"credentials_available": True, "tinker_accessible": False}
    assert ended.error["status"] == 401


@pytest.fixture
def exchanging() -> Iterator[ScriptedService]:
    """A service that exchanges keys for tokens, which say whose they are."""
    with running_service(pjwt_auth_enabled=True) as service:
        yield service


def test_whoami_shows_whose_credential_is_used(
    exchanging: ScriptedService, tmp_path: pathlib.Path
) -> None:
    tinsmith = Commands(exchanging, tmp_path)

    shown = tinsmith.run("auth", "whoami")
    plain = tinsmith.run("auth", "whoami", "-f", "json")

    assert shown.out.splitlines()[1] == "Email         default@tinsmith.invalid"
    assert plain.json == {
        "user_urn": "tml:user:default",
        "org_urn": "tml:organization:default",
        "email": "default@tinsmith.invalid",
    }


def test_whoami_with_a_plain_key_fails_with_a_clear_message(
    tinsmith: Commands, service: ScriptedService
) -> None:
    ended = tinsmith.run("auth", "whoami", environment={"TINKER_API_KEY": service.api_key})

    assert ended.status == 1
    assert "does not identify an account" in ended.err
    assert "Traceback" not in ended.err


def test_a_typed_key_is_not_echoed(tinsmith: Commands, service: ScriptedService) -> None:
    leader, follower = pty.openpty()
    process = tinsmith.start("auth", "login", stdin=follower, stderr=follower)
    os.close(follower)
    shown = b""
    while b"API key: " not in shown:
        shown += os.read(leader, 1000)
    os.write(leader, f"{service.api_key}\n".encode())
    out, _ = process.communicate(timeout=60)
    try:
        while chunk := os.read(leader, 1000):
            shown += chunk
    except OSError:  # the other side is closed
        pass
    os.close(leader)

    assert process.returncode == 0, shown
    assert "Logged in" in out
    assert service.api_key.encode() not in shown
