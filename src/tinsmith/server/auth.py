"""Whose credential it is: a key, or a short-lived token that was given out for one.

Keys are `keys.py`'s. A token is a JWT signed with the service's secret that names the digest of its
key, so that it ends when the key is revoked. Both come in the `X-API-Key` header.

When a token ends, its client looks up by the time of day: an official one whose token seems to have
ended asks for another without a pause, and one that sends a token which has ended fails. The
ledger's time is another after the clock was set, or the machine slept. So a token has both, and is
good until both are over.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tinsmith.errors import AuthenticationError
from tinsmith.ledger.base import Ledger
from tinsmith.server.keys import LONGEST_CREDENTIAL, Holder, KeyRing

ISSUER = "passport-tinsmith"
TOKEN_LIFETIME_S = 3600
_HEADER = {"alg": "HS256", "typ": "JWT"}


class Credentials:
    """Checks credentials and gives out tokens. For one event loop."""

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
        """As `holder`, if that was looked up a moment ago; None if it has to be."""
        return self._keys.remembered(credential)

    async def holder(self, credential: str | None) -> Holder:
        """Who it belongs to.

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
        """Whether a key was ever made; a service without one is for its own machine alone."""
        return await self._keys.has_keys()

    def token(self, holder: Holder) -> str:
        """A signed token that stands for this holder for an hour."""
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
        """Look keys up anew: one was changed."""
        self._keys.forget()

    def _key_of_token(self, token: str) -> str:
        """The digest of the key that a token stands for, if we signed it and it has not expired."""
        signed, _, signature = token.rpartition(".")
        is_ours = (
            len(token) <= LONGEST_CREDENTIAL
            and token.isascii()
            and hmac.compare_digest(_text(self._signature(signed)), signature)
        )
        claims = _decoded(signed.partition(".")[2]) if is_ours else {}
        if claims.get("exp", 0) <= self._wall() and claims.get("until", 0) <= self._ledger.now():
            raise AuthenticationError("the token is not valid, or not any more")
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
