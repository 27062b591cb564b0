"""A service without keys is for programs on its own machine, and not for web pages seen there.

It listens on loopback only, but a browser on that machine can reach it too, on behalf of whatever
page it shows: by a request to 127.0.0.1, or by a name of its own that it lets resolve to there.
Pages are told by the `Origin` that a browser adds to what they send, and such names by `Host`. With
a key neither matters: a page has none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from tinsmith.errors import PermissionDeniedError

_REMEDY = "make a key with `tinsmith key create`"
_LOCAL = re.compile(
    r"(localhost|[\w-]+\.localhost|127(\.\d{1,3}){3}|\[::1\]|in-process)(:\d+)?", re.IGNORECASE
)


def check_local(headers: Mapping[str, str]) -> None:
    """Refuse what a web page sent.

    Args:
        headers: Of the request; names in lower case.

    Raises:
        PermissionDeniedError: It comes from a page, or was sent to a name of somebody else.
    """
    if "origin" in headers:
        raise PermissionDeniedError("a service without keys answers no web pages", remedy=_REMEDY)
    host = headers.get("host")
    if host is not None and not _is_local(host):
        raise PermissionDeniedError(
            f"a service without keys is reached as localhost, not as {host[:100]!r}", remedy=_REMEDY
        )


@functools.lru_cache(maxsize=64)
def _is_local(host: str) -> bool:
    return _LOCAL.fullmatch(host) is not None
