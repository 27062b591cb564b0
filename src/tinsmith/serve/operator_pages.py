"""What an operator looks at, beside the API: `/metrics`, `/healthz` and `/readyz`.

They need no key and tell nothing of any tenant. Everything else is the API's, which is there once
the models are loaded; until then it is answered with 503, and clients come again.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tinsmith.ledger.board import SchedulerReport
from tinsmith.observe.instruments import CONTENT_TYPE
from tinsmith.serve.assemble import Service

METRICS_TYPE = CONTENT_TYPE.encode()
JSON_TYPE = b"application/json"
UNAVAILABLE = 503
RECOVERING = "models are being brought back to where they were"


class OperatorPages:
    """An ASGI application: these pages, and the service's own for all other paths.

    Attributes:
        service: Once it is open.
        waits_for: What keeps it from being open, in words.
    """

    def __init__(self, *, has_metrics: bool) -> None:
        self.service: Service | None = None
        self.waits_for = "the service is starting"
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
            assert self.service is not None
            with self._span(self.service, scope):
                await self.service.app(scope, receive, send)
            return
        status, content_type, body = page
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        if self.service is None and status == UNAVAILABLE:
            headers.append((b"retry-after", b"1"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _span(
        self, service: Service, scope: MutableMapping[str, Any]
    ) -> AbstractContextManager[None]:
        spans = service.spans
        if not spans.is_on or scope["type"] != "http":
            return nullcontext()
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        return spans.span("http", carrier=headers)

    def _page(self, scope: MutableMapping[str, Any]) -> tuple[int, bytes, bytes] | None:
        path = scope["path"] if scope["method"] in ("GET", "HEAD") else None
        if path == "/healthz":
            return 200, JSON_TYPE, b'{"status":"ok"}'
        if path == "/readyz":
            return self._readiness()
        if self.service is None:
            detail = f"the service is not ready yet: {self.waits_for}"
            return UNAVAILABLE, JSON_TYPE, json.dumps({"detail": detail}).encode()
        if path == "/metrics" and self._has_metrics:
            return 200, METRICS_TYPE, self.service.metrics.exposition().encode()
        return None

    def _readiness(self) -> tuple[int, bytes, bytes]:
        """Whether commands are run: 503 while the service starts, recovers, and is troubled."""
        if self.service is None:
            report = SchedulerReport(problem=self.waits_for)
        else:
            report = self.service.ledger.board.scheduler
        problem = None if report.is_ready else report.problem or RECOVERING
        told = {"status": "ready" if report.is_ready else "not ready", "problem": problem}
        return 200 if report.is_ready else UNAVAILABLE, JSON_TYPE, json.dumps(told).encode()
