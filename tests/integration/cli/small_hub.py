"""As much of the Hugging Face Hub as an upload needs, on a port of this machine."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

COMMIT = "0" * 40


class SmallHub:
    """Repositories by name, as the files that were uploaded to them."""

    def __init__(self) -> None:
        self.is_private: dict[str, bool] = {}
        self.branches: list[str] = []
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.readme: bytes | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub._get(self)

            def do_HEAD(self) -> None:
                hub._get(self)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                hub._post(self, body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _get(self, request: BaseHTTPRequestHandler) -> None:
        if request.path.startswith("/api/whoami-v2"):
            is_known = request.headers.get("Authorization") == "Bearer hf_good"
            _answer(request, 200 if is_known else 401, {"name": "somebody", "type": "user"})
        elif "/resolve/" in request.path and self.readme is not None:
            headers = {"ETag": '"readme"', "X-Repo-Commit": COMMIT}
            _answer_bytes(request, 200, self.readme, headers)
        else:
            _answer(request, 404, {"error": "nothing here"})

    def _post(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        path = request.path
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
            self.is_private[name] = "private" in (asked.get("visibility"), *asked)
            _answer(request, 200, {"url": f"{self.url}/{name}"})
        elif "/branch/" in path:
            self.branches.append(path.rpartition("/")[2])
            _answer(request, 200, {})
        elif "/preupload/" in path:
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{**file, **mode} for file in json.loads(body)["files"]]
            _answer(request, 200, {"files": files})
        elif "/commit/" in path:
            self._commit(body)
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            url = f"{self.url}/{name}/commit/{COMMIT}"
            _answer(request, 200, {"commitUrl": url, "commitOid": COMMIT, "success": True})
        else:
            _answer(request, 200, {"errors": [], "warnings": []})  # the check of a model card

    def _commit(self, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                self.messages.append(entry["value"]["summary"])
            else:
                value = entry["value"]
                self.files[value["path"]] = base64.b64decode(value["content"])


def _answer(request: BaseHTTPRequestHandler, status: int, fields: dict[str, Any]) -> None:
    _answer_bytes(request, status, json.dumps(fields).encode(), {})


def _answer_bytes(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]
) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
