"""ClientCredentials: where they are found, how they are renewed, and that they are not shown."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pathlib
import pickle

import pytest

from tinsmith.client.auth import (
    RENEWAL_PAUSE_S,
    ClientCredentials,
    NoIdentityError,
    command_output,
    static_key,
    stored_login,
)
from tinsmith.client.settings import ClientSettings, Secret, settings_from
from tinsmith.errors import AuthenticationError, InternalServerError, TinkerError, ValidationError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def a_token(number: int = 0, **claims: object) -> str:
    body = base64.urlsafe_b64encode(json.dumps({"jti": number, **claims}).encode()).decode()
    return f"eyJh.{body.rstrip('=')}.x"


def some_settings(**environment: str) -> ClientSettings:
    return settings_from(base_url="http://127.0.0.1:1", environment=environment)


def a_file(folder: pathlib.Path, key: str, **further: str) -> pathlib.Path:
    file = folder / "credentials.json"
    file.write_text(
        json.dumps(
            {
                "version": 1,
                "default": "k",
                "keys": {"k": {"type": "manual", "key": key, "name": "", **further}},
            }
        )
    )
    return file


class Exchanges:
    """Gives out tokens of one lifetime, and counts."""

    def __init__(self, clock: Clock, lifetime_s: float) -> None:
        self.clock, self.lifetime_s = clock, lifetime_s
        self.given: list[str] = []
        self.broken = False

    async def __call__(self, _: Secret) -> str:
        await asyncio.sleep(0)
        if self.broken:
            raise InternalServerError("down")
        self.given.append(a_token(len(self.given), exp=self.clock.now + self.lifetime_s))
        return self.given[-1]


# Where they are found


def test_the_environment_s_key_takes_precedence_over_the_stored_one(tmp_path: pathlib.Path) -> None:
    file = a_file(tmp_path, "tml-stored")

    assert static_key(some_settings(TINKER_API_KEY="tml-a"), file) == Secret("tml-a")
    assert static_key(some_settings(), file) == Secret("tml-stored")


def test_a_stored_key_is_sent_only_to_the_service_that_accepted_it(
    tmp_path: pathlib.Path,
) -> None:
    here = some_settings().base_url

    mine = a_file(tmp_path, "tml-stored", base_url=here)
    assert static_key(some_settings(), mine) == Secret("tml-stored")
    other = a_file(tmp_path, "tml-stored", base_url="https://other")
    assert static_key(some_settings(), other) is None


def test_a_credential_command_takes_precedence_over_a_stored_key(tmp_path: pathlib.Path) -> None:
    file = a_file(tmp_path, "tml-stored")

    assert static_key(some_settings(TINKER_CREDENTIAL_CMD="echo x"), file) is None


def test_a_malformed_key_is_rejected_unless_there_is_a_credential_command(
    tmp_path: pathlib.Path,
) -> None:
    with pytest.raises(TinkerError, match="tml-"):
        static_key(some_settings(TINKER_API_KEY="sk-mine"))
    with pytest.raises(TinkerError, match=r"credentials\.json") as told:
        static_key(some_settings(), a_file(tmp_path, "sk-mine"))
    assert "sk-mine" not in str(told.value)

    both = some_settings(TINKER_API_KEY="sk-mine", TINKER_CREDENTIAL_CMD="echo x")
    assert static_key(both) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"default": null}', '{"default": "a", "keys": {}}', '{"keys": 3}']
)
def test_a_credentials_file_without_a_default_key_holds_no_key(
    tmp_path: pathlib.Path, text: str
) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(text)

    assert stored_login(file) is None
    assert stored_login(tmp_path / "missing.json") is None


def test_a_missing_credential_says_what_to_do(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    with pytest.raises(AuthenticationError, match="TINKER_API_KEY"):
        ClientCredentials(settings_from(base_url="http://elsewhere.invalid", environment={}))
    for local in ("http://127.0.0.1:1", "https://localhost", "http://[::1]:8000", "embedded"):
        assert ClientCredentials(settings_from(base_url=local, environment={})).current() == ""


# The command


def test_a_command_s_output_is_the_credential() -> None:
    assert asyncio.run(command_output(Secret("echo ' a-token '"))) == Secret("a-token")


@pytest.mark.parametrize("command", ["true", "exit 3", "echo half; exit 3", "no-such-command-here"])
def test_a_failing_credential_command_is_reported_without_its_output(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TinkerError, match="TINKER_CREDENTIAL_CMD") as told:
        asyncio.run(command_output(Secret(command)))

    assert "half" not in str(told.value)
    capfd.readouterr()


def test_a_credential_command_that_hangs_is_killed(tmp_path: pathlib.Path) -> None:
    noted = tmp_path / "process"
    command = Secret(f"echo $$ > '{noted}'; exec sleep 600")

    with pytest.raises(TinkerError, match="did not finish"):
        asyncio.run(command_output(command, timeout_s=2.0))

    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


# Tokens


def test_a_token_is_exchanged_once_for_many_concurrent_callers() -> None:
    async def scenario() -> int:
        clock = Clock()
        exchanges = Exchanges(clock, lifetime_s=3600)
        credentials = ClientCredentials(some_settings(TINKER_API_KEY="tml-a"), clock=clock)
        await asyncio.gather(*(credentials.renew(exchanges) for _ in range(50)))
        assert credentials.current() == exchanges.given[0]
        return len(exchanges.given)

    assert asyncio.run(scenario()) == 1


def test_a_token_is_stale_a_minute_before_it_expires() -> None:
    async def scenario() -> None:
        clock = Clock()
        credentials = ClientCredentials(some_settings(TINKER_API_KEY="tml-a"), clock=clock)
        assert not credentials.is_stale()
        await credentials.renew(Exchanges(clock, lifetime_s=3600))

        clock.now += 3600 - 61
        assert not credentials.is_stale()
        clock.now += 2
        assert credentials.is_stale()

    asyncio.run(scenario())


@pytest.mark.parametrize("lifetime_s", [2.0, 60.0, 300.0])
def test_short_lived_tokens_are_not_renewed_in_a_tight_loop(lifetime_s: float) -> None:
    async def scenario() -> None:
        clock = Clock()
        exchanges = Exchanges(clock, lifetime_s)
        credentials = ClientCredentials(some_settings(TINKER_API_KEY="tml-a"), clock=clock)
        await credentials.renew(exchanges)

        assert not credentials.is_stale()
        assert credentials.next_renewal_s() >= 60
        clock.now += lifetime_s
        assert credentials.is_stale()

    asyncio.run(scenario())


@pytest.mark.parametrize("claims", [{}, {"exp": -1}, {"exp": 5}, {"exp": "soon"}, {"exp": None}])
def test_a_token_that_already_looks_expired_on_arrival_is_still_used(
    claims: dict[str, object],
) -> None:
    """Our clock may be wrong; to ask anew for each request would help nobody."""

    async def scenario() -> None:
        clock = Clock()
        credentials = ClientCredentials(some_settings(TINKER_API_KEY="tml-a"), clock=clock)

        async def exchange(_: Secret) -> str:
            return a_token(**claims)  # type: ignore[arg-type]

        await credentials.renew(exchange)

        assert not credentials.is_stale()
        clock.now += 61
        assert credentials.is_stale()

    asyncio.run(scenario())


def test_a_failed_renewal_keeps_the_old_token_and_backs_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        clock, pauses = Clock(), Clock()
        exchanges = Exchanges(clock, lifetime_s=100)
        settings = some_settings(TINKER_API_KEY="tml-a")
        credentials = ClientCredentials(settings, clock=clock, pause_clock=pauses)
        await credentials.renew(exchanges)
        exchanges.broken = True
        clock.now += 99

        await credentials.renew(exchanges)

        assert credentials.current() == exchanges.given[0]
        assert not credentials.is_stale()
        pauses.now += RENEWAL_PAUSE_S
        assert credentials.is_stale()

    asyncio.run(scenario())
    assert "could not renew" in caplog.text


def test_a_clock_set_back_does_not_prolong_the_back_off_after_a_failed_renewal() -> None:
    async def scenario() -> None:
        clock, pauses = Clock(), Clock()
        exchanges = Exchanges(clock, lifetime_s=3600)
        settings = some_settings(TINKER_API_KEY="tml-a")
        credentials = ClientCredentials(settings, clock=clock, pause_clock=pauses)
        await credentials.renew(exchanges)
        exchanges.broken = True
        await credentials.renew(exchanges, refused=credentials.token)
        exchanges.broken = False
        clock.now -= 86400
        pauses.now += RENEWAL_PAUSE_S

        await credentials.renew(exchanges, refused=credentials.token)

        assert credentials.token == exchanges.given[1]

    asyncio.run(scenario())


def test_the_first_exchange_must_succeed() -> None:
    async def scenario() -> None:
        exchanges = Exchanges(Clock(), lifetime_s=100)
        exchanges.broken = True
        await ClientCredentials(some_settings(TINKER_API_KEY="tml-a")).renew(exchanges)

    with pytest.raises(InternalServerError):
        asyncio.run(scenario())


def test_a_rejected_token_is_replaced_once_for_all_callers() -> None:
    async def scenario() -> None:
        clock = Clock()
        exchanges = Exchanges(clock, lifetime_s=3600)
        credentials = ClientCredentials(some_settings(TINKER_API_KEY="tml-a"), clock=clock)
        await credentials.renew(exchanges)
        first = credentials.token

        await asyncio.gather(*(credentials.renew(exchanges, refused=first) for _ in range(20)))

        assert len(exchanges.given) == 2
        assert credentials.token == exchanges.given[1]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_short_lived_token_is_replaced_once_for_all_callers(
    is_refused: bool,
) -> None:
    """One that lives for five minutes is near its end as soon as it comes."""

    async def scenario() -> None:
        clock = Clock()
        exchanges = Exchanges(clock, lifetime_s=300)
        credentials = ClientCredentials(some_settings(TINKER_API_KEY="tml-a"), clock=clock)
        await credentials.renew(exchanges)
        refused = credentials.token if is_refused else None
        clock.now += 0 if is_refused else 299

        await asyncio.gather(*(credentials.renew(exchanges, refused=refused) for _ in range(20)))

        assert len(exchanges.given) == 2
        if is_refused:  # to somebody who hears of it later
            await credentials.renew(exchanges, refused=refused)
            assert len(exchanges.given) == 2

    asyncio.run(scenario())


def test_a_command_that_fails_later_keeps_the_old_token(tmp_path: pathlib.Path) -> None:
    once = tmp_path / "once"
    command = f"test ! -e {once} && touch {once} && echo fresh"

    async def scenario() -> None:
        clock = Clock()
        exchanges = Exchanges(clock, lifetime_s=100)
        credentials = ClientCredentials(some_settings(TINKER_CREDENTIAL_CMD=command), clock=clock)
        await credentials.renew(exchanges)
        clock.now += 99
        await credentials.renew(exchanges)
        assert credentials.current() == exchanges.given[0]

    asyncio.run(scenario())


# Whose they are


def test_a_user_s_own_jwt_names_its_owner_if_the_service_issued_it() -> None:
    issued = a_token(iss="passport-1", sub="me", org_id="us", email="")
    foreign = a_token(iss="https://elsewhere", sub="me", org_id="us")

    me = ClientCredentials(some_settings(TINKER_API_KEY=issued)).whoami()

    assert (me.user_urn, me.org_urn, me.email) == ("me", "tml:organization:us", None)
    with pytest.raises(NoIdentityError):
        ClientCredentials(some_settings(TINKER_API_KEY=foreign)).whoami()


# Secrets


def test_s40_settings_show_no_secret_and_are_not_pickled() -> None:
    secrets = {
        "TINKER_API_KEY": "tml-secret-1",
        "TINKER_CREDENTIAL_CMD": "echo secret-2",
        "CLOUDFLARE_ACCESS_CLIENT_SECRET": "secret-3",
    }
    settings = settings_from(
        base_url="http://127.0.0.1:1", environment=secrets, proxy="http://me:secret-4@proxy"
    )

    shown = f"{settings!r} {settings} {settings.api_key} {settings.default_headers}"

    assert "secret-" not in shown
    with pytest.raises(TypeError):
        pickle.dumps(settings)


def test_s40_a_credential_in_the_base_url_is_rejected_and_not_shown() -> None:
    with pytest.raises(ValidationError, match="api_key") as told:
        settings_from(base_url="https://me:secret@host", environment={})

    assert "secret" not in str(told.value)
