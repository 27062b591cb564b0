"""One call as its handler sees it, and what a handler may return.

A module in `routes/` has a dict `HANDLERS`, from names of endpoints to handlers. A handler is
`async def name(call: ApiCall) -> Answer`; an error that it raises becomes the reply.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.errors import NotFoundError
from tinsmith.service.api.api_settings import ApiSettings
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import TenantId
from tinsmith.types.buffers import Memory
from tinsmith.types.record import Frozen, Record
from tinsmith.wire.endpoint_types import Endpoint, Format
from tinsmith.wire.exchange import HttpReply

if TYPE_CHECKING:
    from tinsmith.service.api.context import ApiContext


@dataclasses.dataclass(frozen=True)
class StreamedReply:
    """An answer whose body is produced while it is sent.

    The pieces are closed when the client leaves. They must add up to the `Content-Length` header if
    there is one; otherwise they are sent in chunks.
    """

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]


Answer: TypeAlias = Record | Frozen | HttpReply | StreamedReply | None
"""A value is encoded as JSON, None is 204, the others are sent as they are."""

Handler: TypeAlias = "Callable[[ApiCall], Awaitable[Answer]]"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ApiCall:
    """One decoded request of an authenticated tenant."""

    context: ApiContext
    endpoint: Endpoint
    request: Any
    """Of the endpoint's type."""
    tenant_id: TenantId
    """Empty for endpoints that need no credential."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Memory = b""
    """As received, decompressed."""
    pieces: AsyncIterator[Memory | None] | None = None
    """The body as it arrives, for endpoints that take a stream; the last is None if the client left
    before its end."""
    format: Format = Format.JSON
    call_id: str = ""
    """The name of this exchange in logs and in the `X-Request-Id` header."""
    base_url: str = ""
    """How the client addressed the service: scheme, host and prefix, before `/api/v1`."""
    left: Callable[[], asyncio.Future[None]] = lambda: asyncio.get_running_loop().create_future()
    """A future that completes when the client has left. A handler that waits for long calls this
    once, and cancels the future in the end."""

    @property
    def ledger(self) -> Ledger:
        """The durable record."""
        return self.context.ledger

    @property
    def store(self) -> CheckpointStore:
        """Saved weights; raises `NotFoundError` in a service without checkpoints."""
        if self.context.store is None:
            raise NotFoundError("this service has no checkpoints")
        return self.context.store

    @property
    def settings(self) -> ApiSettings:
        """Limits and times."""
        return self.context.settings
