"""As much of the Hugging Face hub as a download needs, on this machine.

The routes and headers are those that `huggingface_hub` uses: what is in a repository, and each
file by commit, also from the middle of it.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tinsmith.engine.files.hub import git_digest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class SmallHub(http.server.ThreadingHTTPServer):
    """One repository, `tiny/llama`, at one commit.

    `large` names the files that are kept by their sha256, as the hub keeps weights.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], large: set[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(files)
        self.large = large
        self.promised = dict(files)
        """What the listing's digests are of."""
        self.config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
        """What the hub has read in `config.json`."""
        self.fetched: list[str] = []
        self.breaks_off: str | None = None
        """A file whose connection breaks in the middle, once."""

    @property
    def url(self) -> str:
        """What to set as the endpoint."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def listing(self) -> dict[str, Any]:
        """What the repository holds."""
        return {
            "id": "tiny/llama",
            "sha": COMMIT,
            "private": False,
            "config": self.config,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": [self._listed(name, content) for name, content in self.promised.items()],
        }

    def _listed(self, name: str, content: bytes) -> dict[str, Any]:
        listed: dict[str, Any] = {
            "rfilename": name,
            "size": len(content),
            "blobId": git_digest(content),
        }
        if name in self.large:
            sha256 = hashlib.sha256(content).hexdigest()
            listed["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
        return listed

    def tree(self) -> list[dict[str, Any]]:
        """The same, as another route of the hub tells it."""
        return [
            {"type": "file", "path": name, "size": len(content), "oid": git_digest(content)}
            for name, content in self.promised.items()
        ]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SmallHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        if re.fullmatch(r"/api/models/tiny/llama(/revision/\w+)?", path):
            self._send(200, json.dumps(self.server.listing()).encode(), {}, with_body)
        elif path.startswith("/api/models/tiny/llama/tree/"):
            self._send(200, json.dumps(self.server.tree()).encode(), {}, with_body)
        elif path.startswith(f"/tiny/llama/resolve/{COMMIT}/"):
            self._send_file(path.rsplit("/", 1)[1], with_body)
        else:
            code = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self._send(404, b"{}", code, with_body)

    def _send_file(self, name: str, with_body: bool) -> None:
        content = self.server.files[name]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{git_digest(content)}"'}
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if with_body:
            self.server.fetched.append(name if start is None else f"{name} from {start[1]}")
        if self.server.breaks_off == name and with_body:
            self.server.breaks_off = None
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        elif start is not None:
            rest = content[int(start[1]) :]
            headers["Content-Range"] = f"bytes {start[1]}-{len(content) - 1}/{len(content)}"
            self._send(206, rest, headers, with_body)
        else:
            self._send(200, content, headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def small_hub(files: dict[str, bytes], large: set[str]) -> Iterator[SmallHub]:
    """A running hub with these files."""
    with SmallHub(files, large) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
