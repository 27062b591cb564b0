"""Files that a test puts behind plain addresses, beside the service's own signed ones.

They are fetched without a credential, whole or in parts. Requests for them are recorded, and
struck by faults, under the name `download`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping

from tinsmith.wire.exchange import HttpReply

FOLDER = "/downloads/"
DOWNLOAD = "download"
"""What requests for files are called where endpoints go by their names."""
_RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{0,15})")


class Downloads:
    """Files by path; `gives_parts` says whether a part of a file may be asked for."""

    def __init__(self, base_url: Callable[[], str], *, gives_parts: bool = True) -> None:
        self._base_url = base_url
        self._gives_parts = gives_parts
        self._files: dict[str, bytes] = {}

    def put(self, path: str, content: bytes) -> str:
        """Keep a file; returns its address."""
        self._files[path] = content
        return f"{self._base_url()}{FOLDER}{path}"

    def has(self, path: str) -> bool:
        """Whether a test has put a file there."""
        return path.removeprefix(FOLDER) in self._files

    def get(self, path: str, asked: Mapping[str, str]) -> HttpReply:
        """Answer with a file that is there, or with the part of it that the headers ask for."""
        content = self._files[path.removeprefix(FOLDER)]
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = {"Content-Type": "application/octet-stream", "ETag": tag}
        if not self._gives_parts:
            return HttpReply(200, headers, [content])
        headers["Accept-Ranges"] = "bytes"
        wanted = _RANGE.fullmatch(asked.get("range", ""))
        is_changed = asked.get("if-range", tag) != tag
        if wanted is None or is_changed:
            return HttpReply(200, headers, [content])
        start, stop = int(wanted[1]), int(wanted[2] or len(content) - 1) + 1
        if start >= len(content):
            return HttpReply(416, {"Content-Range": f"bytes */{len(content)}"}, [])
        stop = min(stop, len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return HttpReply(206, headers, [content[start:stop]])
