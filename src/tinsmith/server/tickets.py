"""Addresses that anybody may fetch who has them, for a while: signed by the service.

Exported weights, archives, traces and audit logs are fetched with plain GETs that carry no
credential. What such an address gives is written into it, with the tenant and the time at which it
ends, under an HMAC with the service's secret. Nothing is kept of it.
"""

from __future__ import annotations

import base64
import binascii
import hmac

import msgspec

from tinsmith.errors import NotFoundError

LIFETIME_S = 15 * 60.0
LONGEST = 4096
"""Of a ticket, in characters."""
_PURPOSE = b"tinsmith download\0"
"""So that no other signature with the same secret is good for a download."""


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an address gives, to whom, and until when."""

    kind: str
    """`file`, `archive`, `trace` or `audit`."""
    tenant_id: str
    """Who asked for it: what it may not read any more, as what is no longer published, ends."""
    target: str
    """A checkpoint's path, a session, or what of the audit log."""
    name: str
    """The file's name, as it stands at the end of the address."""
    expires_at: float


def sign(ticket: Ticket, secret: bytes) -> str:
    """The ticket as a part of an address."""
    body = _text(msgspec.json.encode(ticket))
    return f"{body}.{_text(_signature(body, secret))}"


def check(text: str, name: str, secret: bytes, now: float) -> Ticket:
    """The ticket that an address holds.

    Raises:
        NotFoundError: We did not sign it, it has ended, or it is for another file.
    """
    body, _, signature = text.partition(".")
    is_ours = len(text) <= LONGEST and hmac.compare_digest(
        _text(_signature(body, secret)).encode(), signature.encode("utf-8", "replace")
    )
    if not is_ours:
        raise NotFoundError("there is no such file; ask for a new address")
    try:
        ticket = msgspec.json.decode(_bytes(body), type=Ticket)
    except (binascii.Error, ValueError) as exc:  # written by another version with this secret
        raise NotFoundError("there is no such file; ask for a new address") from exc
    if ticket.name != name:
        raise NotFoundError("there is no such file; ask for a new address")
    if ticket.expires_at <= now:
        raise NotFoundError("this address has expired; ask for a new one")
    return ticket


def _signature(body: str, secret: bytes) -> bytes:
    return hmac.digest(secret, _PURPOSE + body.encode("utf-8", "replace"), "sha256")


def _text(binary: bytes) -> str:
    return base64.urlsafe_b64encode(binary).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
