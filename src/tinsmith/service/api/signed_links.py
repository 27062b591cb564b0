"""Signed URLs, which anyone who has them can use for a while, and byte ranges of what they give.

Exported weights, archives, traces and audit logs are fetched with plain GETs without a credential,
and files of uploads are sent with plain PUTs. The URL says what it is for, of which tenant and
until when, under an HMAC with the service's secret. Nothing is stored.

**Range requests** ask for a part of a file. One range is supported, as resumed downloads need it.
Several at once get the whole file, as the standard allows; so does a condition that does not hold.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import AsyncIterator, Callable, Mapping
from urllib.parse import quote

import msgspec

from tinsmith.errors import NotFoundError
from tinsmith.service.api.api_call import StreamedReply
from tinsmith.wire.exchange import HttpReply

LIFETIME_S = 15 * 60.0
STORE_LIFETIME_S = 300
"""How long a URL of the store is valid to which a link redirects; it is followed at once."""
LONGEST = 4096
"""The most characters of a signed link."""
_PURPOSE = b"tinsmith download\0"
"""Makes signatures with the same secret for other purposes, such as tokens, useless here."""


class SignedLink(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a URL is for, whose it is, and until when."""

    kind: str
    """`file`, `archive`, `trace` or `audit` to fetch, `upload` to send."""
    tenant_id: str
    """Who asked for it. The link ends when this tenant may no longer read the target."""
    target: str
    """A checkpoint's path, a session, a part of the audit log, or an upload."""
    name: str
    """The file's name, which is the end of the URL."""
    expires_at: float


def sign(ticket: SignedLink, secret: bytes) -> str:
    """The link as a part of a URL."""
    body = _text(msgspec.json.encode(ticket))
    return f"{body}.{_text(_signature(body, secret))}"


def check(text: str, name: str, secret: bytes, now: float) -> SignedLink:
    """The link in a URL.

    Raises:
        NotFoundError: We did not sign it, it has expired, or it is for another file.
    """
    body, _, signature = text.partition(".")
    is_ours = len(text) <= LONGEST and hmac.compare_digest(
        _text(_signature(body, secret)).encode(), signature.encode("utf-8", "replace")
    )
    if not is_ours:
        raise NotFoundError("there is no such file; request a new link")
    try:
        ticket = msgspec.json.decode(_bytes(body), type=SignedLink)
    except (binascii.Error, ValueError) as exc:  # written by another version with this secret
        raise NotFoundError("there is no such file; request a new link") from exc
    if ticket.name != name:
        raise NotFoundError("there is no such file; request a new link")
    if ticket.expires_at <= now:
        raise NotFoundError("this link has expired; request a new one")
    return ticket


def _signature(body: str, secret: bytes) -> bytes:
    return hmac.digest(secret, _PURPOSE + body.encode("utf-8", "replace"), "sha256")


def _text(binary: bytes) -> str:
    return base64.urlsafe_b64encode(binary).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")

Pieces = Callable[[int, int], AsyncIterator[bytes]]
"""Yields the bytes from a start to a stop."""


class Download(msgspec.Struct, frozen=True, kw_only=True):
    """A file to send, whole or in part."""

    name: str
    size_bytes: int
    tag: str
    """Changes with the content."""
    content_type: str = "application/octet-stream"


def answer(
    download: Download, headers: Mapping[str, str], pieces: Pieces, *, is_head: bool = False
) -> HttpReply | StreamedReply:
    """The reply to a GET or HEAD of a file."""
    etag = f'"{download.tag}"'
    size = download.size_bytes
    given = {
        "Content-Type": download.content_type,
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(download.name, safe='')}",
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-transform",
        "X-Content-Type-Options": "nosniff",
    }
    if etag in _tags(headers.get("if-none-match", "")):
        return HttpReply(304, {"ETag": etag}, [])
    part = None
    if headers.get("if-range", etag) == etag:
        part = wanted_part(headers.get("range", ""), size)
    if part == ():
        return HttpReply(416, {**given, "Content-Range": f"bytes */{size}"}, [])
    start, stop = part or (0, size)
    given["Content-Length"] = str(stop - start)
    if part:
        given["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    status = 206 if part else 200
    if is_head:
        return HttpReply(status, given, [])
    return StreamedReply(status, given, pieces(start, stop))


def wanted_part(header: str, size: int) -> tuple[int, int] | tuple[()] | None:
    """Start and stop of the part that a `Range` header asks for.

    Returns:
        None for the whole file; an empty tuple for a part that does not exist.
    """
    found = _RANGE.fullmatch(header.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:  # the last n bytes
        start, stop = max(0, size - int(found[2])), size
    else:
        start = int(found[1])
        stop = min(size, int(found[2]) + 1) if found[2] else size
        if found[2] and int(found[2]) < start:
            return None
    return (start, stop) if start < stop else ()


def _tags(header: str) -> set[str]:
    return {tag.strip().removeprefix("W/") for tag in header.split(",")}
