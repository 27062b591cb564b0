"""The pages for operators beside the API: `/metrics`, `/healthz` and `/readyz`.

They need no key and reveal nothing of any tenant. A service without keys answers only programs on
its own machine, here as everywhere: a web page in a browser there gets nothing. All other paths
belong to the API, which is available once the models are loaded; until then they are answered with
503, and clients retry.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext

from tinsmith.errors import PermissionDeniedError
from tinsmith.observe.instruments import CONTENT_TYPE
from tinsmith.service.api.incoming import IncomingRequest
from tinsmith.service.run.assemble import Service
from tinsmith.wire.exchange import HttpReply
from tinsmith.wire.failures import reply_from_error

JSON_TYPE = "application/json"
NOT_FOUND = 404
UNAVAILABLE = 503
NO_API = (
    "this server runs the scheduler and answers no requests of the API; send them to a server with "
    "--role api"
)
_LOCAL = frozenset({"/metrics", "/readyz"})
RECOVERING = "restoring models after a restart"


class OperatorPages:
    """Answers these pages, and passes all other paths to the API.

    Attributes:
        service: The service, once it is open.
        waits_for: What the start is waiting for, in words.
        is_standby: Whether that is its turn, with everything else ready.
    """

    def __init__(self, *, has_metrics: bool, role: str = "all") -> None:
        self.service: Service | None = None
        self.waits_for = "the service is starting"
        self.is_standby = False
        self._has_metrics = has_metrics
        self._role = role

    async def __call__(self, incoming: IncomingRequest) -> None:
        """Answer a request."""
        if self.service is not None and incoming.path in _LOCAL:
            try:
                await self.service.app.check_reached(incoming.headers)
            except PermissionDeniedError as exc:
                await incoming.answer(reply_from_error(exc))
                return
        page = self._page(incoming)
        if page is None:
            assert self.service is not None
            with self._span(self.service, incoming):
                await self.service.app.answer(incoming)
            return
        status, content_type, body = page
        headers = {"Content-Type": content_type}
        if self.service is None and status == UNAVAILABLE:
            headers["Retry-After"] = "1"
        await incoming.answer(HttpReply(status, headers, [body]))

    def _span(self, service: Service, incoming: IncomingRequest) -> AbstractContextManager[None]:
        spans = service.spans
        return spans.span("http", carrier=incoming.headers) if spans.is_on else nullcontext()

    def _page(self, incoming: IncomingRequest) -> tuple[int, str, bytes] | None:
        path = incoming.path if incoming.method in ("GET", "HEAD") else None
        if path == "/healthz":
            return 200, JSON_TYPE, b'{"status":"ok"}'
        if path == "/readyz":
            return self._readiness()
        if self._role == "scheduler" and path != "/metrics":
            return NOT_FOUND, JSON_TYPE, json.dumps({"detail": NO_API}).encode()
        if self.service is None:
            detail = f"the service is not ready yet: {self.waits_for}"
            return UNAVAILABLE, JSON_TYPE, json.dumps({"detail": detail}).encode()
        if path == "/metrics" and self._has_metrics:
            return 200, CONTENT_TYPE, self.service.metrics.exposition().encode()
        return (NOT_FOUND, JSON_TYPE, b"{}") if self._role == "scheduler" else None

    def _readiness(self) -> tuple[int, str, bytes]:
        """Whether commands are accepted and run; 503 while it starts, recovers, or has a problem.

        A server without the scheduler is ready when it accepts commands: it says what keeps the
        scheduler from running them, and that is no reason to send clients elsewhere. A scheduler
        that waits for its turn is ready too.
        """
        if self.service is None:
            return _told("standby" if self.is_standby else "not ready", self.waits_for)
        if self._role == "scheduler" and self.service.is_standing_by:
            return _told("standby", "standing by: another server holds the scheduler's lease")
        board = self.service.ledger.board
        report = board.readiness
        if self._role == "api":
            is_ready = board.store_problem is None
            return _told("ready" if is_ready else "not ready", report.problem or self._warning())
        problem = self._warning() if report.is_ready else report.problem or RECOVERING
        return _told("ready" if report.is_ready else "not ready", problem)

    def _warning(self) -> str | None:
        """What will become a problem if nobody acts."""
        return None if self.service is None else self.service.free_space.problem


def _told(status: str, problem: str | None) -> tuple[int, str, bytes]:
    code = UNAVAILABLE if status == "not ready" else 200
    return code, JSON_TYPE, json.dumps({"status": status, "problem": problem}).encode()
