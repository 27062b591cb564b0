"""A server without a socket: calls go straight to the application, on the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from tests.integration.service.api.running import KEYS, MODEL, TINY, split_settings
from tinsmith.engine.base import BaseModel
from tinsmith.service.api.app import App
from tinsmith.service.api.context import ApiContext
from tinsmith.service.http.edge import HttpEdge
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.board import SchedulerReport
from tinsmith.service.ledger.memory import MemoryLedger


class Reply(msgspec.Struct):
    """What was answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, which must be JSON."""
        return msgspec.json.decode(self.body)


class InProcess:
    """An application over a ledger in memory."""

    def __init__(self, *, model: BaseModel = TINY, **settings: Any) -> None:
        self.ledger: Ledger = MemoryLedger()
        self.ledger.board.publish_report(SchedulerReport(is_ready=True))
        of_api, of_bodies = split_settings(**{"long_poll_s": 0.01, **settings})
        self.app = App(ApiContext(self.ledger, {MODEL: model}, settings=of_api, secret=b"s" * 32))
        self.edge = HttpEdge(self.app.answer, of_bodies)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        query: str = "",
    ) -> Reply:
        """One exchange, to its end; the first piece of a stream is enough."""
        has_read = asyncio.Event()
        given = {
            "content-type": "application/json",
            "x-api-key": KEYS["alice"],
            "content-length": str(len(body)),
            **(headers or {}),
        }
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "scheme": "http",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        }
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": body}]
        reply = Reply(0, {}, b"")

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await has_read.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {n.decode(): v.decode() for n, v in message["headers"]}
            else:
                reply.body += message["body"]
                if message.get("more_body"):
                    has_read.set()

        await self.edge(scope, receive, send)
        return reply
