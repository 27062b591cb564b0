"""Authentication by a key, or by a short-lived token that was issued for one.

`keys.py` has the keys. A token is a JWT signed with the service's secret. It names the digest of
its key, so it ends when the key is revoked. Both come in the `X-API-Key` header.

Clients decide by the wall clock when a token has expired: an official client whose token seems to
have expired requests another without a pause, and a request with an expired token fails. The
ledger's time differs from the wall clock after the clock was set, or the machine slept. So a token
has an expiry in both, and is valid until both have passed.

**Without keys** a service answers programs on its own machine, but no web pages open there. It
listens on loopback only, but a browser on that machine can reach it on behalf of any page: with a
request to 127.0.0.1, or by a host name that resolves to it (DNS rebinding). Pages are recognised by
the `Origin` header that browsers add, foreign names by `Host`. With keys neither matters: a page
has no key.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hmac
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tinsmith.errors import AuthenticationError, PermissionDeniedError
from tinsmith.service.api.keys import LONGEST_CREDENTIAL, Holder, KeyRing
from tinsmith.service.ledger.base import Ledger

ISSUER = "passport-tinsmith"
TOKEN_LIFETIME_S = 3600
_HEADER = {"alg": "HS256", "typ": "JWT"}


class Authenticator:
    """Checks credentials and issues tokens. For one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        secret: bytes,
        *,
        trusts_keyless: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._wall = wall
        self._trusts_keyless = trusts_keyless
        self._secret = secret
        self._keys = KeyRing(ledger)

    def remembered(self, credential: str | None) -> Holder | None:
        """As `holder`, from the cache; None if it must be looked up."""
        return self._keys.remembered(credential)

    async def holder(self, credential: str | None) -> Holder:
        """The holder of a credential.

        Raises:
            AuthenticationError: It is missing, unknown, revoked or expired.
        """
        if self._trusts_keyless and not credential:
            return await self._keys.owner()
        if credential is not None and credential.startswith("eyJ"):
            if await self._keys.has_keys():
                return await self._keys.holder_by_digest(self._key_of_token(credential))
            credential = None
        return await self._keys.holder(credential)

    async def has_keys(self) -> bool:
        """Whether a key was ever created; a service without one serves its own machine only."""
        return await self._keys.has_keys()

    def token(self, holder: Holder) -> str:
        """A signed token that represents this holder for an hour."""
        now = int(self._wall())
        name = holder.tenant.id
        claims = {
            "iss": ISSUER,
            "sub": f"tml:user:{name}",
            "org_id": name,
            "email": f"{name}@tinsmith.invalid",
            "iat": now,
            "exp": now + TOKEN_LIFETIME_S,
            "until": self._ledger.now() + TOKEN_LIFETIME_S,
            "key": "" if holder.key is None else holder.key.id,
        }
        signed = f"{_encoded(_HEADER)}.{_encoded(claims)}"
        return f"{signed}.{_text(self._signature(signed))}"

    def forget(self) -> None:
        """Drop cached keys, since one was changed."""
        self._keys.forget()

    def _key_of_token(self, token: str) -> str:
        """The digest of the key that a token represents, if we signed it and it has not expired."""
        signed, _, signature = token.rpartition(".")
        is_ours = (
            len(token) <= LONGEST_CREDENTIAL
            and token.isascii()
            and hmac.compare_digest(_text(self._signature(signed)), signature)
        )
        claims = _decoded(signed.partition(".")[2]) if is_ours else {}
        if claims.get("exp", 0) <= self._wall() and claims.get("until", 0) <= self._ledger.now():
            raise AuthenticationError("the token is invalid or has expired")
        return str(claims.get("key"))

    def _signature(self, signed: str) -> bytes:
        return hmac.digest(self._secret, signed.encode(), "sha256")


def _encoded(claims: dict[str, Any]) -> str:
    return _text(msgspec.json.encode(claims))


def _text(binary: bytes) -> str:
    return base64.urlsafe_b64encode(binary).rstrip(b"=").decode()


def _decoded(text: str) -> dict[str, Any]:
    try:
        binary = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        claims = msgspec.json.decode(binary)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        return {}
    return claims if isinstance(claims, dict) else {}


_REMEDY = "create a key with `tinsmith key create`"
_LOCAL = re.compile(
    r"(localhost|[\w-]+\.localhost|127(\.\d{1,3}){3}|\[::1\]|in-process)(:\d+)?", re.IGNORECASE
)


def check_local(headers: Mapping[str, str]) -> None:
    """Refuse requests of web pages.

    Args:
        headers: Of the request; names in lower case.

    Raises:
        PermissionDeniedError: It comes from a web page, or was sent to a foreign host name.
    """
    if "origin" in headers:
        raise PermissionDeniedError(
            "a service without API keys refuses requests from web pages", remedy=_REMEDY
        )
    host = headers.get("host")
    if host is not None and not _is_local(host):
        raise PermissionDeniedError(
            f"a service without API keys accepts only the host localhost, not {host[:100]!r}",
            remedy=_REMEDY,
        )


@functools.lru_cache(maxsize=64)
def _is_local(host: str) -> bool:
    return _LOCAL.fullmatch(host) is not None
