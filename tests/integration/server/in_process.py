"""A server without a socket: calls go straight to the application, on the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from tests.integration.server.running import KEYS, MODEL, TINY
from tinsmith.engines.base import BaseModel
from tinsmith.ledger.base import Ledger
from tinsmith.ledger.board import SchedulerReport
from tinsmith.ledger.memory import MemoryLedger
from tinsmith.server.app import make_app
from tinsmith.server.parts import Parts
from tinsmith.server.settings import ServerSettings


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
        self.ledger.board.scheduler = SchedulerReport(is_ready=True)
        self.app = make_app(
            Parts(
                ledger=self.ledger,
                base_models={MODEL: model},
                settings=ServerSettings(**{"long_poll_s": 0.01, **settings}),
                secret=b"s" * 32,
            )
        )

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

        await self.app(scope, receive, send)
        return reply
