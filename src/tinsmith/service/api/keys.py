"""API keys and the tenants that they belong to.

A key is 32 random bytes, shown once; the ledger has its digest, which is the id of its entry. A key
is never deleted: revoked, it is known and refused. So a service that once had a key never serves
unauthenticated requests again, even after the last key is revoked.

While a service has no key at all there is one tenant, `DEFAULT_TENANT`, and every credential is
accepted as its own. `run/` refuses to start such a service where others can reach it.

`KeyRing` is what a server asks. It caches keys for `RECHECK_S`; after that it sees what another
process changed, such as `tinsmith key revoke`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from tinsmith.errors import AuthenticationError, UnknownEntryError, ValidationError, shown
from tinsmith.service.ledger.base import PAGE, Ledger
from tinsmith.service.ledger.records import LARGEST_NUMBER, ApiKey, Tenant, TenantId

PREFIX = "tml-"
"""Official clients accept only keys with this prefix."""
KEY_BYTES = 32
SHOWN_CHARACTERS = len(PREFIX) + 4
LONGEST_CREDENTIAL = 8192
ID_CHARACTERS = 12
"""Characters of the digest by which people refer to a key."""
RECHECK_S = 1.0
MOST_REMEMBERED = 1024

QUOTAS = {
    "requests_per_minute": "commands submitted per minute",
    "commands_in_flight": "commands not yet settled",
    "bytes_in_flight": "total size of those commands in bytes",
    "tokens_per_hour": "tokens trained on, prefilled and sampled per clock hour",
    "sessions": "open sessions",
    "models": "models in training",
    "storage_bytes": "total size of saved checkpoints in bytes",
}
"""The quotas of a tenant, by name; without one the service's own limits apply."""

_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LONGEST_KEY_NAME = 100
_KEY_ID = re.compile(r"[0-9a-f]{6,64}")

DEFAULT_TENANT = TenantId("default")


def make_key() -> str:
    """A new key. It exists only in what this returns."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> str:
    """What is stored of a key. One round is enough: nobody can guess 32 random bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_id(key: ApiKey) -> str:
    """The short id by which people refer to a key."""
    return key.id[:ID_CHARACTERS]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who a credential belongs to."""

    tenant: Tenant
    key: ApiKey | None = None
    """None while the service has no keys, and for an owner who needs none."""

    @property
    def is_operator(self) -> bool:
        """Whether it may call the routes for operators. Who needs no key runs the service."""
        return self.key is None or self.key.is_operator


class KeyRing:
    """Finds who a credential belongs to. For one event loop.

    Args:
        ledger: Where keys and tenants are.
        recheck_s: How long results are cached.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        recheck_s: float = RECHECK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._recheck_s = recheck_s
        self._clock = clock
        self._remembered: OrderedDict[str, tuple[float, Holder]] = OrderedDict()
        self._forgotten = 0
        """How often the cache was dropped."""
        self._open_until: float | None = None
        self._anybody: Holder | None = None
        self._has_keys = False
        self._looking: asyncio.Task[None] | None = None

    async def has_keys(self) -> bool:
        """Whether a key was ever created; from then on every call needs one."""
        if self._has_keys:
            return True
        if self._is_known_open():
            return False
        # Many requests find the cache expired together: one lookup serves all, even if it fails.
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_for_keys())
        await asyncio.shield(self._looking)
        return self._has_keys

    async def _look_for_keys(self) -> None:
        now = self._clock()
        self._has_keys = await self._ledger.entries(ApiKey).count() > 0
        self._anybody = None  # its quotas may have changed
        self._open_until = now + self._recheck_s

    def _is_known_open(self) -> bool:
        """Whether there was no key at the last lookup."""
        return self._open_until is not None and self._clock() < self._open_until

    def remembered(self, credential: str | None) -> Holder | None:
        """As `holder`, from the cache; None if it must be looked up."""
        if not self._has_keys:
            return self._anybody if self._is_known_open() else None
        if not credential or len(credential) > LONGEST_CREDENTIAL:
            return None
        until, holder = self._remembered.get(digest_of(credential), (0.0, None))
        return holder if self._clock() < until else None

    async def holder(self, credential: str | None) -> Holder:
        """The holder of a key; the default tenant while there are no keys.

        Raises:
            AuthenticationError: There is no such key, or it was revoked. The message does not say
                which, and never contains the key.
        """
        if not await self.has_keys():
            if self._anybody is None:
                self._anybody = Holder(tenant=await default_tenant(self._ledger))
            return self._anybody
        if not credential:
            raise AuthenticationError("the request has no API key")
        if len(credential) > LONGEST_CREDENTIAL:
            raise AuthenticationError("invalid API key")
        return await self.holder_by_digest(digest_of(credential))

    async def owner(self) -> Holder:
        """The default tenant, whether or not there are keys."""
        return await self._remembering("", self._look_up_owner)

    async def holder_by_digest(self, digest: str) -> Holder:
        """As `holder`, for the digest of a key, as a token has it."""
        return await self._remembering(digest, lambda: self._look_up(digest))

    async def _remembering(
        self, digest: str, look_up: Callable[[], Awaitable[Holder | None]]
    ) -> Holder:
        now = self._clock()
        remembered = self._remembered.get(digest)
        if remembered is not None and now < remembered[0]:
            self._remembered.move_to_end(digest)
            return remembered[1]
        forgotten = self._forgotten
        holder = await look_up()
        if holder is None:
            self._remembered.pop(digest, None)
            raise AuthenticationError("invalid API key")
        if forgotten != self._forgotten:
            return holder  # not cached: it may have changed since it was read
        self._remembered[digest] = (now + self._recheck_s, holder)
        self._remembered.move_to_end(digest)
        while len(self._remembered) > MOST_REMEMBERED:
            self._remembered.popitem(last=False)
        return holder

    def forget(self) -> None:
        """Drop the cache; to be called where this process changed a key or a tenant."""
        self._forgotten += 1
        self._remembered.clear()
        self._open_until = None

    async def _look_up_owner(self) -> Holder:
        return Holder(tenant=await default_tenant(self._ledger))

    async def _look_up(self, digest: str) -> Holder | None:
        key = await self._ledger.entries(ApiKey).get(digest)
        # The database compares byte by byte. That reveals nothing of a key, only of its digest, but
        # the answer should not depend on how a database compares.
        if key is None or not hmac.compare_digest(key.id, digest) or key.revoked_at is not None:
            return None
        tenant = await self._ledger.entries(Tenant).get(key.tenant_id)
        return None if tenant is None else Holder(tenant=tenant, key=key)


