"""Files behind plain addresses: exported weights, archives and traces.

They are fetched without a credential, whole or in parts. Requests for them are recorded, and
struck by faults, under the name `download`. Knows nothing of what the files hold;
`checkpoint_files` writes those of a checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import tarfile
from collections.abc import Callable

import msgspec

from tinsmith.errors import NotFoundError
from tinsmith.testing.http_reading import Incoming
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

    def get(self, path: str, incoming: Incoming) -> HttpReply:
        """Answer with a file, or with the part of it that was asked for."""
        content = self._files.get(path.removeprefix(FOLDER))
        if content is None:
            raise NotFoundError(f"there is no file {path!r}")
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = {"Content-Type": "application/octet-stream", "ETag": tag}
        if not self._gives_parts:
            return HttpReply(200, headers, [content])
        headers["Accept-Ranges"] = "bytes"
        wanted = _RANGE.fullmatch(incoming.headers.get("range", ""))
        is_changed = incoming.headers.get("if-range", tag) != tag
        if wanted is None or is_changed:
            return HttpReply(200, headers, [content])
        start, stop = int(wanted[1]), int(wanted[2] or len(content) - 1) + 1
        if start >= len(content):
            return HttpReply(416, {"Content-Range": f"bytes */{len(content)}"}, [])
        stop = min(stop, len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return HttpReply(206, headers, [content[start:stop]])


def checkpoint_files(base_model: str, rank: int) -> dict[str, bytes]:
    """An adapter as other programs read it: its settings and one small tensor of zeros."""
    config = {"base_model_name_or_path": base_model, "peft_type": "LORA", "r": rank}
    size_bytes = 4 * 4 * rank
    tensor = {"dtype": "F32", "shape": [rank, 4], "data_offsets": [0, size_bytes]}
    header = msgspec.json.encode({"lora_A.weight": tensor})
    header += b" " * (-len(header) % 8)
    return {
        "adapter_config.json": msgspec.json.encode(config),
        "adapter_model.safetensors": struct.pack("<Q", len(header)) + header + bytes(size_bytes),
    }


def archive(files: dict[str, bytes]) -> bytes:
    """The files as one tar, the same bytes each time."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return written.getvalue()
