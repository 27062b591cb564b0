"""What an operator looks at, beside the API: `/metrics`, `/healthz` and `/readyz`.

They need no key and tell nothing of any tenant. Everything else is the API's.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tinsmith.observe.instruments import CONTENT_TYPE
from tinsmith.serve.assemble import Service

METRICS_TYPE = CONTENT_TYPE.encode()
JSON_TYPE = b"application/json"


class OperatorPages:
    """An ASGI application: these pages, and the service's own for all other paths."""

    def __init__(self, service: Service, *, has_metrics: bool) -> None:
        self.service = service
        self._has_metrics = has_metrics

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        """As ASGI has it."""
        page = self._page(scope) if scope["type"] == "http" else None
        if page is None:
            with self._span(scope):
                await self.service.app(scope, receive, send)
            return
        status, content_type, body = page
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _span(self, scope: MutableMapping[str, Any]) -> AbstractContextManager[None]:
        spans = self.service.spans
        if not spans.is_on or scope["type"] != "http":
            return nullcontext()
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        return spans.span("http", carrier=headers)

    def _page(self, scope: MutableMapping[str, Any]) -> tuple[int, bytes, bytes] | None:
        if scope["method"] not in ("GET", "HEAD"):
            return None
        if scope["path"] == "/metrics" and self._has_metrics:
            return 200, METRICS_TYPE, self.service.metrics.exposition().encode()
        if scope["path"] == "/healthz":
            return 200, JSON_TYPE, b'{"status":"ok"}'
        if scope["path"] == "/readyz":
            return self._readiness()
        return None

    def _readiness(self) -> tuple[int, bytes, bytes]:
        """Whether commands are run: 503 while the service recovers, and while it is troubled."""
        report = self.service.ledger.board.scheduler
        told = {"status": "ready" if report.is_ready else "not ready", "problem": report.problem}
        return 200 if report.is_ready else 503, JSON_TYPE, json.dumps(told).encode()
