"""Whose credential it is: keys, and the short-lived tokens that are given out for them.

A key is known by its digest alone; looking that up tells nothing about other keys. A token is a JWT
signed with the service's secret, which names its key, so that it ends when the key is revoked. Both
come in the `X-API-Key` header.

As long as there is no key at all, everybody is one tenant; `serve/` then listens on loopback only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Any

import msgspec

from tinsmith.errors import AuthenticationError
from tinsmith.ledger.base import Ledger
from tinsmith.ledger.records import ApiKey, TenantId

DEFAULT_TENANT = TenantId("default")
"""Whose everything is while there are no keys."""
ISSUER = "passport-tinsmith"
TOKEN_LIFETIME_S = 3600
LONGEST_CREDENTIAL = 4096

REMEMBERED_S = 5.0
"""How long a key that was looked up is good: so long may a revoked one go on."""
MOST_REMEMBERED = 10_000

_REFUSAL = "the X-API-Key header holds no key of this service"


def key_digest(key: str) -> str:
    """What is kept of a key, and the id of its entry. Keys are random: a plain digest is enough."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class Caller(msgspec.Struct, frozen=True):
    """Who a credential belongs to; without a key it is the one tenant of a service without."""

    tenant_id: TenantId
    key: ApiKey | None = None


class Credentials:
    """Checks credentials and gives out tokens. For one event loop."""

    def __init__(self, ledger: Ledger, secret: bytes) -> None:
        self._ledger = ledger
        self._secret = secret
        self._remembered: dict[str, tuple[float, Caller]] = {}
        self._open_until = 0.0

    async def caller(self, credential: str | None) -> Caller:
        """Who it is.

        Raises:
            AuthenticationError: It is missing, unknown, revoked or expired.
        """
        if credential is not None and len(credential) <= LONGEST_CREDENTIAL:
            digest = key_digest(credential)
            if credential.startswith("eyJ"):
                digest = self._key_of_token(credential) or digest
            found = await self._of_key(digest)
            if found is not None:
                return found
        if await self._has_no_keys():
            return Caller(DEFAULT_TENANT)
        raise AuthenticationError(_REFUSAL)

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

    def forget(self, key_id: str) -> None:
        """Look a key up anew: it was changed."""
        self._remembered.pop(key_id, None)
        self._open_until = 0.0

    async def _of_key(self, digest: str) -> Caller | None:
        now = self._ledger.now()
        until, caller = self._remembered.get(digest, (0.0, None))
        if until > now:
            return caller
        self._remembered.pop(digest, None)
        key = await self._ledger.entries(ApiKey).get(digest)
        if key is None or key.revoked_at is not None:
            return None
        if len(self._remembered) >= MOST_REMEMBERED:
            self._remembered.clear()
        caller = Caller(key.tenant_id, key)
        self._remembered[digest] = (now + REMEMBERED_S, caller)
        return caller

    async def _has_no_keys(self) -> bool:
        now = self._ledger.now()
        if self._open_until > now:
            return True
        if await self._ledger.entries(ApiKey).count() == 0:
            self._open_until = now + REMEMBERED_S
            return True
        return False

    def _key_of_token(self, token: str) -> str | None:
        """The key that a token stands for, if we signed it and it has not expired."""
        signed, _, signature = token.rpartition(".")
        if not hmac.compare_digest(_text(self._signature(signed)), signature):
            return None
        claims = _decoded(signed.partition(".")[2])
        expires_at = claims.get("exp")
        if not isinstance(expires_at, int) or expires_at <= self._ledger.now():
            return None
        return str(claims.get("key") or "")

    def _signature(self, signed: str) -> bytes:
        return hmac.digest(self._secret, signed.encode("utf-8", "surrogateescape"), "sha256")


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
