"""Whose credential it is: keys, and the short-lived tokens that are given out for them.

A token is a JWT signed with the service's secret, which names its key, so that it ends when the key
is revoked. Both come in the `X-API-Key` header. Keys themselves are the matter of `keys.py`.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import Any

import msgspec

from tinsmith.errors import AuthenticationError
from tinsmith.ledger.base import Ledger
from tinsmith.server.keys import LONGEST_CREDENTIAL, REFUSAL, Caller, KeyRing

ISSUER = "passport-tinsmith"
TOKEN_LIFETIME_S = 3600


class Credentials:
    """Checks credentials and gives out tokens. For one event loop."""

    def __init__(self, ledger: Ledger, secret: bytes) -> None:
        self._ledger = ledger
        self._secret = secret
        self._keys = KeyRing(ledger)

    async def caller(self, credential: str | None) -> Caller:
        """Who it is.

        Raises:
            AuthenticationError: It is missing, unknown, revoked or expired.
        """
        if credential is not None and credential.startswith("eyJ") and await self._keys.has_keys():
            digest = self._key_of_token(credential)
            if digest is None:
                raise AuthenticationError(REFUSAL)
            return await self._keys.caller_by_digest(digest)
        return await self._keys.caller(credential)

    def token(self, caller: Caller) -> str:
        """A signed token that stands for this caller for an hour."""
        now = int(self._ledger.now())
        claims = {
            "iss": ISSUER,
            "sub": f"tml:user:{caller.tenant_id}",
            "org_id": caller.tenant_id,
            "email": f"{caller.tenant_id}@tinsmith.invalid",
            "iat": now,
            "exp": now + TOKEN_LIFETIME_S,
            "key": caller.key.id if caller.key is not None else "",
        }
        signed = f"{_encoded({'alg': 'HS256', 'typ': 'JWT'})}.{_encoded(claims)}"
        return f"{signed}.{_text(self._signature(signed))}"

    def forget(self) -> None:
        """Look keys up anew: one was changed."""
        self._keys.forget()

    def _key_of_token(self, token: str) -> str | None:
        """The key that a token stands for, if we signed it and it has not expired."""
        if len(token) > LONGEST_CREDENTIAL:
            return None
        signed, _, signature = token.rpartition(".")
        # As bytes: text with other letters than ASCII's cannot be compared.
        given = signature.encode("utf-8", "surrogatepass")
        if not hmac.compare_digest(_text(self._signature(signed)).encode(), given):
            return None
        claims = _decoded(signed.partition(".")[2])
        expires_at = claims.get("exp")
        if not isinstance(expires_at, int) or expires_at <= self._ledger.now():
            return None
        return str(claims.get("key") or "")

    def _signature(self, signed: str) -> bytes:
        return hmac.digest(self._secret, signed.encode("utf-8", "surrogatepass"), "sha256")


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
