"""What an operator looks at, beside the API: `/metrics`, `/healthz` and `/readyz`.

They need no key and tell nothing of any tenant. A service without keys tells them to programs of
its own machine alone, as it does everything: not to a web page that is seen there.

Everything else is the API's, which is there once the models are loaded; until then it is answered
with 503, and clients come again.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext

from tinsmith.errors import PermissionDeniedError
from tinsmith.ledger.board import SchedulerReport
from tinsmith.observe.instruments import CONTENT_TYPE
from tinsmith.serve.assemble import Service
from tinsmith.server.incoming import Incoming
from tinsmith.wire.failures import reply_from_error

JSON_TYPE = "application/json"
UNAVAILABLE = 503
_LOCAL = frozenset({"/metrics", "/readyz"})
RECOVERING = "models are being brought back to where they were"


class OperatorPages:
    """These pages, and the service's own for all other paths.

    Attributes:
        service: Once it is open.
        waits_for: What keeps it from being open, in words.
    """

    def __init__(self, *, has_metrics: bool) -> None:
        self.service: Service | None = None
        self.waits_for = "the service is starting"
        self._has_metrics = has_metrics

    async def __call__(self, incoming: Incoming) -> None:
        """Answer a request."""
        if self.service is not None and incoming.path in _LOCAL:
            try:
                await self.service.app.check_reached(incoming.headers)
            except PermissionDeniedError as exc:
                reply = reply_from_error(exc)
                await incoming.answer(reply.status, reply.headers, b"".join(reply.parts))
                return
        page = self._page(incoming)
        if page is None:
            assert self.service is not None
            with self._span(self.service, incoming):
                await self.service.app.answer(incoming)
            return
        status, content_type, body = page
        headers = {"Content-Type": content_type, "Content-Length": str(len(body))}
        if self.service is None and status == UNAVAILABLE:
            headers["Retry-After"] = "1"
        await incoming.answer(status, headers, body)

    def _span(self, service: Service, incoming: Incoming) -> AbstractContextManager[None]:
        spans = service.spans
        return spans.span("http", carrier=incoming.headers) if spans.is_on else nullcontext()

    def _page(self, incoming: Incoming) -> tuple[int, str, bytes] | None:
        path = incoming.path if incoming.method in ("GET", "HEAD") else None
        if path == "/healthz":
            return 200, JSON_TYPE, b'{"status":"ok"}'
        if path == "/readyz":
            return self._readiness()
        if self.service is None:
            detail = f"the service is not ready yet: {self.waits_for}"
            return UNAVAILABLE, JSON_TYPE, json.dumps({"detail": detail}).encode()
        if path == "/metrics" and self._has_metrics:
            return 200, CONTENT_TYPE, self.service.metrics.exposition().encode()
        return None

    def _readiness(self) -> tuple[int, str, bytes]:
        """Whether commands are run: 503 while the service starts, recovers, and is troubled."""
        if self.service is None:
            report = SchedulerReport(problem=self.waits_for)
        else:
            report = self.service.ledger.board.scheduler
        problem = self._coming_problem() if report.is_ready else report.problem or RECOVERING
        told = {"status": "ready" if report.is_ready else "not ready", "problem": problem}
        return 200 if report.is_ready else UNAVAILABLE, JSON_TYPE, json.dumps(told).encode()

    def _coming_problem(self) -> str | None:
        """What will keep commands from being run if nobody sees to it."""
        return None if self.service is None else self.service.free_space.problem
