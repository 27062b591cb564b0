"""Which part of a file a GET asks for, and the reply that gives it.

One range is served, as downloads that are taken up again ask for it; several at once are answered
with the whole file, which is allowed. A condition that does not hold is too.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from urllib.parse import quote

import msgspec

from tinsmith.server.call import StreamedReply
from tinsmith.wire.exchange import HttpReply

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")

Pieces = Callable[[int, int], AsyncIterator[bytes]]
"""Gives the bytes from a start to a stop."""


class Download(msgspec.Struct, frozen=True, kw_only=True):
    """A file that can be sent, whole or in part."""

    name: str
    size_bytes: int
    tag: str
    """Changes when the content does."""
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
        None for the whole file; an empty tuple for a part that there is not.
    """
    found = _RANGE.fullmatch(header.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:  # the last so many bytes
        start, stop = max(0, size - int(found[2])), size
    else:
        start = int(found[1])
        stop = min(size, int(found[2]) + 1) if found[2] else size
        if found[2] and int(found[2]) < start:
            return None
    return (start, stop) if start < stop else ()


def _tags(header: str) -> set[str]:
    return {tag.strip().removeprefix("W/") for tag in header.split(",")}