async def default_tenant(ledger: Ledger) -> Tenant:
    """The tenant of a service without keys, and of keys created without a tenant."""
    return await add_tenant(ledger, DEFAULT_TENANT)


async def add_tenant(
    ledger: Ledger, name: str, quotas: Mapping[str, int | None] | None = None
) -> Tenant:
    """The tenant of this name, created if there is none.

    Args:
        ledger: Where it is kept.
        name: Its name, which is its id too.
        quotas: Those to change; None removes one. The others stay.

    Raises:
        ValidationError: The name or a quota cannot be used.
    """
    if not _TENANT_NAME.fullmatch(name):
        raise ValidationError(
            f"invalid tenant name {shown(name)}",
            remedy="use up to 64 of A-Z a-z 0-9 . _ @ -, starting with a letter or digit",
        )
    changes = dict(quotas or {})
    _check_quotas(changes)
    tenants, tenant_id = ledger.entries(Tenant), TenantId(name)
    found = await tenants.get(name)
    if found is None:
        found = await tenants.add(
            Tenant(id=name, tenant_id=tenant_id, created_at=ledger.now(), name=name)
        )
    if not changes:
        return found

    def changed(old: Tenant) -> Tenant:
        merged = {**old.quotas, **changes}
        kept = {name: value for name, value in merged.items() if value is not None}
        return msgspec.structs.replace(old, quotas=kept)

    return await tenants.change(name, changed)


async def create_key(
    ledger: Ledger, tenant: Tenant, name: str, *, is_operator: bool = False
) -> tuple[ApiKey, str]:
    """Create a key; returns its entry and the key itself.

    Raises:
        ValidationError: The name is invalid.
    """
    if len(name) > _LONGEST_KEY_NAME or not name.isprintable():
        raise ValidationError(
            f"invalid key name {shown(name)}",
            remedy=f"use up to {_LONGEST_KEY_NAME} printable characters",
        )
    text = make_key()
    key = ApiKey(
        id=digest_of(text),
        tenant_id=tenant.tenant_id,
        created_at=ledger.now(),
        name=name,
        shown=text[:SHOWN_CHARACTERS],
        is_operator=is_operator,
    )
    return await ledger.entries(ApiKey).add(key), text


async def list_keys(ledger: Ledger, tenant: str | None = None) -> list[ApiKey]:
    """All keys, or a tenant's, including revoked ones; newest first."""
    found: list[ApiKey] = []
    keys = ledger.entries(ApiKey)
    while True:
        if tenant is None:
            page = await keys.all(offset=len(found))
        else:
            page = await keys.of_tenant(TenantId(tenant), offset=len(found))
        found += page
        if len(page) < PAGE:
            return found


async def revoke_key(ledger: Ledger, named: str) -> ApiKey:
    """Refuse a key from now on; revoking it again changes nothing.

    Args:
        ledger: Where it is kept.
        named: Its id, or a prefix of it that is unique.

    Raises:
        ValidationError: It is not an id.
        UnknownEntryError: No key has it, or several do.
    """
    if not _KEY_ID.fullmatch(named):
        raise ValidationError(
            "invalid key id",  # it may be the key itself, so it is not shown
            remedy="pass at least 6 hexadecimal digits of an id, as shown by `tinsmith key list`",
        )
    found = [key for key in await list_keys(ledger) if key.id.startswith(named)]
    if len(found) != 1:
        many = "several keys have" if found else "no key has"
        raise UnknownEntryError(
            f"{many} the id {named}", remedy="run `tinsmith key list` to see all keys"
        )
    now = ledger.now()

    def revoked(old: ApiKey) -> ApiKey:
        return old if old.revoked_at else msgspec.structs.replace(old, revoked_at=now)

    return await ledger.entries(ApiKey).change(found[0].id, revoked)


def _check_quotas(quotas: Mapping[str, int | None]) -> None:
    for name, value in quotas.items():
        if name not in QUOTAS:
            raise ValidationError(
                f"unknown quota {shown(name)}", remedy=f"expected one of {', '.join(QUOTAS)}"
            )
        if value is not None and not 0 <= value <= LARGEST_NUMBER:
            raise ValidationError(f"the quota {name} must be 0 to {LARGEST_NUMBER}")
