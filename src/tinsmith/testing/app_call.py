"""Calls the service's ASGI application, and gives its answer as a reply that faults can change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tinsmith.service.api.api_call import StreamedReply
from tinsmith.service.http.edge import Message
from tinsmith.service.http.server import AsgiApp
from tinsmith.testing.exchange_seam import Incoming
from tinsmith.wire.exchange import HttpReply


class AppCall:
    """One request on its way through an application.

    Args:
        app: As ASGI has it.
        incoming: The request.
        path: Its path as the application knows it.
        headers: Its headers.
    """

    def __init__(
        self, app: AsgiApp, incoming: Incoming, path: str, headers: dict[str, str]
    ) -> None:
        self._body = incoming.body
        self._has_left = asyncio.Event()
        self._is_read = False
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self._scope = {
            **incoming.scope,
            "path": path,
            "raw_path": path.encode("latin-1"),
            "headers": [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers.items()],
        }
        self._app = app
        self._task: asyncio.Task[None] | None = None

    async def reply(self) -> HttpReply | StreamedReply:
        """The answer: whole, or in pieces if the application sends it so.

        If this is cancelled, or the pieces are closed, the application is told that its client has
        left, and is waited for.
        """
        self._task = asyncio.create_task(self._run())
        is_streamed = False
        try:
            start = await self._next()
            headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in start["headers"]}
            first = await self._next()
            is_streamed = first.get("more_body", False)
        finally:
            if not is_streamed:
                await self._leave()
        if is_streamed:
            return StreamedReply(start["status"], headers, self._pieces(first))
        return HttpReply(start["status"], headers, [first.get("body", b"")])

    async def _pieces(self, message: Message) -> AsyncIterator[bytes]:
        try:
            yield message.get("body", b"")
            while message.get("more_body", False):
                message = await self._next()
                yield message.get("body", b"")
        finally:
            await self._leave()

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self._sent.put)

    async def _next(self) -> Message:
        """The next message of the application; raises what ended it."""
        assert self._task is not None
        getting = asyncio.create_task(self._sent.get())
        try:
            await asyncio.wait((getting, self._task), return_when=asyncio.FIRST_COMPLETED)
            if not getting.done() and self._sent.empty():
                await self._task
                raise ConnectionAbortedError("the service sent no response")
            return await getting
        finally:
            getting.cancel()

    async def _leave(self) -> None:
        self._has_left.set()
        if self._task is not None:
            await asyncio.gather(asyncio.shield(self._task), return_exceptions=True)

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}
