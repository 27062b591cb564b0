"""The credentials of a client, and the short-lived tokens that a service may exchange them for.

They come from, in this order: the `api_key` argument, `TINKER_API_KEY`, the command in
`TINKER_CREDENTIAL_CMD`, the default key of `~/.tinker/credentials.json`. A key starts with `tml-`,
or with `eyJ` if it is a JWT; the output of the command is used as it is. The embedded service needs
none. If none is found, a service on this machine is called without one.

Where the service asks for it (`pjwt_auth_enabled`) the credential is exchanged for a JWT, which is
renewed well before it expires, and once if the service refuses it nevertheless. If a renewal fails,
the old token stays in use.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from tinsmith.client.settings import EMBEDDED, HOSTED_URL, ClientSettings, Secret, is_loopback
from tinsmith.client.waits import say
from tinsmith.errors import AuthenticationError, DecodeError, TinkerError
from tinsmith.types.service import WhoamiResponse
from tinsmith.wire import json_format

_log = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 60.0
RENEW_BEFORE_S = 300.0
USABLE_BEFORE_S = 60.0
RENEWAL_PAUSE_S = 60.0
RENEWAL_TIMEOUT_S = 10.0
"""How long calls may wait for a new token while there is an old one."""

CREDENTIALS_FILE = "~/.tinker/credentials.json"


class NoIdentityError(TinkerError, RuntimeError):
    """The credential is valid, but does not identify an account.

    Use another one; a service without keys has no accounts.
    """


RUN_HERE = (
    "or run the service in this process: `pip install 'tinsmith[server]'`, then "
    "base_url='embedded', or --base-url embedded for a command"
)

NO_KEY = Secret("")
"""Sent without a key: to an embedded service, and to one on this machine."""

Exchange = Callable[[Secret], Awaitable[str]]
"""Exchanges a credential for a JWT."""


def static_key(
    settings: ClientSettings, file: str | os.PathLike[str] = CREDENTIALS_FILE
) -> Secret | None:
    """The key that can be found without running a command, if there is one.

    Raises:
        TinkerError: The key is malformed.
    """
    if settings.base_url == EMBEDDED and settings.api_key is None:
        return NO_KEY
    if settings.api_key is not None:
        if settings.credential_command is not None and not _is_key(settings.api_key):
            return None
        return _checked(settings.api_key, "see api_key and TINKER_API_KEY")
    if settings.credential_command is not None:
        return None
    login = stored_login(file)
    return login.key if login is not None and login.is_for(settings.base_url) else None


class StoredLogin(msgspec.Struct, frozen=True):
    """A stored key, and the service that accepted it."""

    key: Secret
    base_url: str | None
    """None if unknown: the official command line does not store it."""

    def is_for(self, base_url: str) -> bool:
        """Whether the key may be sent to this address."""
        return self.base_url in (None, base_url)


def stored_login(file: str | os.PathLike[str] = CREDENTIALS_FILE) -> StoredLogin | None:
    """The default key of the credentials file, if there is a readable one.

    Raises:
        TinkerError: The key is malformed.
    """
    # Imported here: a program that passes its key does not need them.
    import json
    import pathlib

    try:
        stored = json.loads(pathlib.Path(file).expanduser().read_text(encoding="utf-8"))
        record = stored["keys"][stored["default"]]
        key, base_url = Secret(str(record["key"])), record.get("base_url")
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        return None  # RuntimeError: there is no home directory
    found = _checked(key, f"see {file}")
    return StoredLogin(found, base_url if isinstance(base_url, str) else None)


def has_credential(environment: Mapping[str, str]) -> bool:
    """Whether a client would find a credential without an argument."""
    if _names_credential(environment):
        return True
    try:
        return stored_login() is not None
    except TinkerError:  # there is one; using it raises the error
        return True


def address_of_login(environment: Mapping[str, str]) -> str | None:
    """The address of the last `tinsmith auth login`, for clients without address and credential."""
    if environment.get("TINKER_BASE_URL") or _names_credential(environment):
        return None
    try:
        login = stored_login()
    except TinkerError:
        return None
    return None if login is None else login.base_url


def _names_credential(environment: Mapping[str, str]) -> bool:
    return any(environment.get(name) for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"))


def _key_of_keyless(settings: ClientSettings) -> Secret | None:
    """No key for a service on this machine, which says so if it needs one."""
    if settings.credential_command is not None:
        return None
    is_local = settings.unix_socket is not None or is_loopback(settings.base_url)
    return NO_KEY if is_local else None


def _is_key(key: Secret) -> bool:
    return key.reveal().startswith(("tml-", "eyJ"))


def _checked(key: Secret, where: str) -> Secret:
    if not _is_key(key):
        raise TinkerError(
            "invalid API key",
            remedy=f"expected a key that starts with tml-, or with eyJ if it is a JWT; {where}",
        )
    return key


async def command_output(command: Secret, timeout_s: float = COMMAND_TIMEOUT_S) -> Secret:
    """The output of the user's credential command.

    Raises:
        TinkerError: It failed, printed nothing, or timed out.
    """
    try:
        process = await asyncio.create_subprocess_shell(
            command.reveal(),
            stdout=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # so that its children can be killed too
        )
    except OSError as exc:
        raise TinkerError("the command in TINKER_CREDENTIAL_CMD could not be run") from exc
    say("waiting for the command in TINKER_CREDENTIAL_CMD")
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError as exc:
        raise TinkerError(
            f"the command in TINKER_CREDENTIAL_CMD did not finish within {timeout_s:g} s"
        ) from exc
    finally:
        if process.returncode is None:
            _kill(process)
            await process.wait()
    text = output.decode("utf-8", "replace").strip()
    if process.returncode or not text:
        raise TinkerError(
            f"the command in TINKER_CREDENTIAL_CMD exited with status {process.returncode} "
            "and printed "
            f"{'something' if text else 'nothing'}",
            remedy="it must print the credential and exit with status 0",
        )
    return Secret(text)


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:  # Windows
            process.kill()


class ClientCredentials:
    """The credential that a client sends with each request.

    Args:
        settings: Where the credential comes from.
        clock: Wall-clock time, in which tokens say when they expire.
        pause_clock: A monotonic clock, for the time since a failed renewal.
    """

    def __init__(
        self,
        settings: ClientSettings,
        *,
        clock: Callable[[], float] = time.time,
        pause_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._pause_clock = pause_clock
        self._static = static_key(settings) or _key_of_keyless(settings)
        self._raw = self._static
        self.token: str | None = None
        """The JWT that is sent instead of the credential, if there is one."""
        self._expires_at = float("inf")
        self._usable_until = float("inf")
        self._renewal: asyncio.Lock | None = None
        self._failed_at = float("-inf")
        if self._static is None and settings.credential_command is None:
            # With the service's packages, a client without settings would have used that.
            without = f"; {RUN_HERE}" if settings.base_url == HOSTED_URL else ""
            raise AuthenticationError(
                "no credential was found",
                remedy=f"pass api_key, or set TINKER_API_KEY{without}",
            )

    def current(self) -> str:
        """What to send: the JWT if there is one, else the credential that `open` found."""
        if self.token is not None:
            return self.token
        return "" if self._raw is None else self._raw.reveal()

    def is_stale(self) -> bool:
        """Whether the JWT is about to expire, and should be renewed before it is sent."""
        if self.token is None:
            return False
        return self._clock() >= self._usable_until and not self._must_pause()

    async def open(self) -> Secret:
        """Find the credential for the first call, running the command if needed."""
        if self._raw is None:
            self._raw = await self.underlying()
        return self._raw

    @property
    def has_key(self) -> bool:
        """Whether there is a key, as needed for services without tokens."""
        return self._static is not None

    async def underlying(self, default_source: str = "api_key") -> Secret:
        """The long-lived credential; `default_source` may ask for the command's."""
        wants_command = default_source == "credential_cmd"
        is_jwt = self._static is not None and self._static.reveal().startswith("eyJ")
        if self._static is not None and (is_jwt or not wants_command):
            return self._static
        if self._settings.credential_command is None:
            raise AuthenticationError(
                "the service requires a credential from a command",
                remedy="set TINKER_CREDENTIAL_CMD to a command that prints it",
            )
        return await command_output(self._settings.credential_command)

    async def renew(
        self, exchange: Exchange, default_source: str = "api_key", *, refused: str | None = None
    ) -> None:
        """Get a JWT if there is none, if it is about to expire, or if it is the one `refused`.

        The first exchange must succeed; if a later one fails, the old token stays in use.
        """
        replaced = self.token if refused is None else refused
        if self._renewal is None:
            self._renewal = asyncio.Lock()
        async with self._renewal:
            # A call that waited for another exchange uses its token, however short-lived.
            if self.token != replaced or not self._should_renew(refused):
                return
            patience_s = None if self.token is None else RENEWAL_TIMEOUT_S
            try:
                async with asyncio.timeout(patience_s):
                    self._keep(await exchange(await self.underlying(default_source)))
            except (TinkerError, TimeoutError) as error:
                if self.token is None:
                    raise
                self._failed_at = self._pause_clock()
                _log.warning("could not renew the token; still using the old one: %r", error)

    def _keep(self, token: str) -> None:
        now = self._clock()
        expires_at = claims_of(token).get("exp")
        if not isinstance(expires_at, int | float) or expires_at <= now:
            # It does not say, or one of the two clocks is wrong: renew it later, not immediately.
            expires_at = now + 2 * USABLE_BEFORE_S
        self.token, self._expires_at = token, expires_at
        # A token that lives for a minute or less would else be renewed for each request.
        self._usable_until = max(expires_at - USABLE_BEFORE_S, (now + expires_at) / 2)

    def _should_renew(self, refused: str | None) -> bool:
        if self.token is None:
            return True
        if self._must_pause():
            return False
        return self.token == refused or self._remaining_s() <= RENEW_BEFORE_S

    def _must_pause(self) -> bool:
        """Whether a renewal failed a moment ago."""
        return self._pause_clock() - self._failed_at < RENEWAL_PAUSE_S

    def _remaining_s(self) -> float:
        return self._expires_at - self._clock()

    def next_renewal_s(self) -> float:
        """Seconds until the next renewal; at least a minute, whatever its lifetime."""
        return max(USABLE_BEFORE_S, self._remaining_s() - RENEW_BEFORE_S)

    def whoami(self) -> WhoamiResponse:
        """The account that the credential belongs to, according to its JWT.

        Raises:
            NoIdentityError: The credential is a plain key, or a JWT of another kind.
        """
        claims = claims_of(self.current())
        is_given_by_service = self.token is not None
        if not is_given_by_service and not str(claims.get("iss", "")).startswith("passport-"):
            claims = {}  # it describes another service's users
        if not {"sub", "org_id"} <= claims.keys():
            raise NoIdentityError(
                "the credential does not identify an account",
                remedy="use a service that exchanges keys for tokens",
            )
        return WhoamiResponse(
            user_urn=str(claims["sub"]),
            org_urn=f"tml:organization:{claims['org_id']}",
            email=str(claims["email"]) if claims.get("email") else None,
        )


def claims_of(token: str) -> dict[str, Any]:
    """The claims of a JWT, without checking its signature; empty if it is not a JWT."""
    parts = token.split(".")
    if len(parts) != 3:
        return {}
    try:
        text = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        claims = json_format.decode_any(text)
    except (binascii.Error, ValueError, DecodeError, msgspec.MsgspecError):
        return {}
    return claims if isinstance(claims, dict) else {}
